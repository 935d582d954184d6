//! Tests experts' weights in another library's memory, and the orders of rows.

use half::bf16;
use microscale::formats::nvfp4::Direction;
use microscale::gpu::{DeviceExperts, DeviceExpertsView, DeviceRouting, ExpertRows, Gpu};
use microscale::{Dtype, Error, Format, GlobalScale, QuantizedTensor};
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::weights::{Activations, activations};

use super::raw::Raw;

const COUNT: usize = 5;
const TOP_K: usize = 3;

/// Returns experts without global scales, or with ones of the same direction.
fn experts(format: Format, [rows, cols]: [usize; 2], seed: u64) -> Vec<QuantizedTensor> {
    (0..COUNT as u64).map(|expert| tensor(format, rows, cols, Scales::Common, seed + 3 * expert)).collect()
}

/// Concatenates the bytes of all experts.
fn all(experts: &[QuantizedTensor], of: fn(&QuantizedTensor) -> &[u8]) -> Vec<u8> {
    experts.iter().flat_map(of).copied().collect()
}

/// Returns the direction of the experts' global scales, and their numbers.
fn global_scales(experts: &[QuantizedTensor]) -> Option<(Direction, Vec<f32>)> {
    let all: Option<Vec<_>> = experts.iter().map(QuantizedTensor::global_scale).collect();
    let all = all?;
    Some((all[0].direction(), all.into_iter().map(GlobalScale::value).collect()))
}

/// Experts by address, with slots for global scales if they have any.
struct RawExperts {
    codes: Raw,
    scales: Raw,
    slots: Option<(Direction, Raw)>,
}

impl RawExperts {
    fn of(gpu: &Gpu, experts: &[QuantizedTensor]) -> Self {
        let stream = gpu.stream();
        let [codes, scales] = [QuantizedTensor::codes, QuantizedTensor::scales].map(|of| all(experts, of));
        let slots = global_scales(experts).map(|(direction, numbers)| {
            // The rest of a slot is not read.
            let mut words = vec![u32::MAX; COUNT * DeviceExpertsView::GLOBAL_SLOT_WORDS];
            let firsts = words.iter_mut().step_by(DeviceExpertsView::GLOBAL_SLOT_WORDS);
            firsts.zip(numbers).for_each(|(word, number)| *word = number.to_bits());
            (direction, Raw::of(stream, bytemuck::cast_slice(&words)))
        });
        Self { codes: Raw::of(stream, &codes), scales: Raw::of(stream, &scales), slots }
    }

    fn view(&self, experts: &[QuantizedTensor]) -> DeviceExpertsView<'_> {
        let (codes, scales) = (self.codes.address(), self.scales.address());
        // SAFETY: `self.codes` and `self.scales` hold `COUNT` matrices of this shape, and `self` is
        // borrowed for the view's lifetime.
        let view =
            unsafe { DeviceExpertsView::from_raw_parts(experts[0].shape(), COUNT, codes, scales) }.unwrap();
        match &self.slots {
            Some((direction, slots)) => view.with_global_slots(*direction, slots.view()).unwrap(),
            None => view,
        }
    }
}

/// Returns results of sorted pairs by the chosen kernels.
fn multiplied(
    gpu: &Gpu,
    experts: DeviceExpertsView<'_>,
    x: &[bf16],
    routing: &DeviceRouting,
    rows: ExpertRows,
) -> Vec<u16> {
    let stream = gpu.stream();
    let x = Raw::of(stream, bytemuck::cast_slice(x));
    let mut out = Raw::used(stream, 2 * routing.pairs() * experts.shape().rows);
    let mut workspace = gpu.experts_workspace(stream, experts, routing.pairs(), Dtype::Bf16).unwrap();
    let plan = gpu.linear_experts::<bf16, bf16>(experts).plan(routing.pairs()).unwrap();
    plan.run(stream, x.view(), routing, rows, &mut workspace, out.view_mut()).unwrap();
    out.read_as()
}

