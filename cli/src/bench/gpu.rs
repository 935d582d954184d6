//! Measurements on a GPU, against a device-to-device copy: event times of CUDA graph replays.

use std::sync::Arc;

use microscale::gpu::cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use microscale::gpu::cudarc::driver::{CudaSlice, CudaStream};
use microscale::gpu::{
    DeviceAmax, DeviceQuantizeOptions, DeviceReport, DeviceTensor, Fp8, Fp8Activations, GemmConfig,
    GemmWorkspace, Gpu, Linear, doing as failed,
};
use microscale::{Activation, Element, Error, Fp8Options, QuantizedShape, QuantizedTensor, Result, cpu};

use super::measurement::{Times, median};
use super::op::Op;
use super::product::{Product, matrix_bytes, verify};
use super::workload::{Workload, random, require_equal, sets};

/// The effort of a measurement.
#[derive(Clone, Copy)]
pub(super) struct Effort {
    /// Approximate duration of a graph's work, so that a replay takes much longer than its events.
    graph_bytes: u64,
    /// Number of timed replays, after [`WARM_UP`] other ones.
    replays: usize,
}

impl Effort {
    /// The effort for published figures.
    pub(super) const FULL: Self = Self { graph_bytes: 8 << 30, replays: 25 };
    /// The effort for a choice among many kernels.
    #[cfg(feature = "internals")]
    pub(super) const LESS: Self = Self { graph_bytes: 2 << 30, replays: 7 };
}

/// Maximum launches in a graph, and launches in a graph of empty kernels.
const MOST_LAUNCHES: usize = 256;
/// Maximum bytes per copy. An H200 copies 580 MiB in one call at two thirds of the speed of smaller
/// calls.
const COPY_BYTES: usize = 256 << 20;
/// Number of replays before the timed ones.
const WARM_UP: usize = 3;

/// A matrix in all of its forms.
struct Set<T: Element> {
    values: CudaSlice<T>,
    tensor: DeviceTensor,
    amax: DeviceAmax,
}

/// Returns the median times of the operation and of the copy.
pub(super) fn measure<T: Element>(workload: &Workload, gpu: &Gpu) -> Result<Times> {
    // SAFETY: all work of this function is on one stream, which orders it without events. A capture
    // does not allow events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    #[cfg(feature = "internals")]
    if workload.op == Op::Empty {
        let empty = microscale::gpu::internals::EmptyKernel::new(gpu)?;
        let operation = time(stream, (MOST_LAUNCHES, Effort::FULL), |_| empty.launch(stream))?;
        return Ok(Times { operation, ..Times::default() });
    }
    let host = random::<T>(workload.shape.elements(), 1);
    let workload = &Workload { recipe: workload.recipe(&host)?, ..*workload };
    let mut report = DeviceReport::zeros(stream)?;
    in_rotation(
        stream,
        workload.bytes,
        || Set::new(gpu, &host, workload),
        |set| set.run(gpu, workload, &mut report),
        |set| set.verify(gpu, workload, &host),
    )
}

/// Returns the median times of an operation that moves `bytes` bytes and of the copy.
///
/// Sets of buffers are in rotation. The first and the last set are checked after the timing.
pub(super) fn in_rotation<S>(
    stream: &Arc<CudaStream>,
    bytes: u64,
    set: impl Fn() -> Result<S>,
    mut operation: impl FnMut(&mut S) -> Result<()>,
    check: impl Fn(&S) -> Result<()>,
) -> Result<Times> {
    let turns = Turns::of(bytes, bytes, Effort::FULL);
    let operations = (&[()][..], turns, Effort::FULL);
    let times = each_in_rotation(stream, set, operations, |_, set| operation(set), |_, set| check(set))?;
    Ok(Times { operation: times[0], copy: Some(copy_time(stream, bytes)?), ..Times::default() })
}

