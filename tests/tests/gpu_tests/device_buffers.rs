//! Operations on buffers that are on the GPU already.

use half::bf16;
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::{DeviceReport, DeviceTensor, Gpu};
use microscale::{Error, Format, NonFinite, Quantized, Recipe, Shape, quantize};

use super::support::{assert_is_cpus, patterns};

const PROPAGATE: Recipe = Recipe {
    format: Format::Mxfp4,
    arithmetic: microscale::Convention::Ocp.mxfp4(),
    non_finite: NonFinite::Propagate,
};

fn tensor(gpu: &Gpu, shape: Shape) -> DeviceTensor {
    DeviceTensor::zeros(gpu.stream(), Format::Mxfp4, shape.rows, shape.cols).unwrap()
}

pub(crate) fn may_start_anywhere(gpu: &Gpu) {
    let shape = Shape::new(9, 160);
    let values = patterns::<bf16>(shape.elements() + 16, true, 1);
    let whole = gpu.stream().clone_htod(&values).unwrap();
    for start in 0..16 {
        let view = whole.slice(start..start + shape.elements());
        let (mut out, mut report) = (tensor(gpu, shape), DeviceReport::zeros(gpu.stream()).unwrap());
        gpu.quantize_on(gpu.stream(), &view, shape, &PROPAGATE, &mut out, &mut report).unwrap();
        let tensor = out.to_host(gpu.stream()).unwrap();
        let report = report.read(gpu.stream(), shape).unwrap();
        assert_is_cpus(&Quantized { tensor, report }, &values[start..], shape, &PROPAGATE);
    }
}

pub(crate) fn keep_what_lies_between_rows(gpu: &Gpu) {
    let shape = Shape::new(50, 70).with_row_stride(88);
    let values = patterns::<f32>(shape.span().unwrap(), false, 2);
    let quantized = quantize(&values, shape, &PROPAGATE).unwrap().tensor;
    let device = DeviceTensor::from_host(gpu.stream(), &quantized).unwrap();
    let mut out = gpu.stream().clone_htod(&vec![-1.5f32; 50 * 88]).unwrap();
    gpu.dequantize_on(gpu.stream(), &device, &mut out, 88).unwrap();
    let found = gpu.stream().clone_dtoh(&out).unwrap();
    assert!(found.chunks(88).all(|row| row[70..].iter().all(|v| *v == -1.5)));
}

pub(crate) fn that_are_too_short_are_refused(gpu: &Gpu) {
    let shape = Shape::new(8, 64);
    let short = gpu.stream().alloc_zeros::<f32>(8 * 64 - 1).unwrap();
    let (mut out, mut report) = (tensor(gpu, shape), DeviceReport::zeros(gpu.stream()).unwrap());
    let refused = gpu.quantize_on(gpu.stream(), &short, shape, &PROPAGATE, &mut out, &mut report);
    assert!(matches!(refused, Err(Error::Length { expected: 512, found: 511, .. })), "{refused:?}");
    let enough = gpu.stream().alloc_zeros::<f32>(8 * 64).unwrap();
    let mut smaller = tensor(gpu, Shape::new(8, 32));
    let refused = gpu.quantize_on(gpu.stream(), &enough, shape, &PROPAGATE, &mut smaller, &mut report);
    assert!(matches!(refused, Err(Error::QuantizedLength { .. })), "{refused:?}");
    let mut output = gpu.stream().alloc_zeros::<f32>(8 * 64 - 1).unwrap();
    let refused = gpu.dequantize_on(gpu.stream(), &out, &mut output, 64);
    assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
}

pub(crate) fn reports_add_up_and_clear(gpu: &Gpu) {
    let shape = Shape::new(40, 320);
    let values = patterns::<f32>(shape.elements(), true, 3);
    let once = quantize(&values, shape, &PROPAGATE).unwrap().report;
    assert!(once.nan > 0 && once.infinite > 0 && once.clipped_blocks > 0 && once.saturated_scales > 0);
    let input = gpu.stream().clone_htod(&values).unwrap();
    let (mut out, mut report) = (tensor(gpu, shape), DeviceReport::zeros(gpu.stream()).unwrap());
    for _ in 0..3 {
        gpu.quantize_on(gpu.stream(), &input, shape, &PROPAGATE, &mut out, &mut report).unwrap();
    }
    let thrice = report.read(gpu.stream(), shape).unwrap();
    assert_eq!((thrice.nan, thrice.infinite), (3 * once.nan, 3 * once.infinite));
    assert_eq!(thrice.clipped_blocks, 3 * once.clipped_blocks);
    assert_eq!(thrice.flushed_blocks, 3 * once.flushed_blocks);
    assert_eq!(thrice.saturated_scales, 3 * once.saturated_scales);
    assert_eq!(thrice.first_non_finite, once.first_non_finite);
    report.clear(gpu.stream()).unwrap();
    assert_eq!(report.read(gpu.stream(), shape).unwrap(), microscale::Report::default());
}

