//! The arithmetic of `microscale_formats` on the processor's own instructions.

use microscale_formats::arithmetic::Fused;

/// f32 by the processor's own instructions where an instance has them.
pub(crate) struct Scalars;

impl Fused for Scalars {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
