//! Cases of products of two matrices of FP4, and of the kernels before them.

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use microscale::formats::{E2m1, E4m3, E8m0, fp4_dot};
use microscale::{Activation, Dtype, Format, GlobalScale, QuantizedTensor, ScaleLayout, Words};
use microscale_executor::{Argument, Buffer};
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::fp4::{self, Decoders, Fp4Params};
use microscale_kernels_abi::gemm::packing;
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams};
use microscale_kernels_abi::gemm::stage::ScalePieces;
use microscale_kernels_abi::{ApplyGlobal, Epilogue, GemmConfig, GlobalSlot, KernelId, Mainloop, ScaleGrid};
use microscale_test_support::operands::{Scales, row_of, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Bound, ExactProducts};

use super::case::{MOST_SHARED, Prepared, argument, no_experts};
use super::cases::Case;
use super::experts::{Counts, UNTOUCHED, plan, route};
use super::gemm::{Multiplication, add_cases};
use super::steps::{Fused, STEPS};
use super::weights::{kernel_of, shape};

/// How kernels apply the factors of sums.
const FACTOR: u32 = ApplyGlobal::Multiplier as u32;

/// A product of two matrices of FP4, and how it is launched.
#[derive(Clone, Copy, Debug)]
struct Fp4Case {
    rows: usize,
    cols: usize,
    tokens: usize,
    thread_blocks: u32,
    stages: u32,
    scales: Scales,
    layout: ScaleLayout,
    alpha: f32,
}

const CASE: Fp4Case = Fp4Case {
    rows: 1,
    cols: 64,
    tokens: 1,
    thread_blocks: 1,
    stages: 2,
    scales: Scales::Common,
    layout: ScaleLayout::Linear,
    alpha: 1.0,
};

/// One work tile and several, whole ones and split ones; rows, columns and tokens that end within a
/// tile, a k-step or a block; fewer K-iterations than stages, and more.
const CASES: [Fp4Case; 14] = [
    CASE,
    Fp4Case { rows: 16, cols: 128, tokens: 16, thread_blocks: 4, stages: 3, ..CASE },
    Fp4Case { rows: 300, cols: 192, tokens: 17, thread_blocks: 3, layout: ScaleLayout::Swizzled, ..CASE },
    Fp4Case { rows: 20, cols: 1152, tokens: 5, scales: Scales::Any, stages: 3, ..CASE },
    Fp4Case { rows: 40, cols: 1020, tokens: 9, thread_blocks: 3, scales: Scales::Any, ..CASE },
    Fp4Case { rows: 70, cols: 640, tokens: 40, thread_blocks: 5, stages: 4, alpha: -0.75, ..CASE },
    Fp4Case { rows: 520, cols: 256, tokens: 8, ..CASE },
    Fp4Case { rows: 33, cols: 352, tokens: 65, thread_blocks: 2, scales: Scales::Numbers, ..CASE },
    Fp4Case { rows: 6, cols: 2272, tokens: 30, stages: 8, layout: ScaleLayout::Swizzled, ..CASE },
    Fp4Case { rows: 260, cols: 704, tokens: 130, thread_blocks: 3, stages: 3, ..CASE },
    Fp4Case { rows: 10, cols: 96, tokens: 3, scales: Scales::Smallest, ..CASE },
    Fp4Case {
        rows: 10,
        cols: 4160,
        tokens: 2,
        thread_blocks: 7,
        scales: Scales::Largest,
        alpha: 1e-9,
        ..CASE
    },
    Fp4Case { rows: 130, cols: 32, tokens: 270, thread_blocks: 2, ..CASE },
    Fp4Case { rows: 256, cols: 416, tokens: 128, layout: ScaleLayout::Swizzled, alpha: 3.0, ..CASE },
];

/// Products with an epilogue.
const WITH_STEPS: [Fp4Case; 2] = [
    Fp4Case { rows: 38, cols: 256, tokens: 21, thread_blocks: 2, ..CASE },
    Fp4Case { rows: 290, cols: 448, tokens: 70, thread_blocks: 3, stages: 3, alpha: 0.5, ..CASE },
];

