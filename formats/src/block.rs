//! Parts that blocks of every format share: amax, the sign of zeros and quantization events.

/// How a zero's sign is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum NegativeZero {
    /// −0 and negatives that round to zero become −0 (code 8 of E2M1): IEEE, OCP, torchao.
    #[default]
    Keep = 0,
    /// Input −0 becomes +0; negatives that round to zero become −0: compressed-tensors.
    DropInput = 1,
    /// −0 is never written: ggml.
    Drop = 2,
    /// Input zeros of either sign become −0, as do negatives that round to zero: ModelOpt.
    Force = 3,
}

/// What happened while quantizing one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockEvents {
    /// At least one element was clipped.
    ///
    /// amax exceeds the largest element times the scale, by more than the scale's own rounding
    /// explains.
    pub clipped: bool,
    /// amax is not zero, but every element decodes to zero.
    pub flushed: bool,
    /// The rule asked for a scale larger or smaller than its format or numerics allow.
    pub scale_saturated: bool,
}

/// Returns the bits of the largest magnitude.
///
/// As integers they order like the magnitudes, and every NaN is above infinity.
#[inline(always)]
pub fn amax_bits<const N: usize>(values: &[f32; N]) -> u32 {
    let mut most = 0;
    for value in values {
        most = most.max(value.to_bits() & 0x7FFF_FFFF);
    }
    most
}

/// Returns whether the bits of an amax are an infinity or a NaN.
#[inline(always)]
pub const fn is_non_finite(amax_bits: u32) -> bool {
    amax_bits >= 0x7F80_0000
}

/// Applies the policy for signs of zeros to a code. `sign` is the sign bit of the codes.
#[inline(always)]
pub(crate) const fn with_zero_sign(code: u8, sign: u8, value: f32, negative_zero: NegativeZero) -> u8 {
    match negative_zero {
        NegativeZero::DropInput if value == 0.0 => 0,
        NegativeZero::Drop if code == sign => 0,
        NegativeZero::Force if value == 0.0 => sign,
        _ => code,
    }
}
