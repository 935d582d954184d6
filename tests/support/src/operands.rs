//! Random quantized operands of products, with scales of a chosen kind.

use microscale::formats::nvfp4::Direction;
use microscale::formats::{E2m1, E4m3, E8m0, fp8_dot};
use microscale::{Format, GlobalScale, QuantizedShape, QuantizedTensor};

use crate::arithmetic::Scalars;
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

/// Returns the sum of a row of weights and a row of E4M3 activations by the definition, with sums of
/// packs or of blocks ([`multiplies_blocks`](microscale_kernels_abi::GemmConfig::multiplies_blocks)).
pub fn sum_in_fp8(
    by_block: bool,
    weights: fp8_dot::Weights<'_>,
    x: &[E4m3],
    scales: fp8_dot::Scales<'_>,
) -> f32 {
    if by_block {
        fp8_dot::block_row::<Scalars>(weights, x, scales)
    } else {
        fp8_dot::row::<Scalars>(weights, x, scales)
    }
}

/// Returns rows of MXFP4 in E4M3 by the definition: codes, and a scale per row that includes alpha.
pub fn in_fp8(x: &QuantizedTensor, alpha: f32) -> (Vec<u8>, Vec<f32>) {
    let (mut codes, mut row_scales) = (Vec::new(), Vec::new());
    for row in 0..x.rows() {
        let (bytes, scales) = row_of(x, row);
        let largest = E8m0::from_bits(*scales.iter().max().expect("a block"));
        row_scales.push(fp8_dot::mxfp4_token_scale(largest, alpha));
        let elements = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).map(E2m1::from_bits);
        for (i, element) in elements.enumerate() {
            let scale = E8m0::from_bits(scales[i / Format::Mxfp4.block()]);
            codes.push(fp8_dot::mxfp4_activation(element, scale, largest).to_bits());
        }
    }
    (codes, row_scales)
}
