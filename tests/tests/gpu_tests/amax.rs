//! Tests the amax of a matrix.

use half::{bf16, f16};
use microscale::gpu::{DeviceAmax, Gpu};
use microscale::{Amax, Element, Error, Shape, Words, amax};

use super::support::{SHAPES, patterns};

/// Asserts that the GPU's amax from host memory equals the CPU's.
fn check<T: Element>(gpu: &Gpu, values: &[T], shape: Shape) {
    let (found, expected) = (gpu.amax(values, shape).unwrap(), amax(values, shape).unwrap());
    assert_eq!(found, expected, "{} {shape:?}", T::DTYPE.word());
}

pub(crate) fn equals_the_cpu(gpu: &Gpu) {
    fn run<T: Element>(gpu: &Gpu) {
        let mut rng = fastrand::Rng::with_seed(60);
        for (i, shape) in
            SHAPES.into_iter().chain([Shape::new(2000, 3001), Shape::new(1, 1 << 22)]).enumerate()
        {
            check(gpu, &patterns::<T>(shape.span().unwrap(), true, i as u64), shape);
            // Initially only gaps between rows are NaN. Then more and more elements follow.
            let mut values = vec![T::from_f32(f32::NAN); shape.span().unwrap()];
            for row in 0..shape.rows {
                for value in &mut values[row * shape.row_stride..][..shape.cols] {
                    *value = T::from_f32(rng.f32() - 0.5);
                }
            }
            check(gpu, &values, shape);
            for special in [-7.5, T::MAX, f32::INFINITY, f32::NAN] {
                let place = rng.usize(..shape.rows) * shape.row_stride + rng.usize(..shape.cols);
                let before = std::mem::replace(&mut values[place], T::from_f32(special));
                check(gpu, &values, shape);
                values[place] = before;
            }
            check(gpu, &vec![T::from_f32(-0.0); shape.span().unwrap()], shape);
            check(gpu, &vec![T::from_f32(f32::NEG_INFINITY); shape.span().unwrap()], shape);
        }
    }
    run::<f32>(gpu);
    run::<f16>(gpu);
    run::<bf16>(gpu);
}

pub(crate) fn of_empty_matrices_is_zero(gpu: &Gpu) {
    for shape in [Shape::new(0, 32), Shape::new(5, 0), Shape::new(0, 0)] {
        assert_eq!(gpu.amax::<f32>(&[], shape).unwrap(), Amax::default(), "{shape:?}");
    }
    let refused = gpu.amax(&[1.0f32; 139], Shape::new(3, 40).with_row_stride(50));
    assert!(matches!(refused, Err(Error::Length { expected: 140, found: 139, .. })), "{refused:?}");
}

pub(crate) fn adds_up_and_clears(gpu: &Gpu) {
    let (stream, shape) = (gpu.stream(), Shape::new(70, 301));
    let parts: Vec<Vec<bf16>> = (0..4).map(|seed| patterns(shape.elements(), seed == 3, 70 + seed)).collect();
    let mut sum = DeviceAmax::zeros(stream).unwrap();
    let mut expected = Amax::default();
    for _ in 0..2 {
        for part in &parts {
            let input = stream.clone_htod(part).unwrap();
            gpu.amax_on(stream, &input, shape, &mut sum).unwrap();
            expected.add(amax(part, shape).unwrap());
            assert_eq!(sum.read(stream).unwrap(), expected);
        }
        assert!(expected.nan && expected.infinite, "the last part has both");
        sum.clear(stream).unwrap();
        expected = Amax::default();
        assert_eq!(sum.read(stream).unwrap(), expected);
    }
}

pub(crate) fn may_start_anywhere(gpu: &Gpu) {
    let shape = Shape::new(9, 161);
    let values = patterns::<f16>(shape.elements() + 16, true, 61);
    let whole = gpu.stream().clone_htod(&values).unwrap();
    for start in 0..16 {
        let view = whole.slice(start..start + shape.elements());
        let mut sum = DeviceAmax::zeros(gpu.stream()).unwrap();
        gpu.amax_on(gpu.stream(), &view, shape, &mut sum).unwrap();
        assert_eq!(sum.read(gpu.stream()).unwrap(), amax(&values[start..], shape).unwrap(), "start {start}");
    }
}