/// A product must have the same bits for any source of weights, and rows must follow the order.
pub(crate) fn are_multiplied_in_every_order(gpu: &Gpu) {
    let stream = gpu.stream();
    for (seed, format) in [(0, Format::Nvfp4), (1, Format::Nvfp4), (2, Format::Nvfp4), (4, Format::Mxfp4)] {
        // Experts smaller than the slot of a global scale, and larger ones.
        for [rows, cols] in [[1, 32], [96, 1024]] {
            let experts = experts(format, [rows, cols], seed);
            let owned = DeviceExperts::from_host(stream, &experts).unwrap();
            let raw = RawExperts::of(gpu, &experts);
            let [codes, scales] = [QuantizedTensor::codes, QuantizedTensor::scales]
                .map(|of| stream.clone_htod(&all(&experts, of)).unwrap());
            let mut taken =
                DeviceExperts::from_parts(stream, experts[0].shape(), COUNT, codes, scales).unwrap();
            if let Some((direction, numbers)) = global_scales(&experts) {
                let numbers = Raw::of(stream, bytemuck::cast_slice(&numbers));
                taken = taken.with_global_scales(stream, direction, numbers.view::<f32>()).unwrap();
            }
            for tokens in [1, 70] {
                let mut random = fastrand::Rng::with_seed(tokens as u64);
                // The last number is not an expert.
                let of_token = || random.choose_multiple(0..=COUNT as u32, TOP_K);
                let chosen: Vec<u32> = std::iter::repeat_with(of_token).take(tokens).flatten().collect();
                let mut routing = DeviceRouting::zeros(stream, COUNT, chosen.len()).unwrap();
                gpu.route_on(stream, &stream.clone_htod(&chosen).unwrap(), TOP_K, &mut routing).unwrap();

                let mut sorted: Vec<_> =
                    (0..chosen.len()).filter(|pair| (chosen[*pair] as usize) < COUNT).collect();
                sorted.sort_by_key(|pair| chosen[*pair]);
                let of_tokens: Vec<bf16> = activations(tokens * cols, Activations::Common, &mut random);
                let row = |pair: usize| &of_tokens[pair / TOP_K * cols..][..cols];
                let of_pairs: Vec<_> = (0..chosen.len()).flat_map(row).copied().collect();
                let mut of_sorted: Vec<_> = sorted.iter().flat_map(|pair| row(*pair)).copied().collect();
                of_sorted.resize(of_pairs.len(), bf16::NAN);

                let gathered = multiplied(gpu, owned.view(), &of_tokens, &routing, ExpertRows::Gathered);
                let mut by_pair = vec![0x5B5B; gathered.len()];
                for (sorted, pair) in sorted.iter().enumerate() {
                    by_pair[pair * rows..][..rows].copy_from_slice(&gathered[sorted * rows..][..rows]);
                }
                for view in [owned.view(), raw.view(&experts), taken.view()] {
                    for (order, x, expected) in [
                        (ExpertRows::Gathered, &of_tokens, &gathered),
                        (ExpertRows::Sorted, &of_sorted, &gathered),
                        (ExpertRows::Scattered, &of_sorted, &by_pair),
                        (ExpertRows::Indexed, &of_tokens, &by_pair),
                        (ExpertRows::Paired, &of_pairs, &by_pair),
                    ] {
                        let found = multiplied(gpu, view, x, &routing, order);
                        assert!(found == *expected, "{order:?}, {format}, {rows}×{cols}, {tokens} tokens");
                    }
                }
            }
            raw.codes.read();
            raw.scales.read();
        }
    }
}

pub(crate) fn of_mismatched_views_are_refused(gpu: &Gpu) {
    let stream = gpu.stream();
    let experts = experts(Format::Nvfp4, [16, 256], 0);
    let shape = experts[0].shape();
    let raw = RawExperts::of(gpu, &experts);
    let mut routing = DeviceRouting::zeros(stream, COUNT, TOP_K).unwrap();
    gpu.route_on(stream, &stream.clone_htod(&[0u32; TOP_K]).unwrap(), TOP_K, &mut routing).unwrap();
    let x = Raw::zeros(stream, 2 * 256);
    let mut out = Raw::used(stream, 2 * TOP_K * 16);
    for (codes, scales) in [(8, 0), (0, 4)] {
        let (codes, scales) = (raw.codes.address() + codes, raw.scales.address() + scales);
        // SAFETY: the product refuses these addresses, so no kernel reads them.
        let view = unsafe { DeviceExpertsView::from_raw_parts(shape, COUNT, codes, scales) }.unwrap();
        let mut workspace = gpu.experts_workspace(stream, view, TOP_K, Dtype::Bf16).unwrap();
        let (x, rows) = (x.view::<bf16>(), ExpertRows::Gathered);
        let plan = gpu.linear_experts::<bf16, bf16>(view).plan(TOP_K).unwrap();
        let refused = plan.run(stream, x, &routing, rows, &mut workspace, out.view_mut());
        assert!(matches!(refused, Err(Error::Alignment { .. })), "{refused:?}");
    }
    assert!(out.read().iter().all(|byte| *byte == 0x5B));

    let buffers = || {
        [QuantizedTensor::codes, QuantizedTensor::scales]
            .map(|of| stream.clone_htod(&all(&experts, of)).unwrap())
    };
    let [codes, scales] = buffers();
    let refused = DeviceExperts::from_parts(stream, shape, COUNT + 1, codes, scales);
    assert!(matches!(refused, Err(Error::QuantizedLength { .. })), "{refused:?}");
    let [codes, scales] = buffers();
    let taken = DeviceExperts::from_parts(stream, shape, COUNT, codes, scales).unwrap();
    let few = stream.clone_htod(&[1f32; COUNT - 1]).unwrap();
    let refused = taken.with_global_scales(stream, Direction::Divisor, &few);
    assert!(matches!(refused, Err(Error::Length { found: 4, .. })), "{refused:?}");
    let [codes, scales] = buffers();
    let (codes, scales, slots) =
        DeviceExperts::from_parts(stream, shape, COUNT, codes, scales).unwrap().into_parts();
    let back = [codes, scales].map(|bytes| stream.clone_dtoh(&bytes).unwrap());
    assert_eq!(back, [all(&experts, QuantizedTensor::codes), all(&experts, QuantizedTensor::scales)]);
    assert_eq!(slots.len(), COUNT * DeviceExpertsView::GLOBAL_SLOT_WORDS);
}