/// Operands of a product.
struct Operands {
    x: QuantizedTensor,
    weights: QuantizedTensor,
}

impl Operands {
    fn draw(format: Format, case: Fp4Case, seed: u64) -> Self {
        let Fp4Case { rows, tokens, scales, .. } = case;
        // NVFP4's rows of scales are whole words.
        let cols = match format {
            Format::Nvfp4 => case.cols.next_multiple_of(64) - case.cols % 2,
            _ => case.cols,
        };
        // Weights and activations have global scales of different directions.
        let x = tensor(format, tokens, cols, scales, 3 * seed + seed % 2);
        Self { x, weights: tensor(format, rows, cols, scales, 3 * seed + 1 - seed % 2) }
    }

    /// Returns the sums as a launch computes them.
    fn sums(&self, config: GemmConfig, gemm: &GemmParams) -> Vec<f32> {
        let size = [self.weights.rows(), self.x.rows()];
        let columns = (config.packs() * PACK_COLUMNS) as usize;
        sums_of_parts(config, gemm, size, |token, row, range| self.part(token, row, range, columns))
    }

    /// Returns the sum of a range of K-iterations of `columns` columns each.
    fn part(&self, token: usize, row: usize, range: &Range<usize>, columns: usize) -> f32 {
        let format = self.x.format();
        let of = |tensor, row| {
            let (codes, scales): (&[u8], &[u8]) = row_of(tensor, row);
            let in_k_iteration = columns / format.block();
            let blocks = range.start * in_k_iteration..scales.len().min(range.end * in_k_iteration);
            let bytes = format.block_bytes();
            (&codes[blocks.start * bytes..blocks.end * bytes], &scales[blocks])
        };
        fp4_dot::row(format, of(&self.x, token), of(&self.weights, row))
    }
}

/// Returns the sums of rows and tokens, one token after the other, as a launch computes them: whole
/// work tiles by the definition, `part` of all K-iterations, and split ones as the f32 sums of their
/// parts.
pub(super) fn sums_of_parts(
    config: GemmConfig,
    gemm: &GemmParams,
    [rows, tokens]: [usize; 2],
    part: impl Fn(usize, usize, &Range<usize>) -> f32,
) -> Vec<f32> {
    let mut sums = vec![f32::NAN; rows * tokens];
    let tiles = rows.div_ceil(config.tile_m as usize) * tokens.div_ceil(config.tile_n as usize);
    for tile in 0..tiles as u32 {
        let [row_tile, token_tile] = gemm.schedule.row_and_token_tile(tile);
        let of = |tile: u32, of_tile: u32, all: usize| {
            let first = (tile * of_tile) as usize;
            first..all.min(first + of_tile as usize)
        };
        let parts = parts(gemm, tile);
        for token in of(token_tile, config.tile_n, tokens) {
            for row in of(row_tile, config.tile_m, rows) {
                let part = |range: &Range<usize>| part(token, row, range);
                sums[token * rows + row] = match &parts[..] {
                    [whole] => part(whole),
                    parts => parts.iter().map(part).fold(0.0, |sum, part| sum + part),
                };
            }
        }
    }
    sums
}

/// Returns the factor of a product's sums.
fn factor(x: &QuantizedTensor, weights: &QuantizedTensor, alpha: f32) -> f32 {
    fp4_dot::factor(alpha, [x, weights].map(QuantizedTensor::global_scale))
}

/// Returns the K-iterations of each thread block that has a part of a work tile.
fn parts(gemm: &GemmParams, tile: u32) -> Vec<Range<usize>> {
    let (k_iterations, schedule) = (gemm.k_iterations.divisor as u32, &gemm.schedule);
    let sharer = |i: u32| match tile.checked_sub(schedule.first_shared) {
        None => 0,
        Some(shared) => schedule.sharer(shared * k_iterations + i),
    };
    let all: Vec<u32> = (0..k_iterations).map(sharer).collect();
    let mut start = 0;
    let chunks = all.chunk_by(|a, b| a == b).map(|chunk| {
        let range = start..start + chunk.len();
        start = range.end;
        range
    });
    chunks.collect()
}

