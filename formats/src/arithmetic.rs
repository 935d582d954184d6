//! f32 operations that the reference is written in. Scalars, CPU vectors and GPUs share one text.
//!
//! A scalar implementation provides [`Fused`] and gets every operation of [`Machine`] from it.
//! Vector types implement [`Machine`] directly.

/// Operations on f32 that processors do in one instruction and `core` lacks.
pub trait Fused {
    /// a · b + c, rounded once.
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// The smaller of two numbers.
    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
}

/// Operations that searches, quotients and rounding need, on one f32 or on a vector of them.
pub trait Machine {
    /// An f32, or a vector with one f32 per lane.
    type Number: Copy;

    /// Broadcasts a number to every lane.
    fn splat(x: f32) -> Self::Number;

    /// a · b
    fn mul(a: Self::Number, b: Self::Number) -> Self::Number;

    /// a + b
    fn add(a: Self::Number, b: Self::Number) -> Self::Number;

    /// a − b
    fn sub(a: Self::Number, b: Self::Number) -> Self::Number;

    /// a · b + c, rounded once.
    fn fma(a: Self::Number, b: Self::Number, c: Self::Number) -> Self::Number;

    /// c − a · b, rounded once.
    fn fnma(a: Self::Number, b: Self::Number, c: Self::Number) -> Self::Number;

    /// The smaller of two numbers.
    fn min(a: Self::Number, b: Self::Number) -> Self::Number;

    /// The larger of two numbers.
    fn max(a: Self::Number, b: Self::Number) -> Self::Number;
}

impl<F: Fused> Machine for F {
    type Number = f32;

    #[inline(always)]
    fn splat(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn mul(a: f32, b: f32) -> f32 {
        a * b
    }

    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }

    #[inline(always)]
    fn sub(a: f32, b: f32) -> f32 {
        a - b
    }

    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        <F as Fused>::fma(a, b, c)
    }

    #[inline(always)]
    fn fnma(a: f32, b: f32, c: f32) -> f32 {
        <F as Fused>::fma(-a, b, c)
    }

    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        <F as Fused>::min(a, b)
    }

    #[inline(always)]
    fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
}

/// [`Fused`] by the standard library, for tests.
#[cfg(test)]
pub(crate) struct MulAdd;

#[cfg(test)]
impl Fused for MulAdd {
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
