//! NF4 (QLoRA, Dettmers et al. 2023): a 4-bit codebook under bf16 scales, in blocks of 64.
//!
//! The numerics are bitsandbytes'. The codebook's 16 values are quantiles of the normal
//! distribution, from −1 to 1 with an exact 0. The scale of a block is its largest magnitude,
//! rounded to bf16 to nearest, ties to even. It is exact for bf16 values. (bitsandbytes keeps it in
//! f32, or quantizes it once more.)
//!
//! An element x under scale s is encoded as the code nearest to x · (1 / s), each step rounded to
//! f32. The code is the number of [`MIDPOINTS`] below that quotient, so ties go down.
//! `dQuantizeNF4` of bitsandbytes' kernels and `torch.bucketize` of its CPU path do the same. If 1
//! / s is not finite, x / s is used.
//!
//! For f32 and f16 values s may be below the largest magnitude, by half a unit of bf16's last
//! place. A quotient above 1 then gets the code of 1, which is the nearest. Every code stays
//! reachable.

use crate::bf16::Bf16;
use crate::block::{self, BlockEvents};
use crate::e2m1::{pack, unpack};

/// Elements that share a scale.
pub const BLOCK: usize = 64;

/// The codebook: the values of codes 0 to 15.
pub const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The code of zero.
pub const ZERO: u8 = 7;

/// `MIDPOINTS[i]` lies halfway between `VALUES[i]` and `VALUES[i + 1]`, rounded to f32.
///
/// These are bitsandbytes' thresholds.
pub const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < midpoints.len() {
        midpoints[i] = (VALUES[i] + VALUES[i + 1]) / 2.0;
        i += 1;
    }
    midpoints
};

/// Returns the code nearest to a scaled element.
#[inline]
pub fn nearest(x: f32) -> u8 {
    MIDPOINTS.iter().filter(|midpoint| x > **midpoint).count() as u8
}

/// Returns the value of a code.
#[inline]
pub const fn value(code: u8) -> f32 {
    VALUES[(code & 15) as usize]
}

/// Returns the code of a finite element.
#[inline]
pub fn encode(x: f32, scale: Bf16) -> u8 {
    let scale = scale.to_f32();
    let reciprocal = 1.0 / scale;
    match scale {
        0.0 => ZERO,
        _ if reciprocal < f32::INFINITY => nearest(x * reciprocal),
        _ => nearest(x / scale),
    }
}

/// Quantizes a block. This is the reference.
///
/// A block that holds a NaN or an infinity gets the NaN scale and codes 0. Callers with another
/// policy replace those values first.
pub fn quantize_block(values: &[f32; BLOCK], codes: &mut [u8]) -> (Bf16, BlockEvents) {
    let amax_bits = block::amax_bits(values);
    if block::is_non_finite(amax_bits) {
        codes.fill(0);
        return (Bf16::NAN, BlockEvents::default());
    }
    let amax = f32::from_bits(amax_bits);
    let scale = Bf16::from_f32(amax);
    pack(codes, values, 4, |x| encode(x, scale));
    // From here on, the next scale after the largest would be as near or nearer if it existed.
    let above = amax_bits >= u32::from(Bf16::MAX.to_bits()) << 16 | 0x8000;
    let flushed = amax != 0.0 && scale.to_f32() == 0.0;
    (scale, BlockEvents { clipped: above, flushed, scale_saturated: above || flushed })
}

/// Dequantizes a block: each element times the scale in f32. A NaN scale gives 64 canonical NaNs.
pub fn dequantize_block(scale: Bf16, codes: &[u8]) -> [f32; BLOCK] {
    let mut values = [f32::from_bits(0x7FC0_0000); BLOCK];
    if !scale.is_nan() {
        unpack(codes, &mut values, 4, |code| value(code) * scale.to_f32());
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_down() {
        for (i, midpoint) in (0..).zip(MIDPOINTS) {
            let up =
                f32::from_bits(midpoint.to_bits().wrapping_add_signed(if midpoint > 0.0 { 1 } else { -1 }));
            assert_eq!([midpoint, up].map(nearest), [i, i + 1]);
            assert_eq!([value(i), value(i + 1)].map(nearest), [i, i + 1]);
        }
        assert_eq!([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0].map(nearest), [0, 0, ZERO, ZERO, 15, 15]);
        assert_eq!(VALUES[usize::from(ZERO)], 0.0);
    }

    #[test]
    fn smallest_and_largest_blocks() {
        let block = |amax: f32| {
            let mut values = [0.0; BLOCK];
            (values[0], values[1], values[63]) = (-amax, amax / 2.0, amax);
            let mut codes = [0; BLOCK / 2];
            let (scale, events) = quantize_block(&values, &mut codes);
            (scale.to_bits(), [codes[0] & 15, codes[0] >> 4, codes[31] & 15, codes[31] >> 4], events)
        };
        let half = nearest(0.5);
        let none = BlockEvents::default();
        assert_eq!(block(0.0), (0, [ZERO; 4], none));
        // 2^-133, the smallest scale, whose reciprocal is not finite. Half of it rounds to 0, which
        // is even.
        assert_eq!(block(2f32.powi(-133)), (1, [0, half, ZERO, 15], none));
        assert_eq!(block(2f32.powi(-126)), (0x80, [0, half, ZERO, 15], none));
        let flushed = BlockEvents { flushed: true, scale_saturated: true, ..none };
        assert_eq!(block(2f32.powi(-134)), (0, [ZERO; 4], flushed));
        let largest = Bf16::MAX.to_f32();
        assert_eq!(block(largest), (0x7F7F, [0, half, ZERO, 15], none));
        let clipped = BlockEvents { clipped: true, scale_saturated: true, ..none };
        // Half of the largest f32 exceeds half of the scale by enough to get the next code.
        assert_eq!(block(f32::MAX), (0x7F7F, [0, half + 1, ZERO, 15], clipped));
    }
}