/// Returns the median times of several operations with the same sets of buffers.
pub(super) fn each_in_rotation<S, O>(
    stream: &Arc<CudaStream>,
    set: impl Fn() -> Result<S>,
    (operations, turns, effort): (&[O], Turns, Effort),
    mut operation: impl FnMut(&O, &mut S) -> Result<()>,
    check: impl Fn(&O, &S) -> Result<()>,
) -> Result<Vec<f64>> {
    let mut sets = (0..turns.sets).map(|_| set()).collect::<Result<Vec<_>>>()?;
    let mut measure = |which: &O| {
        let seconds =
            time(stream, (turns.launches, effort), |i| operation(which, &mut sets[i % turns.sets]))?;
        check(which, &sets[0])?;
        check(which, &sets[turns.sets - 1])?;
        Ok(seconds)
    };
    operations.iter().map(&mut measure).collect()
}

/// Numbers of launches in a graph and of buffer sets in rotation.
#[derive(Clone, Copy)]
pub(super) struct Turns {
    sets: usize,
    launches: usize,
}

impl Turns {
    /// Returns the turns of an operation that moves `bytes` bytes in the time of a copy of `work`
    /// bytes.
    pub(super) fn of(bytes: u64, work: u64, effort: Effort) -> Self {
        let sets = sets(bytes);
        let launches = effort.graph_bytes.div_ceil(work).clamp(sets as u64, MOST_LAUNCHES as u64) as usize;
        Self { sets, launches }
    }
}

/// Returns the median time of copies that read and write `bytes` bytes in total.
pub(super) fn copy_time(stream: &Arc<CudaStream>, bytes: u64) -> Result<f64> {
    let Turns { sets, launches } = Turns::of(bytes, bytes, Effort::FULL);
    let half = bytes as usize / 2;
    let copying = failed("copying");
    let sources = (0..sets).map(|_| stream.clone_htod(&vec![1u8; half])).collect::<Result<Vec<_>, _>>();
    let sources = sources.map_err(&copying)?;
    let mut targets = (0..sets).map(|_| stream.alloc_zeros::<u8>(half)).collect::<Result<Vec<_>, _>>();
    let targets = targets.as_mut().map_err(|error| copying(*error))?;
    time(stream, (launches, Effort::FULL), |i| {
        let (source, target) = (&sources[i % sets], &mut targets[i % sets]);
        (0..half).step_by(COPY_BYTES).try_for_each(|start| {
            let part = start..half.min(start + COPY_BYTES);
            stream.memcpy_dtod(&source.slice(part.clone()), &mut target.slice_mut(part)).map_err(&copying)
        })
    })
}

/// Returns the median times of products and of the copy.
pub(super) fn measure_product<T: Element>(op: Op, product: &Product, gpu: &Gpu) -> Result<Times> {
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let vectors = DeviceTensor::from_host(stream, &product.vectors)?;
    let expected = product.expected::<T>()?;
    in_rotation(
        stream,
        product.bytes,
        || {
            let out =
                stream.alloc_zeros::<T>(product.matrix.rows()).map_err(failed("allocating the output"))?;
            Ok((DeviceTensor::from_host(stream, &product.matrix)?, out))
        },
        |(matrix, out)| match op.rows_per_warp() {
            #[cfg(feature = "internals")]
            Some(rows) => gpu.gemv_by_rows_on(rows, stream, &*matrix, &vectors, product.batch, out),
            _ => gpu.gemv_on(stream, &*matrix, &vectors, product.batch, out),
        },
        |(_, out)| {
            let found = stream.clone_dtoh(out).map_err(failed("copying the output back"))?;
            verify("gemv on the GPU", &found, &expected)
        },
    )
}

/// A product of weights and a number of tokens, with a given configuration or the plan's choice.
pub(super) type ByConfig = (usize, Option<GemmConfig>);

/// Computes a product, with a configuration if one is given.
pub(super) fn by_config<'a, T: Activation>(
    linear: Linear<'a, T, T>,
    config: Option<GemmConfig>,
) -> Linear<'a, T, T> {
    match config {
        #[cfg(feature = "internals")]
        Some(config) => linear.by(config),
        _ => linear,
    }
}

/// Tensor core operations in the time of copying a byte, on the GPUs where this ratio is smallest.
const OPERATIONS_PER_BYTE: u64 = 150;

