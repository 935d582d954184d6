//! The gate of a feed-forward layer. It combines two results of a product, `gate` and `up`, into
//! one.

use crate::arithmetic::Fused;

/// A gated linear unit: `(up + offset) · gate · sigmoid(alpha · gate)`.
///
/// `gate` is first limited to at most `limit`, and `up` to the range −`limit` to `limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Gate {
    /// Factor of the sigmoid's argument.
    pub alpha: f32,
    /// Largest `gate` and largest magnitude of `up`. Infinity means no limit.
    pub limit: f32,
    /// Added to `up`.
    pub offset: f32,
}

impl Gate {
    /// SiLU times `up`, as in Llama, Qwen and DeepSeek.
    pub const SILU: Self = Self { alpha: 1.0, limit: f32::INFINITY, offset: 0.0 };
    /// The gate of gpt-oss.
    pub const GPT_OSS: Self = Self { alpha: 1.702, limit: 7.0, offset: 1.0 };

    /// Returns the gated value, with f32 operations that give the same bits on every device.
    ///
    /// The [`sigmoid`] is within 2^−22 of its value, or 2^−125. Each other operation is rounded
    /// once. NaN stays NaN.
    #[inline(always)]
    pub fn of<F: Fused>(&self, gate: f32, up: f32) -> f32 {
        let (gate, up) = self.limited(gate, up);
        self.weighed::<F>(gate, up, self.alpha * gate)
    }

    /// Returns whether [`Self::of`] is [`Self::weighed`] with the argument `gate`, as for SiLU.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.alpha == 1.0 && self.limit == f32::INFINITY
    }

    /// Returns the gated value of operands within the limits, given the sigmoid's argument.
    #[inline(always)]
    pub fn weighed<F: Fused>(&self, gate: f32, up: f32, argument: f32) -> f32 {
        (up + self.offset) * (gate * sigmoid::<F>(argument))
    }

    /// Returns `gate` and `up` within their limits.
    #[inline(always)]
    fn limited(&self, gate: f32, up: f32) -> (f32, f32) {
        // Comparisons with NaN are false.
        let gate = if gate > self.limit { self.limit } else { gate };
        let up = if up > self.limit { self.limit } else { up };
        let up = if up < -self.limit { -self.limit } else { up };
        (gate, up)
    }
}

/// The gates of feed-forward layers, which kernels for activations compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// A gate with a sigmoid: SiLU, or the gate of gpt-oss.
    Sigmoid(Gate),
    /// GELU in its tanh approximation, times `up`, as in Gemma.
    GeluTanh,
}

impl Glu {
    /// SiLU times `up`.
    pub const SILU: Self = Self::Sigmoid(Gate::SILU);

    /// Returns the gated value, with f32 operations that give the same bits on every device.
    #[inline(always)]
    pub fn of<F: Fused>(&self, gate: f32, up: f32) -> f32 {
        let (limits, gelu) = match self {
            Self::Sigmoid(limits) => (*limits, false),
            Self::GeluTanh => (Gate::SILU, true),
        };
        gated::<F>(&limits, gelu, gate, up)
    }
}

/// Returns [`Gate::of`], or with `gelu` GELU times `up`: its sigmoid has another argument.
///
/// GELU in its tanh approximation, x/2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), is x · σ(2y),
/// where y is the argument of tanh.
#[inline(always)]
pub fn gated<F: Fused>(gate: &Gate, gelu: bool, x: f32, up: f32) -> f32 {
    /// 2 · √(2/π)
    const SLOPE: f32 = core::f32::consts::FRAC_2_SQRT_PI * core::f32::consts::SQRT_2;
    let (x, up) = gate.limited(x, up);
    let cubic = F::fma(0.044_715 * x * x, x, x);
    let argument = if gelu { SLOPE * cubic } else { gate.alpha * x };
    gate.weighed::<F>(x, up, argument)
}

/// The largest x whose sigmoid(−x) is computed. Beyond it the result is 0.
const FARTHEST: f32 = 87.0;

