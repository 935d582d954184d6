//! Tests quantization from host memory.

use half::{bf16, f16};
use microscale::formats::NegativeZero;
use microscale::gpu::Gpu;
use microscale::{
    Element, Error, Format, Global, GlobalScale, NonFinite, Recipe, ScaleLayout, Shape, Words, quantize,
};
use microscale_test_support::cases::{NVFP4_NUMERICS, block_of_ties, given_for, nvfp4_arithmetic};
use microscale_test_support::golden::{Golden, Input, Nvfp4, files};
use microscale_test_support::oracle::Exact;
use microscale_test_support::oracle::nvfp4::Rule;

use super::support::{SHAPES, check, default_recipes, patterns, recipes};

pub(crate) fn equals_the_cpu_for_every_option(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            let values = patterns::<T>(shape.span().unwrap(), true, i as u64);
            for &(_, scale_layout) in ScaleLayout::WORDS {
                for recipe in recipes(&[1e-6, 7.0], scale_layout) {
                    check(gpu, &values, shape, &recipe);
                }
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn equals_the_cpu_on_every_16_bit_pattern(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu, from_bits: impl Fn(u16) -> T) {
        // Each pattern occurs many times, next to patterns of its own magnitude (in order) and of
        // any (shuffled).
        let mut values: Vec<T> = (0..=u16::MAX).map(&from_bits).collect();
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..15 {
            let mut shuffled: Vec<u16> = (0..=u16::MAX).collect();
            rng.shuffle(&mut shuffled);
            values.extend(shuffled.into_iter().map(&from_bits));
        }
        let shape = Shape::new(1024, 1024);
        for recipe in recipes(&[1e-3, 100.0], ScaleLayout::Linear) {
            check(gpu, &values, shape, &recipe);
        }
    }
    run(gpu, f16::from_bits);
    run(gpu, bf16::from_bits);
}

pub(crate) fn equals_the_cpu_on_every_f32_exponent_and_tie(gpu: &Gpu) {
    // One row per power of two and leading value: the block's amax, all ties under every scale that
    // a rule may choose, and their neighbours.
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
                // No value may exceed the leading value, which would become the amax.
                values.extend(part.iter().map(|v| v.clamp(-row[0], row[0])));
                values.resize(values.len().next_multiple_of(32), 0.0);
            }
        }
    }
    let shape = Shape::new(values.len() / 32, 32);
    for recipe in recipes(&[1e-20, 1.0, 1e20], ScaleLayout::Linear) {
        check(gpu, &values, shape, &recipe);
    }
}

pub(crate) fn equals_the_cpu_on_golden_inputs(gpu: &Gpu) {
    fn run(gpu: &Gpu, input: &Input, shape: Shape, recipes: &[Recipe]) {
        for recipe in recipes {
            match input {
                Input::F32(values) => check(gpu, values, shape, recipe),
                Input::F16(values) => check(gpu, values, shape, recipe),
                Input::Bf16(values) => check(gpu, values, shape, recipe),
            }
        }
    }
    let all = recipes(&[1.7], ScaleLayout::Linear);
    let mut seen = 0;
    for folder in ["mxfp4", "mxfp8"] {
        for name in files(folder).iter().filter(|name| !name.contains("tables")) {
            let golden = Golden::read(folder, name);
            run(gpu, &golden.input, Shape::new(golden.rows, golden.cols), &all);
            seen += 1;
        }
    }
    for name in files("nvfp4").iter().filter(|name| !name.contains("tables")) {
        let file = Nvfp4::read(name);
        for case in &file.cases {
            let mut globals = vec![Global::FromAmax, Global::Absent];
            globals.extend(case.global_scale.filter(|scale| scale.in_range()).map(Global::Given));
            let named = Recipe::of(Format::Nvfp4, file.numerics).unwrap();
            let of = |non_finite| {
                globals.iter().map(move |global| Recipe { non_finite, ..named.with_global(*global) })
            };
            let recipes: Vec<_> = of(NonFinite::Propagate).chain(of(NonFinite::Saturate)).collect();
            run(gpu, &case.input, Shape::new(case.rows, 64), &recipes);
        }
        seen += 1;
    }
    assert!(seen >= 45, "only {seen} golden files");
}