/// Returns the median times of products of weights with the activations of a number of tokens.
///
/// `check` gets the results of the first product.
pub(super) fn measure_weights<T: Activation>(
    gpu: &Gpu,
    (weights, activations, tokens): (&QuantizedTensor, &[T], usize),
    (products, effort): (&[ByConfig], Effort),
    check: impl Fn(&[T]) -> Result<()>,
) -> Result<Vec<f64>> {
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let activations = stream.clone_htod(activations).map_err(failed("copying the activations"))?;
    let mut workspace = gpu.gemm_workspace(stream, weights.shape(), tokens, T::DTYPE)?;
    let bytes = matrix_bytes(weights) as u64;
    let operations = 2 * (tokens * weights.cols() * weights.rows()) as u64;
    let turns = Turns::of(bytes, bytes.max(operations / OPERATIONS_PER_BYTE), effort);
    each_in_rotation(
        stream,
        || {
            let results = tokens * weights.rows();
            let out = stream.alloc_zeros::<T>(results).map_err(failed("allocating the output"))?;
            Ok((DeviceTensor::from_host(stream, weights)?, out))
        },
        (products, turns, effort),
        |(tokens, config), (weights, out)| {
            let linear = by_config(gpu.linear::<T, T>(&*weights), *config);
            linear.plan(*tokens)?.run(stream, &activations, &mut workspace, out)
        },
        |(tokens, _), (weights, out)| {
            let found = stream.clone_dtoh(out).map_err(failed("copying the output back"))?;
            check(&found[..tokens * weights.rows()])
        },
    )
}

/// Returns the median time of a product of weights with activations that are quantized to FP8, and
/// its configuration.
///
/// `check` gets the results.
pub(super) fn measure_fp8<T: Activation>(
    gpu: &Gpu,
    (weights, activations, tokens): (&QuantizedTensor, &[T], usize),
    given: Option<GemmConfig>,
    check: impl Fn(&[T]) -> Result<()>,
) -> Result<(f64, Option<GemmConfig>)> {
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let activations = stream.clone_htod(activations).map_err(failed("copying the activations"))?;
    let bytes = matrix_bytes(weights) as u64;
    let operations = 2 * (tokens * weights.cols() * weights.rows()) as u64;
    let turns = Turns::of(bytes, bytes.max(operations / (2 * OPERATIONS_PER_BYTE)), Effort::FULL);
    let set = || {
        let results = tokens * weights.rows();
        let out = stream.alloc_zeros::<T>(results).map_err(failed("allocating the output"))?;
        Ok((DeviceTensor::from_host(stream, weights)?, out))
    };
    let (first, _) = set()?;
    let plan = fp8_by_config::<T>(gpu, &first, given).plan(tokens)?;
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes())?;
    let times = each_in_rotation(
        stream,
        set,
        (&[()], turns, Effort::FULL),
        |(), (weights, out)| {
            let plan = fp8_by_config::<T>(gpu, weights, given).plan(tokens)?;
            plan.run(stream, Fp8Activations::Values((&activations).into()), &mut workspace, out)
        },
        |(), (_, out)| check(&stream.clone_dtoh(out).map_err(failed("copying the output back"))?),
    )?;
    Ok((times[0], plan.config()))
}

/// Returns the product with FP8 activations, with a configuration if one is given.
fn fp8_by_config<'a, T: Activation>(
    gpu: &'a Gpu,
    weights: &'a DeviceTensor,
    config: Option<GemmConfig>,
) -> Linear<'a, T, T, Fp8> {
    let fast_accumulation = config.is_some_and(|config| config.mainloop.accumulates_fast());
    let options = Fp8Options { round_weights: true, fast_accumulation, ..Fp8Options::default() };
    let linear = gpu.linear_fp8::<T, T>(weights).options(options);
    match config {
        #[cfg(feature = "internals")]
        Some(config) => linear.by(config),
        _ => linear,
    }
}

