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
    /// The [`sigmoid`] is within 2^−21.5 of its value, or 2^−125. Each other operation is rounded
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
    /// GELU, times `up`: x · Φ(x), PyTorch's default.
    Gelu,
}

impl Glu {
    /// SiLU times `up`.
    pub const SILU: Self = Self::Sigmoid(Gate::SILU);

    /// Returns the gated value, with f32 operations that give the same bits on every device.
    #[inline(always)]
    pub fn of<F: Fused>(&self, gate: f32, up: f32) -> f32 {
        match self {
            Self::Sigmoid(limits) => gated::<F>(limits, false, gate, up),
            Self::GeluTanh => gated::<F>(&Gate::SILU, true, gate, up),
            Self::Gelu => gelu::<F>(gate, up),
        }
    }
}

/// Returns [`Gate::of`], or with `gelu_tanh` GELU times `up`: its sigmoid has another argument.
///
/// GELU in its tanh approximation, x/2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), is x · σ(2y),
/// where y is the argument of tanh.
#[inline(always)]
pub fn gated<F: Fused>(gate: &Gate, gelu_tanh: bool, x: f32, up: f32) -> f32 {
    /// 2 · √(2/π)
    const SLOPE: f32 = core::f32::consts::FRAC_2_SQRT_PI * core::f32::consts::SQRT_2;
    let (x, up) = gate.limited(x, up);
    let cubic = F::fma(0.044_715 * x * x, x, x);
    let argument = if gelu_tanh { SLOPE * cubic } else { gate.alpha * x };
    gate.weighed::<F>(x, up, argument)
}

/// Returns GELU of x times `up`: up · (x · Φ(x)), by [`normal_cdf`].
#[inline(always)]
pub fn gelu<F: Fused>(x: f32, up: f32) -> f32 {
    up * (x * normal_cdf::<F>(x))
}

/// The largest x whose Φ(−x) is computed. Beyond it the result is 0.
const FARTHEST_DEVIATION: f32 = 12.9;

/// Returns the distribution function of the normal distribution, Φ(x) = (1 + erf(x / √2)) / 2, or 0
/// below −12.9, so that results are normal numbers.
///
/// The result is within 2^−21 of its value, or 2^−125. Φ(−|x|) is e^(−x²/2) times a function of t =
/// 1 / (1 + 17/64 · |x|): t times a polynomial, whose coefficients minimize the largest relative
/// error, 2^−25.2. So negative x have no cancellation, which 1 + erf has.
#[inline(always)]
pub fn normal_cdf<F: Fused>(x: f32) -> f32 {
    const SLOPE: f32 = 17.0 / 64.0;
    let magnitude = x.abs();
    // Comparisons with NaN are false.
    let a = if magnitude > FARTHEST_DEVIATION { FARTHEST_DEVIATION } else { magnitude };
    let t = reciprocal::<F>(F::fma(a, SLOPE, 1.0));
    let series = F::fma(0.030_669_572, t, -0.142_309_44);
    let series = F::fma(series, t, 0.212_153_26);
    let series = F::fma(series, t, -0.110_621_75);
    let series = F::fma(series, t, 0.134_188_74);
    let series = F::fma(series, t, 0.061_820_645);
    let series = F::fma(series, t, 0.102_573_23);
    let series = F::fma(series, t, 0.105_537_06);
    let series = F::fma(series, t, 0.105_988_7);
    // x² in two parts, because its error becomes a relative error of e^(−x²/2).
    let square = a * a;
    let (rest, exponent) = reduced::<F>(-0.5 * square);
    let rest = F::fma(-0.5, F::fma(a, a, -square), rest);
    let tail = exponential::<F>(rest) * (t * series) * power(exponent);
    let below = if x < -FARTHEST_DEVIATION { 0.0 } else { tail };
    if x < 0.0 { below } else { 1.0 - tail }
}

/// The largest x whose sigmoid(−x) is computed. Beyond it the result is 0.
const FARTHEST: f32 = 87.0;

