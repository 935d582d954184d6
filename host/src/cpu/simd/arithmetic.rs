//! The arithmetic of `microscale_formats` on this processor: on one f32, and on vectors.
//!
//! `microscale_formats` writes its arithmetic over [`Machine`], whose functions take no token.
//! `Unchecked` implements [`Machine`] for vectors. It is private: the functions below, which take a
//! token, are the only way to it.

use std::marker::PhantomData;

use microscale_formats::arithmetic::{Fused, Machine};
use microscale_formats::search::{self, Candidate};
use microscale_formats::{e2m1, nvfp4};

use super::vector::Vector;

/// One f32. In an instance with FMA, [`Fused::fma`] is one instruction.
pub(crate) struct Scalars;

impl Fused for Scalars {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// [`nvfp4::quotient`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn quotient<V: Vector>(_: V, x: V::Number, yz: [V::Number; 2], d: V::Number) -> V::Number {
    nvfp4::quotient::<Unchecked<V>>(x, yz, d, false)
}

/// [`e2m1::magnitude_codes_even`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn magnitude_codes_even<V: Vector>(_: V, a: V::Number) -> V::Number {
    e2m1::magnitude_codes_even::<Unchecked<V>>(a)
}

/// [`Candidate::with_inverse`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn candidate<V: Vector>(
    _: V,
    factor: V::Number,
    inverse: V::Number,
) -> Candidate<V::Number> {
    Candidate::with_inverse::<Unchecked<V>>(factor, inverse)
}

/// [`Candidate::rest`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn rest<V: Vector, const ALL_NEAR: bool>(
    _: V,
    candidate: &Candidate<V::Number>,
    a: V::Number,
    square: V::Number,
) -> V::Number {
    candidate.rest::<Unchecked<V>, ALL_NEAR>(a, square)
}

/// [`Candidate::clipped`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn clipped<V: Vector>(_: V, candidate: &Candidate<V::Number>, a: V::Number) -> V::Number {
    candidate.clipped::<Unchecked<V>>(a)
}

/// [`search::add_term`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn add_term<V: Vector>(
    _: V,
    rest: V::Number,
    weight: Option<V::Number>,
    sum: V::Number,
) -> V::Number {
    search::add_term::<Unchecked<V>>(rest, weight, sum)
}

/// [`search::sum_of_chains`] in every lane.
#[inline(always)]
pub(in crate::cpu) fn sum_of_chains<V: Vector>(_: V, chains: [V::Number; search::CHAINS]) -> V::Number {
    search::sum_of_chains::<Unchecked<V>>(chains)
}

/// Vectors whose token the caller holds.
///
/// Invariant: only the functions above name this type, and each of them takes a `V`.
struct Unchecked<V>(PhantomData<V>);

impl<V: Vector> Unchecked<V> {
    #[inline(always)]
    fn token() -> V {
        // SAFETY: the function that named this type took a `V`, which proves the instruction set.
        unsafe { V::assume_detected() }
    }
}

impl<V: Vector> Machine for Unchecked<V> {
    type Number = V::Number;

    #[inline(always)]
    fn splat(x: f32) -> V::Number {
        Self::token().splat(x)
    }

    #[inline(always)]
    fn mul(a: V::Number, b: V::Number) -> V::Number {
        Self::token().mul(a, b)
    }

    #[inline(always)]
    fn add(a: V::Number, b: V::Number) -> V::Number {
        Self::token().add(a, b)
    }

    #[inline(always)]
    fn sub(a: V::Number, b: V::Number) -> V::Number {
        Self::token().sub(a, b)
    }

    #[inline(always)]
    fn fma(a: V::Number, b: V::Number, c: V::Number) -> V::Number {
        Self::token().fma(a, b, c)
    }

    #[inline(always)]
    fn fnma(a: V::Number, b: V::Number, c: V::Number) -> V::Number {
        Self::token().fnma(a, b, c)
    }

    #[inline(always)]
    fn min(a: V::Number, b: V::Number) -> V::Number {
        Self::token().min(a, b)
    }

    #[inline(always)]
    fn max(a: V::Number, b: V::Number) -> V::Number {
        Self::token().max(a, b)
    }
}
