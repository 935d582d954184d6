//! Sixteen f32 at a time, for what the compiler does not turn into vector instructions by itself: one trait, and a thin file for each
//! instruction set.
//!
//! The methods of the x86-64 types compile to single instructions in functions that have the features enabled, which are the stamps
//! of `isa`; everything between is `inline(always)`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
use microscale_formats::search::{Fused, Machine};
pub(super) use portable::Portable;

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// Something in each lane.
pub(super) type Lanes<T> = [T; LANES];

/// Vectors of an instruction set. As a [`Machine`] it has their arithmetic.
pub(super) trait Vector: Machine {
    /// From memory.
    fn load(lanes: &Lanes<f32>) -> Self::Number;

    /// To memory.
    fn store(vector: Self::Number) -> Lanes<f32>;

    /// a / b
    fn div(a: Self::Number, b: Self::Number) -> Self::Number;

    /// Bit i for lane i: where a ≤ b.
    fn at_most(a: Self::Number, b: Self::Number) -> u16;

    /// The lanes of `set` whose bits are set in the mask, and those of `unset`.
    fn select(mask: u16, set: Self::Number, unset: Self::Number) -> Self::Number;
}

/// f32 by the processor's own instructions where a stamp has them.
pub(crate) struct Scalars;

impl Fused for Scalars {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of all magnitudes and signs.
    fn numbers(random: &mut fastrand::Rng) -> Lanes<f32> {
        std::array::from_fn(|_| {
            let exponent = random.i32(-20..20);
            (random.f32() - 0.5) * 2f32.powi(exponent)
        })
    }

    /// Calls every method and compares it with f32's own.
    fn check<V: Vector>() {
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..1000 {
            let [a, mut b, c] = [(); 3].map(|()| numbers(&mut random));
            b[round % LANES] = a[round % LANES];
            let [va, vb, vc] = [a, b, c].map(|lanes| V::load(&lanes));
            let lanes = |f: fn(f32, f32, f32) -> f32| -> Lanes<f32> {
                std::array::from_fn(|lane| f(a[lane], b[lane], c[lane]))
            };
            assert_eq!(V::store(V::splat(a[0])), [a[0]; LANES]);
            assert_eq!(V::store(V::add(va, vb)), lanes(|a, b, _| a + b));
            assert_eq!(V::store(V::sub(va, vb)), lanes(|a, b, _| a - b));
            assert_eq!(V::store(V::mul(va, vb)), lanes(|a, b, _| a * b));
            assert_eq!(V::store(V::div(va, vb)), lanes(|a, b, _| a / b));
            assert_eq!(V::store(V::fma(va, vb, vc)), lanes(|a, b, c| a.mul_add(b, c)));
            assert_eq!(V::store(V::fnma(va, vb, vc)), lanes(|a, b, c| (-a).mul_add(b, c)));
            assert_eq!(V::store(V::min(va, vb)), lanes(|a, b, _| a.min(b)));
            assert_eq!(V::store(V::max(va, vb)), lanes(|a, b, _| a.max(b)));
            let at_most = (0..LANES).fold(0, |mask, lane| mask | u16::from(a[lane] <= b[lane]) << lane);
            assert_eq!(V::at_most(va, vb), at_most);
            let mask = random.u16(..);
            let selected = std::array::from_fn(|lane| if mask >> lane & 1 != 0 { a[lane] } else { b[lane] });
            assert_eq!(V::store(V::select(mask, va, vb)), selected);
        }
    }

    #[test]
    fn portable_vectors_are_sixteen_f32() {
        check::<Portable>();
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx2_vectors_are_sixteen_f32() {
        if crate::cpu::Isa::available().any(|isa| isa == crate::cpu::Isa::Avx2) {
            check::<Avx2>();
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx512_vectors_are_sixteen_f32() {
        if crate::cpu::Isa::available().any(|isa| isa == crate::cpu::Isa::Avx512) {
            check::<Avx512>();
        }
    }
}
