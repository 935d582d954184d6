//! Tests against torchao's 128×4 swizzle of random bytes.

use microscale::{Format, QuantizedShape, QuantizedTensor, ScaleLayout};
use microscale_test_support::golden::{Tensors, files};
use microscale_test_support::oracle;

#[test]
fn swizzled_scales_match_torchao() {
    let name = "torchao-0.18.0-to_blocked";
    assert_eq!(files("layout"), [name]);
    let file = Tensors::read("layout", name);
    let sizes: Vec<&str> = file.names().filter_map(|tensor| tensor.strip_suffix(".linear")).collect();
    assert_eq!((sizes.len() * 2, sizes.len()), (file.names().count(), 10));
    for size in sizes {
        let (linear, swizzled) =
            (file.bytes(&format!("{size}.linear")), file.bytes(&format!("{size}.swizzled")));
        let &[rows, blocks] = file.shape(&format!("{size}.linear")) else { panic!("{size} is no matrix") };
        assert_eq!(oracle::layout::swizzle(linear, rows, blocks), swizzled, "the oracle: {size}");
        // MXFP8's scales may be any bytes. NVFP4's have no sign.
        for (format, mask) in [(Format::Mxfp8E4m3, 0xFF), (Format::Mxfp4, 0xFF), (Format::Nvfp4, 0x7F)] {
            let of = |bytes: &[u8]| bytes.iter().map(|byte| byte & mask).collect::<Vec<u8>>();
            let shape = QuantizedShape::new(format, rows, blocks * format.block());
            let codes = vec![0; rows * blocks * format.block_bytes()];
            let ours = QuantizedTensor::from_parts(shape, codes.clone(), of(linear)).expect("linear scales");
            let theirs = shape.with_scale_layout(ScaleLayout::Swizzled);
            let theirs = QuantizedTensor::from_parts(theirs, codes, of(swizzled)).expect("swizzled scales");
            assert_eq!(ours.convert_layout(ScaleLayout::Swizzled), theirs, "{format}, {size}");
            assert_eq!(theirs.convert_layout(ScaleLayout::Linear), ours, "{format}, {size}");
        }
    }
}
