//! Tests products of quantized operands.

use half::{bf16, f16};
use microscale::gpu::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use microscale::gpu::{DeviceTensor, Gpu};
use microscale::{Batch, Element, Error, Format, QuantizedTensor, ScaleLayout, Words, gemv};
use microscale_test_support::operands::{Scales, tensor};

const FORMATS: [Format; 2] = Format::MULTIPLIED;

fn expected<T: Element>(matrix: &QuantizedTensor, vectors: &QuantizedTensor, batch: Batch) -> Vec<T> {
    let mut out = vec![T::default(); matrix.rows()];
    gemv(matrix, vectors, batch, &mut out).expect("operands that fit");
    out
}

fn assert_same<T: Element>(found: &[T], expected: &[T], what: &str) {
    let bytes = bytemuck::cast_slice::<T, u8>;
    assert!(bytes(found) == bytes(expected), "{what}");
}

/// Tests every kernel, from device memory.
fn check<T: Element>(gpu: &Gpu, matrix: &QuantizedTensor, vectors: &QuantizedTensor, batch: Batch) {
    let expected = expected::<T>(matrix, vectors, batch);
    let stream = gpu.stream();
    let [there, of_vectors] =
        [matrix, vectors].map(|tensor| DeviceTensor::from_host(stream, tensor).unwrap());
    for rows_per_warp in [1, 2, 4] {
        let mut out = stream.clone_htod(&vec![T::from_f32(7.0); matrix.rows() + 1]).unwrap();
        gpu.gemv_by_rows_on(rows_per_warp, stream, &there, &of_vectors, batch, &mut out).unwrap();
        let mut found = stream.clone_dtoh(&out).unwrap();
        assert_eq!(found.pop().unwrap().to_f32(), 7.0, "{rows_per_warp} rows: wrote too much");
        let what = format!("{rows_per_warp} rows, {} {:?} {batch:?}", T::DTYPE.word(), matrix.shape());
        assert_same(&found, &expected, &what);
    }
}

pub(crate) fn equals_the_cpu_for_every_kernel(gpu: &Gpu) {
    let mut seed = 0;
    for format in FORMATS {
        for scales in [Scales::Common, Scales::Numbers, Scales::Any, Scales::Largest] {
            for cols in [16, 32, 48, 80, 96, 1024, 1040, 2048, 3072, 4096 + 64, 7168, 17 * 1024] {
                for (rows, batch) in [
                    (1, Batch::default()),
                    (131, Batch::default()),
                    (3 * 6, Batch::of(3)),
                    (2 * 129, Batch::of(2).with_vector_stride(128)),
                ] {
                    seed += 1;
                    let matrix = tensor(format, rows, cols, scales, seed);
                    let of_vectors = (batch.count - 1) * batch.vector_stride + 1;
                    let vectors = tensor(format, of_vectors, cols, scales, seed + 1);
                    match seed % 3 {
                        0 => check::<f32>(gpu, &matrix, &vectors, batch),
                        1 => check::<f16>(gpu, &matrix, &vectors, batch),
                        _ => check::<bf16>(gpu, &matrix, &vectors, batch),
                    }
                }
            }
        }
    }
}

/// Shapes (M, K, L) of GPU MODE's NVFP4 contest, and of layers of models.
const PUBLISHED: [(usize, usize, usize); 17] = [
    (128, 256, 1),
    (128, 1536, 1),
    (128, 3072, 1),
    (256, 7168, 1),
    (2432, 4608, 2),
    (384, 7168, 2),
    (512, 512, 2),
    (512, 4096, 2),
    (512, 1536, 2),
    (7168, 16384, 1),
    (4096, 7168, 8),
    (7168, 2048, 4),
    (4096, 4096, 1),
    (11008, 4096, 1),
    (14336, 4096, 1),
    (4096, 14336, 1),
    (8192, 28672, 1),
];

pub(crate) fn equals_the_cpu_on_published_shapes(gpu: &Gpu) {
    for (i, (m, k, l)) in (0..).zip(PUBLISHED) {
        for format in FORMATS {
            let matrix = tensor(format, l * m, k, Scales::Numbers, 3 * i);
            // The contest pads vectors to 128 rows.
            let batch = Batch::of(l).with_vector_stride(128);
            let vectors = tensor(format, l * 128, k, Scales::Numbers, 3 * i + 1);
            let expected = expected::<f16>(&matrix, &vectors, batch);
            let mut found = vec![f16::ZERO; l * m];
            gpu.gemv(&matrix, &vectors, batch, &mut found).unwrap();
            assert_same(&found, &expected, &format!("{format} {m}x{k}x{l}"));
        }
    }
}

pub(crate) fn refuses_what_the_cpu_refuses(gpu: &Gpu) {
    let of = |format, rows, cols| tensor(format, rows, cols, Scales::Common, 2);
    let refused = |matrix: &QuantizedTensor, vectors: &QuantizedTensor, batch, room: usize| {
        let mut out = vec![0f32; room];
        let on_cpu = gemv(matrix, vectors, batch, &mut out).unwrap_err();
        let on_gpu = gpu.gemv(matrix, vectors, batch, &mut out).unwrap_err();
        assert_eq!(on_gpu.to_string(), on_cpu.to_string());
        assert!(matches!(on_gpu, Error::Operands(_) | Error::Length { .. }), "{on_gpu:?}");
    };
    let (matrix, vector) = (of(Format::Nvfp4, 4, 64), of(Format::Nvfp4, 1, 64));
    refused(&matrix, &of(Format::Mxfp4, 1, 64), Batch::default(), 4);
    refused(&matrix, &of(Format::Nvfp4, 1, 48), Batch::default(), 4);
    refused(&matrix, &vector, Batch::of(3), 4);
    refused(&matrix, &vector, Batch::of(2), 4);
    refused(&matrix, &vector, Batch::default(), 3);
    refused(&matrix.convert_layout(ScaleLayout::Swizzled), &vector, Batch::default(), 4);
    let nothing = of(Format::Nvfp4, 0, 64);
    gpu.gemv(&nothing, &vector, Batch::default(), &mut [0f32; 0]).unwrap();
}

pub(crate) fn replays_in_a_graph(_: &Gpu) {
    // A handle of its own: captures do not allow cudarc's events.
    let gpu = Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let stream = gpu.stream();
    let matrices = [3, 4].map(|seed| tensor(Format::Nvfp4, 600, 2048, Scales::Common, seed));
    let vector = tensor(Format::Nvfp4, 1, 2048, Scales::Common, 5);
    let [first, second] = matrices.each_ref().map(|matrix| DeviceTensor::from_host(stream, matrix).unwrap());
    let of_vector = DeviceTensor::from_host(stream, &vector).unwrap();
    let mut out = [(); 2].map(|()| stream.alloc_zeros::<bf16>(600).unwrap());
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    for (matrix, out) in [&first, &second].into_iter().zip(&mut out) {
        gpu.gemv_on(stream, matrix, &of_vector, Batch::default(), out).unwrap();
    }
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    for _ in 0..3 {
        out.iter_mut().for_each(|out| stream.memset_zeros(out).unwrap());
        graph.launch().unwrap();
        for (matrix, out) in matrices.iter().zip(&out) {
            let expected = expected::<bf16>(matrix, &vector, Batch::default());
            assert_same(&stream.clone_dtoh(out).unwrap(), &expected, "a replay");
        }
    }
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}