/// Returns the median time of a product for each configuration, with `tokens` of the given
/// activations, or `None` for an unsuitable configuration.
///
/// Results are not compared. Tests compare them for every configuration.
#[cfg(feature = "internals")]
pub(super) fn measure_configs<T: Activation>(
    gpu: &Gpu,
    (weights, activations, tokens): (&QuantizedTensor, &[T], usize),
    products: &[(usize, GemmConfig)],
) -> Result<Vec<Option<f64>>> {
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let activations = stream.clone_htod(activations).map_err(failed("copying the activations"))?;
    let bytes = matrix_bytes(weights) as u64;
    let sets = (0..sets(bytes)).map(|_| DeviceTensor::from_host(stream, weights));
    let sets = sets.collect::<Result<Vec<_>>>()?;
    let (rows, cols) = (weights.rows(), weights.cols());
    let mut out = stream.alloc_zeros::<T>(tokens * rows).map_err(failed("allocating the output"))?;
    let mut workspace = GemmWorkspace::new(stream, 0)?;
    let mut room = 0;
    let mut measured = Vec::new();
    for (tokens, config) in products {
        let fp8 = config.mainloop.takes_fp8();
        let plan = if fp8 {
            let plan = fp8_by_config::<T>(gpu, &sets[0], Some(*config)).plan(*tokens);
            plan.map(|plan| plan.workspace_bytes())
        } else {
            let plan = gpu.linear::<T, T>(&sets[0]).by(*config).plan(*tokens);
            plan.map(|plan| plan.workspace_bytes())
        };
        let Ok(plan) = plan else {
            measured.push(None);
            continue;
        };
        if plan > room {
            (workspace, room) = (GemmWorkspace::new(stream, plan)?, plan);
        }
        let operations = 2 * (tokens * weights.cols() * weights.rows()) as u64;
        let turns = Turns::of(bytes, bytes.max(operations / OPERATIONS_PER_BYTE), Effort::LESS);
        let seconds = time(stream, (turns.launches, Effort::LESS), |i| {
            let weights = &sets[i % sets.len()];
            if fp8 {
                let plan = fp8_by_config::<T>(gpu, weights, Some(*config)).plan(*tokens)?;
                let values = activations.slice(..tokens * cols);
                let values = Fp8Activations::Values((&values).into());
                return plan.run(stream, values, &mut workspace, out.slice_mut(..tokens * rows));
            }
            let plan = gpu.linear::<T, T>(weights).by(*config).plan(*tokens)?;
            plan.run(stream, &activations, &mut workspace, &mut out)
        })?;
        measured.push(Some(seconds));
    }
    Ok(measured)
}

/// Returns the CPU time of planning and launching a product from the plan cache, with an idle GPU.
#[cfg(feature = "internals")]
pub(super) fn measure_launch<T: Activation>(
    gpu: &Gpu,
    (weights, activations, tokens): (&QuantizedTensor, &[T], usize),
) -> Result<f64> {
    const LAUNCHES: u32 = 50;
    // SAFETY: all work of this function is on one stream, which orders it without events.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let copying = failed("copying the operands");
    let activations = stream.clone_htod(activations).map_err(&copying)?;
    let weights = DeviceTensor::from_host(stream, weights)?;
    let mut out =
        stream.alloc_zeros::<T>(tokens * weights.rows()).map_err(failed("allocating the output"))?;
    let bytes = gpu.linear::<T, T>(&weights).plan(tokens)?.workspace_bytes();
    let mut workspace = GemmWorkspace::new(stream, bytes)?;
    let mut seconds = Vec::new();
    for _ in 0..WARM_UP + Effort::FULL.replays {
        let start = std::time::Instant::now();
        for _ in 0..LAUNCHES {
            let plan = gpu.linear::<T, T>(&weights).plan(tokens)?;
            plan.run(stream, &activations, &mut workspace, &mut out)?;
        }
        seconds.push(start.elapsed().as_secs_f64() / f64::from(LAUNCHES));
        stream.synchronize().map_err(failed("waiting for the GPU"))?;
    }
    Ok(median(seconds.split_off(WARM_UP)))
}