pub(crate) fn streams_overlap(gpu: &Gpu) {
    // cudarc's events order the uses of each buffer: what one stream writes another may read.
    let shape = Shape::new(300, 1024);
    let streams = [gpu.context().new_stream().unwrap(), gpu.context().new_stream().unwrap()];
    let values = [patterns::<f32>(shape.elements(), false, 4), patterns::<f32>(shape.elements(), false, 5)];
    let mut results = Vec::new();
    for (stream, values) in streams.iter().zip(&values) {
        let input = stream.clone_htod(values).unwrap();
        let mut out = DeviceTensor::zeros(stream, Format::Mxfp4, shape.rows, shape.cols).unwrap();
        let mut report = DeviceReport::zeros(stream).unwrap();
        gpu.quantize_on(stream, &input, shape, &PROPAGATE, &mut out, &mut report).unwrap();
        results.push((out, report));
    }
    for ((out, report), values) in results.iter().zip(&values) {
        let tensor = out.to_host(gpu.stream()).unwrap();
        let report = report.read(gpu.stream(), shape).unwrap();
        assert_is_cpus(&Quantized { tensor, report }, values, shape, &PROPAGATE);
    }
}

pub(crate) fn graphs_capture_and_replay(_: &Gpu) {
    // Its own context state: captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: everything below is on one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let (stream, shape) = (gpu.stream().clone(), Shape::new(64, 512));
    let (first, second) =
        (patterns::<f32>(shape.elements(), true, 6), patterns::<f32>(shape.elements(), true, 7));
    let mut input = stream.clone_htod(&first).unwrap();
    let (mut out, mut report) = (tensor(&gpu, shape), DeviceReport::zeros(&stream).unwrap());
    let mut back = stream.alloc_zeros::<f32>(shape.elements()).unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    report.clear(&stream).unwrap();
    gpu.quantize_on(&stream, &input, shape, &PROPAGATE, &mut out, &mut report).unwrap();
    gpu.dequantize_on(&stream, &out, &mut back, shape.cols).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    for values in [&first, &second, &first] {
        stream.memcpy_htod(values, &mut input).unwrap();
        graph.launch().unwrap();
        let tensor = out.to_host(&stream).unwrap();
        let expected: Vec<f32> = microscale::dequantize(&tensor);
        let found = stream.clone_dtoh(&back).unwrap();
        assert_eq!(bytemuck::cast_slice::<f32, u32>(&found), bytemuck::cast_slice::<f32, u32>(&expected));
        let report = report.read(&stream, shape).unwrap();
        assert_is_cpus(&Quantized { tensor, report }, values, shape, &PROPAGATE);
    }
    // SAFETY: nothing is in flight; later tests may use several streams again.
    unsafe { gpu.context().enable_event_tracking() };
}

pub(crate) fn more_than_2_to_the_32_elements(gpu: &Gpu) {
    const PART: usize = 1 << 26;
    const PARTS: usize = 65;
    let needed = PART * PARTS * 2 + PART * PARTS;
    let (free, _) = gpu.context().mem_get_info().unwrap();
    if free < needed {
        println!("skipped: {needed} bytes of GPU memory are needed and {free} are free");
        return;
    }
    // Every row is the same part, so that the CPU need only quantize one.
    let shape = Shape::new(PARTS, PART);
    let values = patterns::<bf16>(PART, true, 8);
    let part = gpu.stream().clone_htod(&values).unwrap();
    let mut input = gpu.stream().alloc_zeros::<bf16>(PART * PARTS).unwrap();
    for i in 0..PARTS {
        gpu.stream().memcpy_dtod(&part, &mut input.slice_mut(i * PART..(i + 1) * PART)).unwrap();
    }
    let (mut out, mut report) = (tensor(gpu, shape), DeviceReport::zeros(gpu.stream()).unwrap());
    gpu.quantize_on(gpu.stream(), &input, shape, &PROPAGATE, &mut out, &mut report).unwrap();
    let expected = quantize(&values, Shape::new(1, PART), &PROPAGATE).unwrap();
    let found = out.to_host(gpu.stream()).unwrap();
    for i in 0..PARTS {
        assert!(
            found.codes()[i * PART / 2..(i + 1) * PART / 2] == *expected.tensor.codes(),
            "codes of row {i}"
        );
        assert!(
            found.scales()[i * PART / 32..(i + 1) * PART / 32] == *expected.tensor.scales(),
            "scales of row {i}"
        );
    }
    let report = report.read(gpu.stream(), shape).unwrap();
    assert_eq!(report.nan, expected.report.nan * PARTS as u64);
    gpu.dequantize_on(gpu.stream(), &out, &mut input, PART).unwrap();
    let last = gpu.stream().clone_dtoh(&input.slice((PARTS - 1) * PART..)).unwrap();
    let expected: Vec<bf16> = microscale::dequantize(&expected.tensor);
    assert!(bytemuck::cast_slice::<bf16, u16>(&last) == bytemuck::cast_slice::<bf16, u16>(&expected));
}
