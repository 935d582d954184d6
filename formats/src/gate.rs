//! The gate of a feed-forward layer: two of a product's results, a gate and what is let through, become one.

use crate::arithmetic::Fused;

/// A gated linear unit, with the sigmoid as its gate: `(up + offset) · gate · sigmoid(alpha · gate)`, of a gate that is at most
/// `limit` and an `up` between −`limit` and `limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Gate {
    /// What the sigmoid's argument is multiplied with.
    pub alpha: f32,
    /// The largest gate, and the largest magnitude of what is let through; infinite for none.
    pub limit: f32,
    /// What is added to what is let through.
    pub offset: f32,
}

impl Gate {
    /// SiLU times up, as Llama, Qwen and DeepSeek have it.
    pub const SILU: Self = Self { alpha: 1.0, limit: f32::INFINITY, offset: 0.0 };
    /// The gate of gpt-oss.
    pub const GPT_OSS: Self = Self { alpha: 1.702, limit: 7.0, offset: 1.0 };

    /// The gated value, by operations of f32 that give the same bits everywhere. The [`sigmoid`] is within 2^−22 of its value, or
    /// 2^−125; each of the other operations is rounded once. NaN stays NaN.
    #[inline(always)]
    pub fn of<F: Fused>(&self, gate: f32, up: f32) -> f32 {
        // Comparisons with NaN do not hold.
        let gate = if gate > self.limit { self.limit } else { gate };
        let up = if up > self.limit { self.limit } else { up };
        let up = if up < -self.limit { -self.limit } else { up };
        (up + self.offset) * (gate * sigmoid::<F>(self.alpha * gate))
    }
}

/// The largest argument whose negative has a sigmoid that is not taken for 0.
const FARTHEST: f32 = 87.0;

/// 1 / (1 + e^−x), of normal numbers only: 0 below −87. No operation is a division, which GPUs would call a function for.
#[inline(always)]
pub fn sigmoid<F: Fused>(x: f32) -> f32 {
    // ln 2, whose first part has so few bits that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // Adding this leaves a whole number in the last bits.
    const WHOLE: f32 = 12_582_912.0;
    if x < -FARTHEST {
        return 0.0;
    }
    // Above, the exponential does not matter beside 1.
    let negative = if x > FARTHEST { -FARTHEST } else { -x };
    let shifted = negative * core::f32::consts::LOG2_E + WHOLE;
    let (exponent, whole) = (shifted.to_bits().wrapping_sub(WHOLE.to_bits()), shifted - WHOLE);
    let rest = F::fma(whole, -LN_2[0], negative);
    let rest = F::fma(whole, -LN_2[1], rest);
    // The series of e^x: for x to ln 2 / 2, so many terms are f32's. Written out, for compilers for GPUs keep an array in memory.
    let series = F::fma(1.0 / 5040.0, rest, 1.0 / 720.0);
    let series = F::fma(series, rest, 1.0 / 120.0);
    let series = F::fma(series, rest, 1.0 / 24.0);
    let series = F::fma(series, rest, 1.0 / 6.0);
    let series = F::fma(series, rest, 0.5);
    let series = F::fma(series, rest, 1.0);
    let exponential = F::fma(series, rest, 1.0);
    let power = f32::from_bits(exponent.wrapping_add(127) << 23);
    let sum = F::fma(exponential, power, 1.0);
    // The reciprocal: the difference of bits is within an eighth of it, and Newton's steps square what it is off.
    let mut reciprocal = f32::from_bits(0x7EF3_11C7_u32.wrapping_sub(sum.to_bits()));
    for _ in 0..3 {
        let off = F::fma(-sum, reciprocal, 1.0);
        reciprocal = F::fma(reciprocal, off, reciprocal);
    }
    reciprocal
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exact;

    impl Fused for Exact {
        fn fma(a: f32, b: f32, c: f32) -> f32 {
            a.mul_add(b, c)
        }
    }

    /// All arguments of so many bits, of either sign, against f64.
    #[test]
    fn sigmoid_is_as_near_as_it_says() {
        for bits in (0..=f32::INFINITY.to_bits()).step_by(1009) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (found, right) = (f64::from(sigmoid::<Exact>(x)), 1.0 / (1.0 + (-f64::from(x)).exp()));
                let bound = (right * 2f64.powi(-22)).max(2f64.powi(-125));
                assert!((found - right).abs() <= bound, "{x:e}: {found:e}, not {right:e}");
            }
        }
        assert!(sigmoid::<Exact>(f32::NAN).is_nan());
    }

    #[test]
    fn gates_are_limited_and_nan_stays() {
        let gpt_oss = |gate, up| Gate::GPT_OSS.of::<Exact>(gate, up);
        assert_eq!(gpt_oss(9.0, 8.0), gpt_oss(7.0, 7.0));
        assert_eq!(gpt_oss(1.0, -9.0), gpt_oss(1.0, -7.0));
        assert!(gpt_oss(f32::NAN, 1.0).is_nan() && gpt_oss(1.0, f32::NAN).is_nan());
        let silu = |gate: f32, up| Gate::SILU.of::<Exact>(gate, up);
        assert_eq!(silu(0.0, 3.0), 0.0);
        assert!((silu(2.0, 3.0) - 6.0 / (1.0 + (-2f32).exp())).abs() < 1e-6);
    }
}