/// Returns the 16-bit multiplications and additions per second of a GPU's tensor cores, with f32
/// sums, at its maximum clock.
///
/// Returns `None` if NVIDIA's figures differ between products of the same compute capability.
pub(super) fn tensor_cores_per_second(gpu: &Gpu) -> Result<Option<f64>> {
    let a_clock = match gpu.info().compute_capability {
        (8, 0) => 2048.0,
        (9, 0) => 4096.0,
        (10, 0 | 3) => 8192.0,
        _ => return Ok(None),
    };
    let attribute = |which| gpu.context().attribute(which).map_err(failed("asking for the GPU's clock"));
    let kilohertz = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    Ok(Some(a_clock * f64::from(multiprocessors) * f64::from(kilohertz) * 1e3))
}

impl<T: Element> Set<T> {
    fn new(gpu: &Gpu, host: &[T], workload: &Workload) -> Result<Self> {
        let stream = gpu.stream();
        let mut values = stream.clone_htod(host).map_err(failed("copying the input"))?;
        let mut tensor = DeviceTensor::zeros(stream, QuantizedShape::of(&workload.recipe, workload.shape))?;
        if workload.op == Op::Dequantize {
            let mut report = DeviceReport::zeros(stream)?;
            gpu.quantize_on(
                stream,
                &values,
                workload.shape,
                &workload.recipe,
                DeviceQuantizeOptions::new().report(&mut report),
                &mut tensor,
            )?;
            stream.memset_zeros(&mut values).map_err(failed("clearing the output"))?;
        }
        Ok(Self { values, tensor, amax: DeviceAmax::zeros(stream)? })
    }

    fn run(&mut self, gpu: &Gpu, workload: &Workload, report: &mut DeviceReport) -> Result<()> {
        let Self { values, tensor, amax } = self;
        let (stream, shape, recipe) = (gpu.stream(), workload.shape, &workload.recipe);
        match workload.op {
            Op::Dequantize => gpu.dequantize_on(stream, &*tensor, values, shape.cols),
            Op::Amax => {
                amax.clear(stream)?;
                gpu.amax_on(stream, &*values, shape, amax)
            }
            _ => {
                let options = DeviceQuantizeOptions::new().report(report);
                gpu.quantize_on(stream, &*values, shape, recipe, options, tensor)
            }
        }
    }

    /// Compares the results of the timed launches with the CPU's results.
    fn verify(&self, gpu: &Gpu, workload: &Workload, host: &[T]) -> Result<()> {
        if workload.op == Op::Amax {
            let (found, expected) = (self.amax.read(gpu.stream())?, cpu::amax(host, workload.shape)?);
            return require_equal("amax on the GPU", &[found], &[expected]);
        }
        let expected = cpu::quantize(host, workload.shape, &workload.recipe)?.tensor;
        let found = self.tensor.to_host(gpu.stream())?;
        require_equal("quantize on the GPU", found.codes(), expected.codes())?;
        require_equal("quantize on the GPU", found.scales(), expected.scales())?;
        require_equal("quantize on the GPU", &[found.global_scale()], &[expected.global_scale()])?;
        if workload.op == Op::Dequantize {
            let expected: Vec<T> = cpu::dequantize(&expected);
            let found = gpu.stream().clone_dtoh(&self.values).map_err(failed("copying the output back"))?;
            let bytes = bytemuck::cast_slice::<T, u8>;
            require_equal("dequantize on the GPU", bytes(&found), bytes(&expected))?;
        }
        Ok(())
    }
}

/// Returns the median time per launch of a graph of `launches` launches.
fn time(
    stream: &Arc<CudaStream>,
    (launches, effort): (usize, Effort),
    mut launch: impl FnMut(usize) -> Result<()>,
) -> Result<f64> {
    let timing = failed("timing a graph");
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(&timing)?;
    let enqueued = (0..launches).try_for_each(&mut launch);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(&timing);
    enqueued?;
    let graph = graph?.ok_or(Error::Gpu {
        doing: "timing a graph",
        code: None,
        message: "the graph is empty".into(),
    })?;
    let mut seconds = Vec::new();
    for replay in 0..WARM_UP + effort.replays {
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(&timing)?;
        graph.launch().map_err(&timing)?;
        let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(&timing)?;
        let elapsed = f64::from(start.elapsed_ms(&end).map_err(&timing)?) / 1e3;
        if replay >= WARM_UP {
            seconds.push(elapsed / launches as f64);
        }
    }
    Ok(median(seconds))
}