/// The scales in a layout, and their positions.
pub(super) fn scales_in(layout: ScaleLayout, tensor: &QuantizedTensor) -> (Vec<u8>, ScaleGrid) {
    let blocks = tensor.blocks_per_row() as u64;
    let scales = tensor.convert_layout(layout).scales().to_vec();
    let grid = match layout {
        ScaleLayout::Linear => ScaleGrid::linear(blocks),
        ScaleLayout::Swizzled => ScaleGrid::swizzled(blocks),
    };
    (scales, grid)
}

/// Operands of the kernels before a product.
struct Before {
    /// Codes and scales of the activations, their global scale, and the weights'.
    read: [Argument; 4],
    factors: Buffer,
    params: Fp4Params,
}

/// Prepares activations, and the global scales of all matrices of weights, for the kernels before a
/// product. The activations have the global scale of `globals`, or one for each matrix. Factors are
/// checked afterwards.
fn before(
    case: &mut Prepared,
    x: &QuantizedTensor,
    globals: &[&QuantizedTensor],
    weights: &[&QuantizedTensor],
    layout: ScaleLayout,
    alpha: f32,
) -> Before {
    let (scales, grid) = scales_in(layout, x);
    let codes = case.memory.allocate_from_aligned("codes of x", x.codes(), 16);
    let scales = case.memory.allocate_from("scales of x", &scales);
    let (activation_slots, _) = case.global_scales(globals);
    let (weight_slots, _) = case.global_scales(weights);
    let factors = case.memory.allocate_aligned("factors", weights.len() * size_of::<GlobalSlot>(), 4);
    let apply = |tensor: &QuantizedTensor| match tensor.global_scale() {
        Some(GlobalScale::Divisor(_)) => ApplyGlobal::Divisor,
        Some(GlobalScale::Multiplier(_)) => ApplyGlobal::Multiplier,
        None => ApplyGlobal::Absent,
    };
    let params = Fp4Params {
        scales: grid,
        eights: (x.codes().len() / 4) as u64,
        alpha,
        matrices: weights.len() as u32,
        activation_slots: globals.len() as u32,
        weights: apply(weights[0]),
        activations: apply(globals[0]),
        reserved: 0,
    };
    let of_all = globals.iter().cycle().zip(weights);
    let right: Vec<f32> = of_all.map(|(x, weights)| factor(x, weights, alpha)).collect();
    case.checks.push(Box::new(move |memory| {
        // Only the factors are written.
        let bytes = memory.bytes_or(factors, 0);
        for (slot, right) in bytes.chunks(size_of::<GlobalSlot>()).zip(&right) {
            let found =
                f32::from_le_bytes(*slot[offset_of!(GlobalSlot, scale)..].first_chunk().expect("four bytes"));
            if found.to_bits() != right.to_bits() {
                return Err(format!("a factor is {found:e}, not {right:e}"));
            }
        }
        Ok(())
    }));
    Before { read: [codes.into(), scales.into(), activation_slots, weight_slots], factors, params }
}

