//! Tests scale layouts.

use microscale::gpu::{DeviceTensor, Gpu};
use microscale::{Error, Format, GlobalScale, QuantizedShape, QuantizedTensor, ScaleLayout, Words};
use microscale_test_support::golden::{Tensors, files};

/// Returns a tensor of random bytes. Its scales are nonzero, so that padding is recognizable.
fn tensor(shape: QuantizedShape, rng: &mut fastrand::Rng) -> QuantizedTensor {
    let (codes, scales) = shape.bytes().unwrap();
    let codes = (0..codes).map(|_| rng.u8(..)).collect();
    let scales = (0..scales).map(|_| rng.u8(1..128)).collect();
    let tensor = QuantizedTensor::from_parts(shape, codes, scales).unwrap();
    match shape.format {
        Format::Nvfp4 => tensor.with_global_scale(GlobalScale::Multiplier(rng.f32() + 0.1)).unwrap(),
        _ => tensor,
    }
}

pub(crate) fn converting_equals_the_cpu(gpu: &Gpu) {
    let mut rng = fastrand::Rng::with_seed(80);
    for rows in [0, 1, 31, 32, 33, 127, 128, 129, 256, 300, 1025] {
        for blocks in [1, 2, 3, 4, 5, 7, 8, 17, 64, 129] {
            for format in Format::WITH_KERNELS {
                let cols = blocks * format.block() - rng.usize(..3);
                let linear = tensor(QuantizedShape::new(format, rows, cols), &mut rng);
                for from in [&linear, &linear.convert_layout(ScaleLayout::Swizzled)] {
                    for &(_, to) in ScaleLayout::WORDS {
                        let found = gpu.convert_layout(from, to).unwrap();
                        assert_eq!(found, from.convert_layout(to), "{:?} to {to:?}", from.shape());
                    }
                }
            }
        }
    }
}

/// A conversion writes every byte of its target, including padding.
pub(crate) fn converting_overwrites_its_target(gpu: &Gpu) {
    let mut rng = fastrand::Rng::with_seed(81);
    let stream = gpu.stream();
    let shape = QuantizedShape::new(Format::Nvfp4, 70, 140);
    let (one, other) = (tensor(shape, &mut rng), tensor(shape, &mut rng));
    // The target's padding is not zero beforehand.
    let swizzled = shape.with_scale_layout(ScaleLayout::Swizzled);
    let mut target = DeviceTensor::from_host(stream, &tensor(swizzled, &mut rng)).unwrap();
    for source in [&one, &other] {
        let device = DeviceTensor::from_host(stream, source).unwrap();
        gpu.convert_layout_on(stream, &device, &mut target).unwrap();
        assert_eq!(target.to_host(stream).unwrap(), source.convert_layout(ScaleLayout::Swizzled));
    }
    let device = DeviceTensor::from_host(stream, &one).unwrap();
    let mut smaller = DeviceTensor::zeros(stream, QuantizedShape { rows: 69, ..swizzled }).unwrap();
    let refused = gpu.convert_layout_on(stream, &device, &mut smaller);
    assert!(matches!(refused, Err(Error::QuantizedShape { .. })), "{refused:?}");
}

pub(crate) fn swizzled_scales_match_torchao(gpu: &Gpu) {
    for name in files("layout") {
        let file = Tensors::read("layout", &name);
        for size in file.names().filter_map(|tensor| tensor.strip_suffix(".linear")) {
            let &[rows, blocks] = file.shape(&format!("{size}.linear")) else {
                panic!("{size} is no matrix")
            };
            let shape = QuantizedShape::new(Format::Mxfp4, rows, blocks * 32);
            let linear = file.bytes(&format!("{size}.linear")).to_vec();
            let ours = QuantizedTensor::from_parts(shape, vec![0; rows * blocks * 16], linear).unwrap();
            let found = gpu.convert_layout(&ours, ScaleLayout::Swizzled).unwrap();
            assert_eq!(found.scales(), file.bytes(&format!("{size}.swizzled")), "{size}");
        }
    }
}
