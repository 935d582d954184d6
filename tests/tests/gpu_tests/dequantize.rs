//! Dequantization.

use half::{bf16, f16};
use microscale::gpu::{DeviceTensor, Gpu};
use microscale::{Element, Format, QuantizedTensor, dequantize, dequantize_into};

use super::support::SHAPES;

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

pub(crate) fn equals_the_cpu_on_every_code_and_scale(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        // A row a scale byte, each with all 256 pairs of codes.
        let codes: Vec<u8> = (0..256).flat_map(|_| 0..=255u8).collect();
        let scales: Vec<u8> = (0..=255u8).flat_map(|byte| [byte; 16]).collect();
        let tensor = QuantizedTensor::from_parts(Format::Mxfp4, 256, 512, codes, scales).unwrap();
        let found = gpu.dequantize::<T>(&tensor).unwrap();
        let expected = dequantize::<T>(&tensor);
        for (i, (ours, cpus)) in bits(&found).chunks(1024).zip(bits(&expected).chunks(1024)).enumerate() {
            assert_eq!(ours, cpus, "{:?}, part {i}", T::DTYPE);
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn equals_the_cpu_on_every_shape(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        let mut rng = fastrand::Rng::with_seed(11);
        for shape in SHAPES {
            let blocks = shape.rows * shape.cols.div_ceil(32);
            let codes = (0..blocks * 16).map(|_| rng.u8(..)).collect();
            let scales = (0..blocks).map(|_| rng.u8(..)).collect();
            let tensor =
                QuantizedTensor::from_parts(Format::Mxfp4, shape.rows, shape.cols, codes, scales).unwrap();
            // What lies between rows stays.
            let before: Vec<T> = (0..shape.span().unwrap()).map(|i| T::from_f32(i as f32)).collect();
            let mut expected = before.clone();
            dequantize_into(&tensor, &mut expected, shape.row_stride).unwrap();
            let mut out = gpu.stream().clone_htod(&before).unwrap();
            let device = DeviceTensor::from_host(gpu.stream(), &tensor).unwrap();
            gpu.dequantize_on(gpu.stream(), &device, &mut out, shape.row_stride).unwrap();
            let found = gpu.stream().clone_dtoh(&out).unwrap();
            assert!(bits(&found) == bits(&expected), "{:?} {shape:?}", T::DTYPE);
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}