/// Packs activations and multiplies. `T` is the dtype of results.
fn multiplying<T: Exact + Activation>(
    operands: &Arc<Operands>,
    config: GemmConfig,
    case: Fp4Case,
    fused: Option<Fused>,
) -> Prepared {
    let Fp4Case { thread_blocks, stages, layout, alpha, .. } = case;
    let Operands { x, weights } = &**operands;
    let (format, tokens) = (x.format(), x.rows() as u64);
    let thread_blocks = thread_blocks * config.row_sharers();
    let mut case = Prepared::new();
    let Before { read, factors, params } = before(&mut case, x, &[x], &[weights], layout, alpha);
    let cols = (x.blocks_per_row() * format.block()) as u64;
    let pack = PackParams::new(config, cols, tokens, true).expect("a small launch");
    let packed = case.memory.allocate_aligned("packed", pack.bytes() as usize, 16);
    let [plan, from, to] = no_experts();
    let written = [packed.into(), factors.into(), plan.clone(), from.clone()];
    let arguments = [&read[..], &written, &[argument(&pack), argument(&params)]].concat();
    let kernel = config.fp4_pack().expect("a format of products");
    case.step(kernel.kernel().name, u64::from(pack.thread_blocks), arguments);

    let stage = config.stage(ScalePieces::MOST);
    let shared = stage.shared_bytes(stages.min(stage.count(MOST_SHARED)));
    let gemm =
        GemmParams::new(config, shape(weights), tokens, thread_blocks, shared).expect("a small launch");
    let codes = case.memory.allocate_from_aligned("codes", weights.codes(), 16);
    let scales = case.memory.allocate_from_aligned("scales", weights.scales(), 16);
    let count = weights.rows() * x.rows();
    let [bytes, each] = fused.as_ref().map_or([count * size_of::<T>(), size_of::<T>()], |fused| fused.bytes);
    let out = case.memory.allocate_aligned("out", bytes, each as u64);
    let ([bias, residual], steps) = Fused::arguments(fused.as_ref(), &mut case);
    Multiplication {
        config,
        gemm: &gemm,
        thread_blocks: gemm.thread_blocks(config),
        codes: (codes, 1),
        weights: [scales.into(), factors.into()],
        apply: FACTOR.into(),
        activations: 0u64.into(),
        packed: packed.into(),
        out,
        routed: [plan, from, to],
        epilogue: ([bias, residual], steps),
    }
    .launch(&mut case);
    let operands = Arc::clone(operands);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let sums = operands.sums(config, &gemm);
        let factor = factor(&operands.x, &operands.weights, alpha);
        let Some(fused) = &fused else {
            return check::<T>(&bytes, &sums, factor);
        };
        let scaled = sums.iter().map(|sum| f64::from(*sum) * f64::from(factor));
        let exact = ExactProducts::of_sums(operands.weights.rows(), scaled);
        fused.check(&bytes, &exact, &Bound::NONE)
    }));
    case
}

/// Checks results without an epilogue. Sums must have their bits where the factor is 1. Kernels
/// round their products with another factor to f32 first, so that others may be the neighbour.
pub(super) fn check<T: Exact + Activation>(bytes: &[u8], sums: &[f32], factor: f32) -> Result<(), String> {
    let found: Vec<T> = bytemuck::pod_collect_to_vec(bytes);
    for (i, (found, sum)) in found.iter().zip(sums).enumerate() {
        let right = T::round_f64(f64::from(*sum) * f64::from(factor));
        let apart = found.bits().abs_diff(right.bits());
        let most = u32::from(factor != 1.0 && right.to_f64().is_finite());
        if apart > most {
            return Err(format!("{found:?} is not {right:?}, the result of {sum:e}: number {i}"));
        }
    }
    Ok(())
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        let mut add = |case: Fp4Case, seed: u64, number: Option<usize>| {
            let configs = GemmConfig::for_fp4(format, T::DTYPE);
            let what = format!("{case:?}, {:?}", number.map(|number| STEPS[number]));
            let draw = move || Operands::draw(format, case, seed);
            add_cases(cases, configs, what, draw, move |operands, config| {
                let fused = number.map(|number| Fused::new::<T>(number, case.rows, case.tokens));
                multiplying::<T>(operands, config, case, fused)
            });
        };
        for (i, case) in (0..).zip(CASES) {
            add(case, i, None);
        }
        for (i, case) in (0..).zip(WITH_STEPS) {
            (0..STEPS.len()).for_each(|number| add(case, i, Some(number)));
        }
    }
}

/// Experts' weights, and the activations of all pairs of a token and an expert.
struct OfExperts {
    x: QuantizedTensor,
    /// Tensors with the global scales of the activations: one, or one per expert.
    globals: Vec<QuantizedTensor>,
    experts: Vec<QuantizedTensor>,
    counts: Counts,
}

