//! Results of instructions. One file a family; each function names its section of the PTX ISA (numbers of
//! version 8.8, chapter 9.7). A family is asked for an opcode, cut at its dots, and answers with the function
//! for exactly that opcode, or not at all: an opcode in no list is unsupported.

mod bits;
mod compare;
mod convert;
mod descriptor;
mod double;
mod float;
mod half;
mod integer;
mod matrix;
mod mbarrier;
mod minifloat;
mod packed;
mod reciprocal;
mod round;

pub(crate) use descriptor::{Descriptor, PIECE};
pub(crate) use matrix::{DEPTH, Multiplicand, dot};
pub(crate) use mbarrier::Counts;
pub(crate) use reciprocal::reciprocal;

use crate::lanes::Pure;

/// The function of an opcode that computes one register from registers.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    integer::pure(opcode)
        .or_else(|| bits::pure(opcode))
        .or_else(|| packed::pure(opcode))
        .or_else(|| float::pure(opcode))
        .or_else(|| half::pure(opcode))
        .or_else(|| double::pure(opcode))
        .or_else(|| convert::pure(opcode))
}

/// The comparison of `setp.<comparison>.<type>`.
pub(crate) fn comparison(comparison: &str, ty: &str, ftz: bool) -> Option<Pure> {
    compare::comparison(comparison, ty, ftz)
}