/// Returns global scales of every size, at the limits of their range, and near the one for `amax`.
fn global_scales(rng: &mut fastrand::Rng, numerics: microscale::Numerics) -> Vec<GlobalScale> {
    let direction = nvfp4_arithmetic(numerics).direction;
    let ends = [f32::from_bits(1), 1e-38, 1e-36, 1e-30, 1e30, 1e38, f32::MAX];
    let any = std::iter::repeat_with(|| f32::from_bits(rng.u32(1..0x7F80_0000))).take(25);
    let near = [1.0, 2688.0, 3.1, 0.37, 1.7];
    ends.into_iter().chain(any).chain(near).map(|amax| given_for(direction, amax)).collect()
}

/// Tests quotients that are exactly ties or one float away, under every block scale.
///
/// They reveal divisions that are not correctly rounded.
pub(crate) fn equals_the_cpu_on_ties_of_quotients(gpu: &Gpu) {
    fn run<T: Exact>(gpu: &Gpu, rng: &mut fastrand::Rng) {
        for numerics in NVFP4_NUMERICS {
            for given in global_scales(rng, numerics) {
                let rule = Rule { numerics, global: given.value(), negative_zero: NegativeZero::Keep };
                let mut values: Vec<T> = Vec::new();
                for scale in (1..=0x7E).cycle().take(126 * 8) {
                    values.extend(block_of_ties::<T>(rule, scale, rng));
                }
                let shape = Shape::new(values.len() / 64, 64);
                let named = Recipe::of(Format::Nvfp4, numerics).unwrap();
                check(gpu, &values, shape, &named.with_global(Global::Given(given)));
                check(gpu, &values, shape, &named);
            }
        }
    }
    let mut rng = fastrand::Rng::with_seed(50);
    run::<f32>(gpu, &mut rng);
    run::<f16>(gpu, &mut rng);
    run::<bf16>(gpu, &mut rng);
}

/// Tests many random mantissas and magnitudes, under global scales of every size.
pub(crate) fn equals_the_cpu_on_random_magnitudes_and_global_scales(gpu: &Gpu) {
    fn run<T: Exact>(gpu: &Gpu, rng: &mut fastrand::Rng) {
        let shape = Shape::new(1 << 10, 1 << 9);
        for numerics in NVFP4_NUMERICS {
            for given in global_scales(rng, numerics) {
                // About as large as the global scale allows, up to some powers of two larger or
                // smaller.
                let center = match given {
                    GlobalScale::Divisor(divisor) => 2688.0 / f64::from(divisor),
                    GlobalScale::Multiplier(multiplier) => 2688.0 * f64::from(multiplier),
                };
                let one = |_| {
                    let magnitude = center * 2f64.powi(rng.i32(-14..3)) * rng.f64();
                    let magnitude = magnitude.min(T::LARGEST);
                    T::round_f64(if rng.bool() { magnitude } else { -magnitude })
                };
                let values: Vec<T> = (0..shape.elements()).map(one).collect();
                let named = Recipe::of(Format::Nvfp4, numerics).unwrap();
                check(gpu, &values, shape, &named.with_global(Global::Given(given)));
                check(gpu, &values, shape, &named);
            }
        }
    }
    let mut rng = fastrand::Rng::with_seed(51);
    run::<f32>(gpu, &mut rng);
    run::<f16>(gpu, &mut rng);
    run::<bf16>(gpu, &mut rng);
}