impl OfExperts {
    fn draw(format: Format, rows: usize, counts: Counts, seed: u64) -> Self {
        // One K-iteration, which cannot be split.
        let cols = PACK_COLUMNS as usize;
        let experts = (0..counts.of_experts.len() as u64)
            .map(|expert| tensor(format, rows, cols, Scales::Any, seed + 3 * expert))
            .collect();
        let x = tensor(format, counts.pairs(), cols, Scales::Common, seed + 1);
        let own = |expert| tensor(format, 1, cols, Scales::Common, seed + 1 + 3 * expert);
        let globals = match seed % 2 {
            0 => vec![x.clone()],
            _ => (0..counts.of_experts.len() as u64).map(own).collect(),
        };
        Self { x, globals, experts, counts }
    }
}

/// Sorts pairs, plans, packs and multiplies with experts' weights. Activations and results lie in
/// the order of the pairs. The schedule has work for `at_once` thread blocks, or clusters that
/// share rows.
fn multiplying_experts(of: &Arc<OfExperts>, config: GemmConfig, at_once: u32) -> Prepared {
    let thread_blocks = at_once * config.row_sharers();
    let OfExperts { x, globals, experts, counts } = &**of;
    let mut case = Prepared::new();
    let pairs = counts.pairs();
    let chosen = counts.chosen(pairs as u64);
    let routed = route(&mut case, &chosen, experts.len(), 1);
    let shape = shape(&experts[0]);
    let sorted = Sorted { pairs: pairs as u32, top_k: 1 };
    let mut grid = PlanGrid::new(experts.len() as u64, sorted, 1, config.tile_n).expect("a small launch");
    grid.row_tiles = shape.rows.div_ceil(u64::from(config.tile_m)) as u32;
    (grid.k_iterations, grid.at_once) = (1, at_once);
    let plan = plan(&mut case, &routed, *counts, grid);

    let tensors: Vec<&QuantizedTensor> = experts.iter().collect();
    let globals: Vec<&QuantizedTensor> = globals.iter().collect();
    let Before { read, factors, params } =
        before(&mut case, x, &globals, &tensors, ScaleLayout::Swizzled, 0.5);
    let tokens = u64::from(grid.most_tiles) * u64::from(config.tile_n);
    let pack = PackParams::new(config, shape.cols, tokens, true).expect("a small launch");
    let packed = case.memory.allocate_aligned("packed", pack.bytes() as usize, 16);
    let written = [packed, factors, plan, routed.pairs].map(Argument::from);
    let arguments = [&read[..], &written, &[argument(&pack), argument(&params)]].concat();
    let kernel = config.fp4_pack().expect("a format of products");
    case.step(kernel.kernel().name, u64::from(pack.thread_blocks), arguments);

    let all = |of: fn(&QuantizedTensor) -> &[u8]| experts.iter().flat_map(of).copied().collect::<Vec<_>>();
    let codes = case.memory.allocate_from_aligned("codes", &all(QuantizedTensor::codes), 16);
    let scales = case.memory.allocate_from_aligned("scales", &all(QuantizedTensor::scales), 16);
    let rows = experts[0].rows();
    let out = case.memory.allocate_from_aligned("out", &vec![UNTOUCHED; pairs * rows * 4], 4);
    let shared = config.shared_bytes(MOST_SHARED);
    let gemm = GemmParams::new(config, shape, tokens, thread_blocks, shared).expect("a small launch");
    let none = || Argument::from(0u64);
    let epilogue = Epilogue { steps: Epilogue::F32_RESULTS, ..Epilogue::NONE };
    Multiplication {
        config,
        gemm: &gemm,
        thread_blocks,
        codes: (codes, experts.len()),
        weights: [scales.into(), factors.into()],
        apply: FACTOR.into(),
        activations: none(),
        packed: packed.into(),
        out,
        routed: [plan.into(), routed.pairs.into(), routed.pairs.into()],
        epilogue: ([none(), none()], argument(&epilogue)),
    }
    .launch(&mut case);
    let of = Arc::clone(of);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        for (pair, (found, expert)) in bytes.chunks(rows * 4).zip(&chosen).enumerate() {
            let Some(weights) = of.experts.get(*expert as usize) else {
                if found.iter().any(|byte| *byte != UNTOUCHED) {
                    return Err(format!("pair {pair} has no expert, and has results"));
                }
                continue;
            };
            let sum = |row: usize| fp4_dot::row(of.x.format(), row_of(&of.x, pair), row_of(weights, row));
            let sums: Vec<f32> = (0..rows).map(sum).collect();
            let global = &of.globals[*expert as usize % of.globals.len()];
            let checked = check::<f32>(found, &sums, factor(global, weights, 0.5));
            checked.map_err(|wrong| format!("{wrong}, pair {pair}, expert {expert}"))?;
        }
        Ok(())
    }));
    case
}

