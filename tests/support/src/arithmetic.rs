//! The f32 operations of definitions, by the standard library.

use microscale::formats::arithmetic::Fused;

/// f32 operations of the processor.
#[derive(Clone, Copy, Debug)]
pub struct Scalars;

impl Fused for Scalars {
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
