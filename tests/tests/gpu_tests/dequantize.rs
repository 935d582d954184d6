//! Tests dequantization.

use half::{bf16, f16};
use microscale::formats::nvfp4::Direction;
use microscale::gpu::{DeviceTensor, Gpu};
use microscale::{
    Element, Format, GlobalScale, QuantizedShape, QuantizedTensor, ScaleLayout, dequantize, dequantize_into,
};
use microscale_test_support::cases::given_for;

use super::support::SHAPES;

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Returns the largest scale byte that a loader accepts.
fn largest_scale(format: Format) -> u8 {
    if format == Format::Nvfp4 { 0x7F } else { 0xFF }
}

/// Returns the tensor under global scales of either direction and any size.
///
/// Also returns it without one, in both layouts.
fn variants(tensor: &QuantizedTensor) -> Vec<QuantizedTensor> {
    let mut variants = vec![tensor.clone()];
    if tensor.format() == Format::Nvfp4 {
        for direction in [Direction::Divisor, Direction::Multiplier] {
            for amax in [f32::from_bits(1), 1e-37, 1e-30, 0.37, 1.7, 2688.0, 1e20, f32::MAX] {
                let global: GlobalScale = given_for(direction, amax);
                variants.push(tensor.clone().with_global_scale(global).unwrap());
            }
        }
    }
    let swizzled: Vec<_> =
        variants.iter().map(|tensor| tensor.convert_layout(ScaleLayout::Swizzled)).collect();
    variants.extend(swizzled);
    variants
}

pub(crate) fn equals_the_cpu_on_every_code_and_scale(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu, format: Format) {
        // One row per scale byte, each with all 256 bytes of codes.
        let (rows, in_row) = (usize::from(largest_scale(format)) + 1, 256 / format.block_bytes());
        let cols = in_row * format.block();
        let codes: Vec<u8> = (0..rows).flat_map(|_| 0..=255u8).collect();
        let scales: Vec<u8> = (0..rows * in_row).map(|index| (index / in_row) as u8).collect();
        let shape = QuantizedShape::new(format, rows, cols);
        let tensor = QuantizedTensor::from_parts(shape, codes, scales).unwrap();
        for tensor in variants(&tensor) {
            let found = gpu.dequantize::<T>(&tensor).unwrap();
            let expected = dequantize::<T>(&tensor);
            let rows =
                bits(&found).chunks(cols * size_of::<T>()).zip(bits(&expected).chunks(cols * size_of::<T>()));
            for (scale, (ours, cpus)) in rows.enumerate() {
                let what = (T::DTYPE, tensor.shape(), tensor.global_scale());
                assert_eq!(ours, cpus, "{what:?}, scale byte {scale:#04x}");
            }
        }
    }
    for format in Format::WITH_KERNELS {
        run::<f32>(gpu, format);
        run::<f16>(gpu, format);
        run::<bf16>(gpu, format);
    }
}

pub(crate) fn equals_the_cpu_on_every_shape(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu, format: Format) {
        let mut rng = fastrand::Rng::with_seed(11);
        for shape in SHAPES {
            let quantized = QuantizedShape::new(format, shape.rows, shape.cols);
            let (codes, scales) = quantized.bytes().unwrap();
            let codes = (0..codes).map(|_| rng.u8(..)).collect();
            let scales = (0..scales).map(|_| rng.u8(..=largest_scale(format))).collect();
            let tensor = QuantizedTensor::from_parts(quantized, codes, scales).unwrap();
            // Gaps between rows must not be written.
            let before: Vec<T> = (0..shape.span().unwrap()).map(|i| T::from_f32(i as f32)).collect();
            for tensor in variants(&tensor) {
                let mut expected = before.clone();
                dequantize_into(&tensor, &mut expected, shape.row_stride).unwrap();
                let mut out = gpu.stream().clone_htod(&before).unwrap();
                let device = DeviceTensor::from_host(gpu.stream(), &tensor).unwrap();
                gpu.dequantize_on(gpu.stream(), &device, &mut out, shape.row_stride).unwrap();
                let found = gpu.stream().clone_dtoh(&out).unwrap();
                let what = (T::DTYPE, tensor.shape(), tensor.global_scale());
                assert!(bits(&found) == bits(&expected), "{what:?}, row stride {}", shape.row_stride);
            }
        }
    }
    for format in Format::WITH_KERNELS {
        run::<f32>(gpu, format);
        run::<f16>(gpu, format);
        run::<bf16>(gpu, format);
    }
}