/// Tests whole tiles of swizzled scales, which warps process in another order, and nearly whole
/// tiles.
///
/// They contain blocks of every kind.
pub(crate) fn equals_the_cpu_on_whole_tiles(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        for (rows, cols) in
            [(128, 256), (256, 768), (384, 4096), (640, 1280), (128, 255), (127, 256), (128, 264)]
        {
            for row_stride in [cols, cols + 8, cols + 1] {
                let shape = Shape::new(rows, cols).with_row_stride(row_stride);
                for non_finite in [false, true] {
                    let values = patterns::<T>(row_stride * rows, non_finite, (rows + cols) as u64);
                    for recipe in default_recipes(ScaleLayout::Swizzled) {
                        check(gpu, &values, shape, &recipe);
                    }
                }
                // Blocks without a slow path.
                let mut rng = fastrand::Rng::with_seed(53);
                let values: Vec<T> = (0..row_stride * rows).map(|_| T::from_f32(rng.f32() - 0.5)).collect();
                for recipe in default_recipes(ScaleLayout::Swizzled) {
                    check(gpu, &values, shape, &recipe);
                }
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

/// Tests zero tensors, single elements, and every kind of extreme as the only amax.
pub(crate) fn equals_the_cpu_on_degenerate_tensors(gpu: &Gpu) {
    fn run<T: Exact>(gpu: &Gpu) {
        let smallest = T::of_bits(1);
        let leads = [0.0, -0.0, smallest.to_f64(), 1e-39, 1e-36, 1.0, T::LARGEST, f64::INFINITY, f64::NAN];
        for lead in leads {
            for rest in [0.0, -0.0, smallest.to_f64(), -1.0] {
                let mut values = vec![T::round_f64(rest); 5 * 70];
                values[3 * 70 + 11] = T::round_f64(lead);
                for &(_, scale_layout) in ScaleLayout::WORDS {
                    for recipe in recipes(&[1e-38, 1.0, 1e38], scale_layout) {
                        check(gpu, &values, Shape::new(5, 70), &recipe);
                    }
                }
            }
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn refuses_what_the_cpu_refuses(gpu: &Gpu) {
    for shape in [Shape::new(100, 1000), Shape::new(100, 999).with_row_stride(1003)] {
        for propagating in default_recipes(ScaleLayout::Swizzled) {
            let recipe = Recipe { non_finite: NonFinite::Error, ..propagating };
            let mut values = patterns::<f32>(shape.span().unwrap(), false, 5);
            assert!(gpu.quantize(&values, shape, &recipe).is_ok(), "{recipe:?}");
            values[77 * shape.row_stride + 123] = f32::NEG_INFINITY;
            values[91 * shape.row_stride + 5] = f32::NAN;
            let by_gpu = gpu.quantize(&values, shape, &recipe);
            let Err(Error::NonFinite { first, report }) = by_gpu else { panic!("{recipe:?}: not refused") };
            let by_cpu = quantize(&values, shape, &recipe);
            let Err(Error::NonFinite { first: cpus, report: cpus_report }) = by_cpu else {
                panic!("{recipe:?}: the CPU does not refuse")
            };
            assert_eq!((first.row, first.col), (77, 123), "{recipe:?}");
            assert_eq!((first, report), (cpus, cpus_report), "{recipe:?}");
        }
    }
}

pub(crate) fn refuses_global_scales_that_the_cpu_refuses(gpu: &Gpu) {
    let values = [1.0f32; 64];
    for numerics in NVFP4_NUMERICS {
        let named = Recipe::of(Format::Nvfp4, numerics).unwrap();
        for value in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::from_bits(1), 1e-37, 1e38, f32::MAX, 1.0] {
            for given in [GlobalScale::Divisor(value), GlobalScale::Multiplier(value)] {
                let recipe = named.with_global(Global::Given(given));
                let by_gpu = gpu.quantize(&values, Shape::new(1, 64), &recipe).map_err(|why| why.to_string());
                let by_cpu = quantize(&values, Shape::new(1, 64), &recipe).map_err(|why| why.to_string());
                assert_eq!(by_gpu, by_cpu, "{numerics:?}, {given:?}");
            }
        }
    }
}

pub(crate) fn handles_empty_matrices(gpu: &Gpu) {
    for shape in [Shape::new(0, 32), Shape::new(5, 0), Shape::new(0, 0)] {
        for &(_, scale_layout) in ScaleLayout::WORDS {
            for recipe in recipes(&[1.0], scale_layout) {
                let quantized = gpu.quantize::<f32>(&[], shape, &recipe).unwrap();
                assert_eq!(quantized, quantize::<f32>(&[], shape, &recipe).unwrap(), "{shape:?}, {recipe:?}");
                assert!(
                    gpu.dequantize::<f32>(&quantized.tensor).unwrap().is_empty(),
                    "{shape:?}, {recipe:?}"
                );
            }
        }
    }
}