/// Returns 1 / (1 + e^−x), or 0 below −87, so that results are normal numbers or 0.
///
/// The result is within 2^−21.5 of its value, or 2^−125. NaN gives a number, which the gate's
/// multiplication by its NaN operand makes NaN again.
#[inline(always)]
pub fn sigmoid<F: Fused>(x: f32) -> f32 {
    // Not by branches: a GPU would compute one element after the other. Below −87, the power of two
    // leaves its range, and its product is not used.
    let (rest, exponent) = reduced::<F>((-x).max(-FARTHEST));
    let sigmoid = reciprocal::<F>(F::fma(exponential::<F>(rest), power(exponent), 1.0));
    if x < -FARTHEST { 0.0 } else { sigmoid }
}

/// Returns r and k with e^x = e^r · 2^k, where |r| is at most ln 2 / 2. k is in two's complement.
///
/// x is from −87 to 87, or NaN; r is NaN then. For other x, both are unspecified.
#[inline(always)]
fn reduced<F: Fused>(x: f32) -> (f32, u32) {
    // ln 2. Its first part has so few bits that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // Adding this leaves an integer in the last bits.
    const WHOLE: f32 = 12_582_912.0;
    let shifted = F::fma(x, core::f32::consts::LOG2_E, WHOLE);
    let (exponent, whole) = (shifted.to_bits().wrapping_sub(WHOLE.to_bits()), shifted - WHOLE);
    let rest = F::fma(whole, -LN_2[0], x);
    let rest = F::fma(whole, -LN_2[1], rest);
    (rest, exponent)
}

/// Returns 2^k, for k in two's complement.
#[inline(always)]
fn power(exponent: u32) -> f32 {
    f32::from_bits(exponent.wrapping_add(127) << 23)
}

/// Returns e^x for |x| up to ln 2 / 2: 1 + x and a polynomial whose coefficients minimize the
/// largest relative error, 2^−23.2.
#[inline(always)]
fn exponential<F: Fused>(x: f32) -> f32 {
    let series = F::fma(0.008_312_501, x, 0.041_890_33);
    let series = F::fma(series, x, 0.166_671_16);
    let series = F::fma(series, x, 0.499_992_3);
    let series = F::fma(series, x, 1.0);
    F::fma(series, x, 1.0)
}

/// Returns 1 / x for a normal x of at least 1 whose reciprocal is normal.
///
/// There is no division, because GPUs would call a function for it.
#[inline(always)]
fn reciprocal<F: Fused>(x: f32) -> f32 {
    // The difference of bits is within 0.0506 of it. The next step cubes the error, and Newton's
    // squares it.
    let reciprocal = f32::from_bits(0x7EF3_11C7_u32.wrapping_sub(x.to_bits()));
    let off = F::fma(-x, reciprocal, 1.0);
    let reciprocal = F::fma(reciprocal, F::fma(off, off, off), reciprocal);
    let off = F::fma(-x, reciprocal, 1.0);
    F::fma(reciprocal, off, reciprocal)
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
                let bound = (right * 2f64.powf(-21.5)).max(2f64.powi(-125));
                assert!((found - right).abs() <= bound, "{x:e}: {found:e}, not {right:e}");
            }
        }
        assert!(Glu::SILU.of::<MulAdd>(f32::NAN, 1.0).is_nan());
    }

    #[test]
    fn gelu_is_zero_at_zero_and_nan_propagates() {
        let gelu = |x| Glu::Gelu.of::<MulAdd>(x, 2.0);
        assert_eq!((gelu(0.0), gelu(1e30), gelu(-1e30)), (0.0, 2e30, 0.0));
        assert!((f64::from(gelu(1.0)) - 1.682_689_492).abs() < 1e-6);
        assert!(gelu(f32::NAN).is_nan() && gelu(f32::NEG_INFINITY).is_nan());
    }

    /// The argument of the sigmoid has an error of a few units, which e^x multiplies.
    #[test]
    fn gelu_tanh_is_close_to_f64() {
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
        // A sigmoid of 2^-125 in place of 0 would give -1e22.
        assert_eq!((silu(-1e30, 1e30), silu(f32::MIN, f32::MAX)), (0.0, 0.0));
        assert!((silu(2.0, 3.0) - 6.0 / (1.0 + (-2f32).exp())).abs() < 1e-6);
    }
}
