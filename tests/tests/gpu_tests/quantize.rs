//! Quantization from host memory.

use half::{bf16, f16};
use microscale::gpu::{Baseline, DeviceTensor, Gpu};
use microscale::{Element, Error, NonFinite, Recipe, Shape, Words, cpu, quantize};
use microscale_tests::data_dir;

use super::support::{SHAPES, assert_is_cpus, check, patterns, recipes};

pub(crate) fn equals_the_cpu_for_every_option(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            let values = patterns::<T>(shape.span().unwrap(), true, i as u64);
            for recipe in recipes() {
                check(gpu, &values, shape, &recipe);
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn equals_the_cpu_on_every_16_bit_pattern(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu, from_bits: impl Fn(u16) -> T) {
        // Each pattern meets neighbours of its own magnitude (in order) and of any (shuffled), many times over.
        let mut values: Vec<T> = (0..=u16::MAX).map(&from_bits).collect();
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..15 {
            let mut shuffled: Vec<u16> = (0..=u16::MAX).collect();
            rng.shuffle(&mut shuffled);
            values.extend(shuffled.into_iter().map(&from_bits));
        }
        let shape = Shape::new(1024, 1024);
        for recipe in recipes() {
            check(gpu, &values, shape, &recipe);
        }
    }
    run(gpu, f16::from_bits);
    run(gpu, bf16::from_bits);
}

pub(crate) fn equals_the_cpu_on_every_f32_exponent_and_tie(gpu: &Gpu) {
    // A row a power of two and a leading value: the block's amax, then all ties under every scale a rule may choose, and
    // the values next to them.
    let ties = [0.25f64, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0];
    let mut values: Vec<f32> = Vec::new();
    for exponent in -149..=127 {
        for lead in
            [1.0, 1.0 + 2f64.powi(-23), 1.25, 1.5, 1.5 + 2f64.powi(-23), 1.75, 1.75 - 2f64.powi(-23), 1.9999]
        {
            let unit = 2f64.powi(exponent);
            let mut row = vec![(lead * unit) as f32];
            for tie in ties {
                for scale in [unit / 4.0, unit / 2.0] {
                    let at = (tie * scale) as f32;
                    row.extend([
                        at,
                        -f32::from_bits(at.to_bits() + 1),
                        f32::from_bits(at.to_bits().saturating_sub(1)),
                    ]);
                }
            }
            for part in row[1..].chunks(31) {
                values.push(row[0]);
                // Nothing may exceed the leading value, or the block would be another one.
                values.extend(part.iter().map(|v| v.clamp(-row[0], row[0])));
                values.resize(values.len().next_multiple_of(32), 0.0);
            }
        }
    }
    let shape = Shape::new(values.len() / 32, 32);
    for recipe in recipes() {
        check(gpu, &values, shape, &recipe);
    }
}

pub(crate) fn equals_the_cpu_on_golden_inputs(gpu: &Gpu) {
    let folder = data_dir().join("tests/golden/mxfp4");
    let mut files = 0;
    for entry in std::fs::read_dir(&folder).expect("the golden vectors are there") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let Ok(input) = file.tensor("input") else { continue };
        let shape = Shape::new(input.shape()[0], input.shape()[1]);
        for recipe in recipes() {
            match input.dtype() {
                safetensors::Dtype::F32 => {
                    check::<f32>(gpu, &bytemuck::pod_collect_to_vec(input.data()), shape, &recipe)
                }
                safetensors::Dtype::F16 => {
                    check::<f16>(gpu, &bytemuck::pod_collect_to_vec(input.data()), shape, &recipe)
                }
                safetensors::Dtype::BF16 => {
                    check::<bf16>(gpu, &bytemuck::pod_collect_to_vec(input.data()), shape, &recipe)
                }
                other => panic!("golden input of dtype {other:?}"),
            }
        }
        files += 1;
    }
    assert!(files >= 10, "only {files} golden files in {}", folder.display());
}

pub(crate) fn refuses_what_the_cpu_refuses(gpu: &Gpu) {
    for shape in [Shape::new(100, 1000), Shape::new(100, 999).with_row_stride(1003)] {
        let mut values = patterns::<f32>(shape.span().unwrap(), false, 5);
        assert!(gpu.quantize(&values, shape, &Recipe::default()).is_ok());
        values[77 * shape.row_stride + 123] = f32::NEG_INFINITY;
        values[91 * shape.row_stride + 5] = f32::NAN;
        let by_gpu = gpu.quantize(&values, shape, &Recipe::default());
        let Err(Error::NonFinite { first, report }) = by_gpu else { panic!("not refused: {by_gpu:?}") };
        let Err(Error::NonFinite { first: cpus, report: cpus_report }) =
            quantize(&values, shape, &Recipe::default())
        else {
            panic!("the CPU does not refuse")
        };
        assert_eq!((first.row, first.col), (77, 123));
        assert_eq!((first, report), (cpus, cpus_report));
    }
}

pub(crate) fn handles_empty_matrices(gpu: &Gpu) {
    for shape in [Shape::new(0, 32), Shape::new(5, 0), Shape::new(0, 0)] {
        let quantized = gpu.quantize::<f32>(&[], shape, &Recipe::default()).unwrap();
        assert_eq!(quantized, quantize::<f32>(&[], shape, &Recipe::default()).unwrap());
        assert!(gpu.dequantize::<f32>(&quantized.tensor).unwrap().is_empty());
    }
}

pub(crate) fn baselines_equal_the_product(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::default() };
        for (i, shape) in SHAPES.into_iter().enumerate() {
            let values = patterns::<T>(shape.span().unwrap(), true, 100 + i as u64);
            let input = gpu.stream().clone_htod(&values).unwrap();
            for (_, baseline) in Baseline::WORDS {
                let mut out =
                    DeviceTensor::zeros(gpu.stream(), recipe.format, shape.rows, shape.cols).unwrap();
                gpu.quantize_baseline_on(*baseline, gpu.stream(), &input, shape, &recipe, &mut out).unwrap();
                let found = out.to_host(gpu.stream()).unwrap();
                let report = cpu::quantize(&values, shape, &recipe).unwrap().report;
                assert_is_cpus(&microscale::Quantized { tensor: found, report }, &values, shape, &recipe);
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}