/// Adds every case of products of experts' weights.
pub(crate) fn fp4_experts_cases(cases: &mut Vec<Case>) {
    let all = [
        (40, Counts { of_experts: &[2, 0, 9, 1], of_none: 2 }, 2),
        (300, Counts { of_experts: &[0, 33, 0, 1, 140], of_none: 1 }, 5),
    ];
    for format in Format::MULTIPLIED {
        for (i, (rows, counts, at_once)) in (0..).zip(all) {
            for config in GemmConfig::for_fp4(format, Dtype::Bf16) {
                let make = move || {
                    let of = Arc::new(OfExperts::draw(format, rows, counts, i));
                    multiplying_experts(&of, config, at_once)
                };
                let what = format!("{config}, {rows} rows, {counts:?}");
                let mainloop = Some(config.mainloop);
                cases.push(Case { mainloop, ..Case::new(what, kernel_of(config).into(), make) });
            }
        }
    }
}

/// The value of a code under a scale; NaN for NaN.
fn value(format: Format, code: u8, scale: u8) -> f64 {
    let scale = match format {
        Format::Nvfp4 => E4m3::from_bits(scale).to_f32(),
        _ => E8m0::from_bits(scale).to_f32(),
    };
    f64::from(E2m1::from_bits(code).to_f32()) * f64::from(scale)
}

/// Decodes activations, and expects their exact values.
fn decoding<T: Exact + Activation>(kernel: KernelId, operands: &Operands, layout: ScaleLayout) -> Prepared {
    let mut case = Prepared::new();
    let Before { read, factors, params } =
        before(&mut case, &operands.x, &[&operands.x], &[&operands.weights], layout, 1.5);
    let x = &operands.x;
    let (format, block) = (x.format(), x.format().block());
    let out = case.memory.allocate_aligned("decoded", x.codes().len() * 4, 16);
    let arguments = [&read[..], &[out.into(), factors.into(), argument(&params)]].concat();
    case.step(kernel.kernel().name, params.eights, arguments);
    let codes = x.codes().iter().flat_map(|byte| [byte & 15, byte >> 4]);
    let values: Vec<f64> =
        codes.enumerate().map(|(i, code)| value(format, code, x.scales()[i / block])).collect();
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let found: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
        for (i, (found, right)) in found.iter().zip(&values).enumerate() {
            let overflows = right.abs() > T::LARGEST;
            let equal = found.bits() == T::round_f64(*right).bits();
            if !equal || !overflows && !right.is_nan() && found.to_f64() != *right {
                return Err(format!("{found:?} is not {right:e}: element {i}"));
            }
        }
        Ok(())
    }));
    case
}