/// Returns 1 / (1 + e^−x), or 0 below −87, so that results are normal numbers.
///
/// There is no division, because GPUs would call a function for it.
#[inline(always)]
pub fn sigmoid<F: Fused>(x: f32) -> f32 {
    // ln 2. Its first part has so few bits that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // Adding this leaves an integer in the last bits.
    const WHOLE: f32 = 12_582_912.0;
    if x < -FARTHEST {
        return 0.0;
    }
    // Above it, the exponential is negligible compared with 1.
    let negative = if x > FARTHEST { -FARTHEST } else { -x };
    let shifted = negative * core::f32::consts::LOG2_E + WHOLE;
    let (exponent, whole) = (shifted.to_bits().wrapping_sub(WHOLE.to_bits()), shifted - WHOLE);
    let rest = F::fma(whole, -LN_2[0], negative);
    let rest = F::fma(whole, -LN_2[1], rest);
    // The series of e^x. For x up to ln 2 / 2 these terms reach f32's precision. The loop is
    // unrolled by hand because GPU compilers keep an array in memory.
    let series = F::fma(1.0 / 5040.0, rest, 1.0 / 720.0);
    let series = F::fma(series, rest, 1.0 / 120.0);
    let series = F::fma(series, rest, 1.0 / 24.0);
    let series = F::fma(series, rest, 1.0 / 6.0);
    let series = F::fma(series, rest, 0.5);
    let series = F::fma(series, rest, 1.0);
    let exponential = F::fma(series, rest, 1.0);
    let power = f32::from_bits(exponent.wrapping_add(127) << 23);
    let sum = F::fma(exponential, power, 1.0);
    // The reciprocal. The difference of bits is within an eighth of it, and each of Newton's steps
    // squares the error.
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
    use crate::arithmetic::MulAdd;

    /// Compares every 1009th f32, of either sign, with f64.
    #[test]
    fn sigmoid_is_within_its_documented_error() {
        for bits in (0..=f32::INFINITY.to_bits()).step_by(1009) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (found, right) = (f64::from(sigmoid::<MulAdd>(x)), 1.0 / (1.0 + (-f64::from(x)).exp()));
                let bound = (right * 2f64.powi(-22)).max(2f64.powi(-125));
                assert!((found - right).abs() <= bound, "{x:e}: {found:e}, not {right:e}");
            }
        }
        assert!(sigmoid::<MulAdd>(f32::NAN).is_nan());
    }

    /// The argument of the sigmoid has an error of a few units, which e^x multiplies.
    #[test]
    fn gelu_is_close_to_f64() {
        let gelu = |x| Glu::GeluTanh.of::<MulAdd>(x, 1.0);
        for i in -4000..4000 {
            let x = i as f32 * 0.004;
            let wide = f64::from(x);
            let inner = (2.0 / core::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
            let (found, right) = (f64::from(gelu(x)), 0.5 * wide * (1.0 + inner.tanh()));
            let error = right.abs() * 2f64.powi(-21) * (1.0 + 2.0 * inner.abs());
            // 1 + tanh cancels in f64, too.
            assert!((found - right).abs() <= error + 2f64.powi(-50), "{x}: {found:e}, {right:e}");
        }
        assert_eq!(gelu(f32::MAX), f32::MAX);
        assert!(gelu(f32::NAN).is_nan());
    }

    #[test]
    fn gates_are_limited_and_nan_propagates() {
        let gpt_oss = |gate, up| Gate::GPT_OSS.of::<MulAdd>(gate, up);
        assert_eq!(gpt_oss(9.0, 8.0), gpt_oss(7.0, 7.0));
        assert_eq!(gpt_oss(1.0, -9.0), gpt_oss(1.0, -7.0));
        assert!(gpt_oss(f32::NAN, 1.0).is_nan() && gpt_oss(1.0, f32::NAN).is_nan());
        let silu = |gate: f32, up| Gate::SILU.of::<MulAdd>(gate, up);
        assert_eq!(silu(0.0, 3.0), 0.0);
        assert!((silu(2.0, 3.0) - 6.0 / (1.0 + (-2f32).exp())).abs() < 1e-6);
    }
}
