//! Measurements of quantizing activations and of KV caches on a GPU.

use half::bf16;
use microscale::gpu::cudarc::driver::CudaSlice;
use microscale::gpu::{
    DeviceActivations, DeviceIntegers, DeviceKvCacheMut, DeviceKvScales, DeviceQuantizedActivations,
    DeviceScales, DeviceSlots, Gpu, doing as failed,
};
use microscale::{ActivationInput, Result, quantize_activations};

use super::activation_workload::{ActivationWorkload, KV_SCALES, KvWorkload};
use super::gpu::in_rotation;
use super::measurement::Times;
use super::workload::{random, require_equal};

/// A matrix of activations with its outputs.
struct ActivationSet {
    values: CudaSlice<bf16>,
    residual: Option<CudaSlice<bf16>>,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
    f32_scales: CudaSlice<f32>,
}

/// Returns the median times of quantizing activations and of the copy.
pub(super) fn measure_activations(workload: &ActivationWorkload, gpu: &Gpu) -> Result<Times> {
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let (shape, columns, recipe) = (workload.shape, workload.columns(), &workload.recipe);
    let host = random::<bf16>(shape.elements(), 1);
    let residual = workload.adds.then(|| random::<bf16>(shape.rows * columns, 2));
    let weights = workload.weighs().then(|| random::<bf16>(columns, 3));
    let copying = failed("copying to the GPU");
    let weights_there =
        weights.as_ref().map(|weights| stream.clone_htod(weights)).transpose().map_err(&copying)?;
    let padded = recipe.layout.padded_rows(shape.rows);
    let [codes, scales, f32_scales] = recipe.lengths(shape.rows, padded, columns).unwrap_or_default();
    let set = || {
        let residual = residual.as_ref().map(|residual| stream.clone_htod(residual)).transpose();
        Ok(ActivationSet {
            values: stream.clone_htod(&host).map_err(&copying)?,
            residual: residual.map_err(&copying)?,
            codes: stream.alloc_zeros(codes.max(1)).map_err(&copying)?,
            scales: stream.alloc_zeros(scales.max(1)).map_err(&copying)?,
            f32_scales: stream.alloc_zeros(f32_scales.max(1)).map_err(&copying)?,
        })
    };
    let run = |set: &mut ActivationSet| {
        let input = DeviceActivations {
            residual: set.residual.as_mut().map(Into::into),
            weights: weights_there.as_ref().map(Into::into),
            scales: workload.scales.first().map_or(DeviceScales::None, |scale| DeviceScales::Host(*scale)),
            ..DeviceActivations::new(&set.values, shape)
        };
        let out = DeviceQuantizedActivations {
            codes: (&mut set.codes).into(),
            scales: (&mut set.scales).into(),
            f32_scales: (&mut set.f32_scales).into(),
        };
        gpu.quantize_activations_on(stream, input, recipe, out)
    };
    let check = |set: &ActivationSet| {
        // A residual is different after each run.
        if workload.adds {
            return Ok(());
        }
        let input = ActivationInput {
            weights: weights.as_deref(),
            scales: workload.scales,
            ..ActivationInput::new(&host, shape)
        };
        let expected = quantize_activations(input, recipe)?;
        let reading = failed("copying the output back");
        let found = stream.clone_dtoh(&set.codes).map_err(&reading)?;
        require_equal("activations' codes", &found[..codes], &expected.codes)?;
        let found = stream.clone_dtoh(&set.scales).map_err(&reading)?;
        require_equal("activations' scales", &found[..scales], &expected.scales)?;
        let found = stream.clone_dtoh(&set.f32_scales).map_err(&reading)?;
        require_equal("activations' f32 scales", &found[..f32_scales], &expected.f32_scales)
    };
    in_rotation(stream, workload.bytes, set, run, check)
}

/// Returns the median times of appending to a KV cache and of the copy.
pub(super) fn measure_kv(workload: &KvWorkload, gpu: &Gpu) -> Result<Times> {
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let (rows, copying) = (workload.rows, failed("copying to the GPU"));
    let (keys, values) = (random::<bf16>(rows.elements(), 1), random::<bf16>(rows.elements(), 2));
    let slots = stream.clone_htod(&workload.slots).map_err(&copying)?;
    let [codes, scales] = workload.lengths();
    let set = || {
        let bytes = [codes, codes, scales.max(1), scales.max(1)];
        let parts = bytes.map(|bytes| stream.alloc_zeros::<u8>(bytes));
        let [a, b, c, d] = parts;
        let rows =
            [stream.clone_htod(&keys).map_err(&copying)?, stream.clone_htod(&values).map_err(&copying)?];
        let parts = [a.map_err(&copying)?, b.map_err(&copying)?, c.map_err(&copying)?, d.map_err(&copying)?];
        Ok((rows, parts))
    };
    let run = |(from, to): &mut ([CudaSlice<bf16>; 2], [CudaSlice<u8>; 4])| {
        let [a, b, c, d] = to;
        let cache = DeviceKvCacheMut {
            key_codes: a.into(),
            value_codes: b.into(),
            key_scales: c.into(),
            value_scales: d.into(),
        };
        let slots = DeviceSlots::Rows(DeviceIntegers::I64((&slots).into()));
        let scales = DeviceKvScales::Host(KV_SCALES);
        let [keys, values] = from;
        let (keys, values) = ((&*keys).into(), (&*values).into());
        gpu.append_kv_on(stream, &workload.shape, workload.format, keys, values, rows, slots, scales, cache)
    };
    in_rotation(stream, workload.bytes, set, run, |_| Ok(()))
}
