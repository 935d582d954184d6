//! Random quantized operands of products, with scales of a chosen kind.

use microscale::formats::nvfp4::Direction;
use microscale::{Format, GlobalScale, QuantizedShape, QuantizedTensor};

use crate::oracle;

/// The scales of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// Scales of ordinary tensors.
    Common,
    /// All numbers except the largest.
    Numbers,
    /// Any scale, rarely NaN.
    Any,
    /// The largest scale.
    Largest,
    /// The smallest scale that does not turn elements into zeros.
    Smallest,
}

impl Scales {
    fn byte(self, format: Format, random: &mut fastrand::Rng) -> u8 {
        let nan = oracle::nan_scale(format);
        match (self, format) {
            (Self::Any, _) if random.u8(..) == 0 => nan,
            (Self::Common, Format::Mxfp4) => random.u8(112..128),
            (Self::Common, _) => random.u8(0x28..0x50),
            (Self::Numbers, _) => random.u8(..nan - 1),
            (Self::Any, _) => random.u8(..nan),
            (Self::Largest, _) => nan - 1,
            (Self::Smallest, Format::Nvfp4) => 1,
            (Self::Smallest, _) => 0,
        }
    }
}

/// Returns the byte of scale 1, without a global scale.
pub fn scale_of_one(format: Format) -> u8 {
    if format == Format::Nvfp4 { 0x38 } else { 127 }
}

/// Returns a tensor with arbitrary codes. The seed selects the global scale's direction, or none.
pub fn tensor(format: Format, rows: usize, cols: usize, scales: Scales, seed: u64) -> QuantizedTensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let shape = QuantizedShape::new(format, rows, cols);
    let (codes, count) = shape.bytes().expect("a small tensor");
    let codes = (0..codes).map(|_| random.u8(..)).collect();
    let scales = (0..count).map(|_| scales.byte(format, &mut random)).collect();
    let tensor = QuantizedTensor::from_parts(shape, codes, scales).expect("parts that fit");
    let value = 2f32.powi(random.i32(-12..12)) * (1.0 + random.f32());
    match seed % 3 {
        0 if format == Format::Nvfp4 => {
            tensor.with_global_scale(GlobalScale::Divisor(value)).expect("in range")
        }
        1 if format == Format::Nvfp4 => {
            tensor.with_global_scale(GlobalScale::Multiplier(value)).expect("in range")
        }
        _ => tensor,
    }
}

/// The codes and scales of a row.
pub fn row_of(tensor: &QuantizedTensor, row: usize) -> (&[u8], &[u8]) {
    let blocks = tensor.blocks_per_row();
    let bytes = blocks * tensor.format().block_bytes();
    (&tensor.codes()[row * bytes..][..bytes], &tensor.scales()[row * blocks..][..blocks])
}

/// Returns the tensor with changed codes and scales and the same global scale.
pub fn changed(tensor: QuantizedTensor, change: impl FnOnce(&mut [u8], &mut [u8])) -> QuantizedTensor {
    let (shape, global) = (tensor.shape(), tensor.global_scale());
    let (mut codes, mut scales) = tensor.into_parts();
    change(&mut codes, &mut scales);
    let changed = QuantizedTensor::from_parts(shape, codes, scales).expect("parts that fit");
    let given = |value: GlobalScale| changed.clone().with_global_scale(value).expect("in range");
    match global.map(|global| (global.direction(), global.value())) {
        Some((Direction::Divisor, value)) => given(GlobalScale::Divisor(value)),
        Some((Direction::Multiplier, value)) => given(GlobalScale::Multiplier(value)),
        None => changed,
    }
}
