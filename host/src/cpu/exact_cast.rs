//! Casts to E4M3 under a power of two, with a check that nothing was rounded.

use microscale_formats::E4m3;
use microscale_formats::plan::power_of_two;

/// The inverse of a scale and the scale, each as a product of two normal numbers.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    over: [f32; 2],
    under: [f32; 2],
}

impl Factors {
    /// The factors of the scale 2^`power`, for powers from -127 to 127.
    pub(crate) fn of(power: i32) -> Self {
        let halves = [power / 2, power - power / 2];
        Self { over: halves.map(|half| power_of_two(-half)), under: halves.map(power_of_two) }
    }
}

/// Casts values to codes. Returns whether all casts are exact. All NaN count as equal.
#[inline(always)]
pub(super) fn to_e4m3(values: &[f32], Factors { over, under }: Factors, codes: &mut [u8]) -> bool {
    let mut inexact = 0;
    for (code, value) in codes.iter_mut().zip(values) {
        // A quotient too small for f32 is below half of the smallest E4M3. The product back is
        // always an f32 or infinite.
        let element = E4m3::from_f32(*value * over[0] * over[1]);
        let back = element.to_f32() * under[0] * under[1];
        let same = (back == *value) | (value.is_nan() & back.is_nan());
        inexact |= u32::from(!same);
        *code = element.to_bits();
    }
    inexact == 0
}