/// Decodes and packs activations, by one kernel and by two.
fn decoding_packed(
    Decoders { rows, packed, dtype }: Decoders,
    operands: &Operands,
    layout: ScaleLayout,
    config: GemmConfig,
) -> Prepared {
    let mut case = Prepared::new();
    let Before { read, factors, params } =
        before(&mut case, &operands.x, &[&operands.x], &[&operands.weights], layout, 1.5);
    let x = &operands.x;
    let decoded = case.memory.allocate_aligned("decoded", x.codes().len() * 4, 16);
    let arguments = [&read[..], &[decoded.into(), factors.into(), argument(&params)]].concat();
    case.step(rows.kernel().name, params.eights, arguments);
    let cols = x.blocks_per_row() * x.format().block();
    let pack = PackParams::new(config, cols as u64, x.rows() as u64, true).expect("a small launch");
    let [by_one, by_two] = ["packed by one", "packed by two"]
        .map(|name| case.memory.allocate_aligned(name, pack.bytes() as usize, 16));
    let [plan, from, _] = no_experts();
    let arguments = vec![decoded.into(), by_two.into(), plan.clone(), from.clone(), argument(&pack)];
    let kernel = packing::pack(dtype).expect("16 bits").kernel().name;
    case.step(kernel, u64::from(pack.thread_blocks), arguments);
    let rest = [by_one.into(), factors.into(), plan, from, argument(&pack), argument(&params)];
    case.step(packed.kernel().name, u64::from(pack.thread_blocks), [&read[..], &rest].concat());
    case.checks.push(Box::new(move |memory| {
        let [found, right] =
            [by_one, by_two].map(|buffer| memory.bytes(buffer).map_err(|error| error.to_string()));
        if found? == right? { Ok(()) } else { Err("other bytes than by two kernels".into()) }
    }));
    case
}

fn decoding_cases<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        let decoders = fp4::decoders(format, T::DTYPE).filter(|decoders| decoders.dtype == T::DTYPE);
        let Some(decoders) = decoders else { continue };
        let kernel = decoders.rows;

        let configs = GemmConfig::for_operands(format, T::DTYPE)
            .filter(|config| !config.mainloop.is_gemv() && !config.packs_activations());
        for config in configs.filter(|config| config.cluster == 1) {
            for (i, case) in (0..).zip(CASES.iter().filter(|case| case.tokens * case.cols < 1 << 14)) {
                let (case, layout) = (*case, [ScaleLayout::Linear, ScaleLayout::Swizzled][i as usize % 2]);
                let make =
                    move || decoding_packed(decoders, &Operands::draw(format, case, i), layout, config);
                let name = decoders.packed.kernel().name.into();
                let case = Case::new(format!("{config}, {case:?}, {layout:?}"), name, make);
                cases.push(Case { mainloop: Some(config.mainloop), ..case });
            }
        }
        for (i, case) in (0..).zip(CASES.iter().filter(|case| case.rows * case.cols < 1 << 14)) {
            let (case, layout) = (*case, [ScaleLayout::Linear, ScaleLayout::Swizzled][i as usize % 2]);
            let make = move || decoding::<T>(kernel, &Operands::draw(format, case, i), layout);
            cases.push(Case::new(format!("{case:?}, {layout:?}"), kernel.kernel().name.into(), make));
        }
    }
}

/// Adds every case of these kernels.
pub(crate) fn fp4_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
    decoding_cases::<f16>(cases);
    decoding_cases::<bf16>(cases);
    fp4_experts_cases(cases);
    // The kernels that pack are a step of every product.
    for format in Format::MULTIPLIED {
        // The first tile of each mainloop.
        let of_mainloop =
            |mainloop| GemmConfig::for_fp4(format, Dtype::Bf16).find(|config| config.mainloop == mainloop);
        for config in Mainloop::ALL.into_iter().filter_map(of_mainloop) {
            let kernel = config.fp4_pack().expect("a format of products");
            for (i, case) in (0..).zip(CASES) {
                let what = format!("{}, {case:?}", format.word());
                let make = move || {
                    multiplying::<bf16>(&Arc::new(Operands::draw(format, case, i)), config, case, None)
                };
                let mainloop = Some(config.mainloop);
                cases.push(Case { mainloop, ..Case::new(what, kernel.kernel().name.into(), make) });
            }
        }
    }
}
