//! Results of instructions, one file per family.
//!
//! Each function names its section of the PTX ISA (version 8.8, chapter 9.7). A family receives an
//! opcode, split at its dots, and returns the function for exactly that opcode or `None`. An opcode
//! that is in no list is unsupported.

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
mod selector;
mod tensor;

pub(crate) use descriptor::{Descriptor, PIECE};
pub(crate) use matrix::{DEPTH, DEPTH_BYTES, Factors, Multiplicand, dot};
pub(crate) use mbarrier::Counts;
pub(crate) use reciprocal::reciprocal;
pub(crate) use selector::Selector;
pub(crate) use tensor::{Fragment, TensorProduct};

use crate::lanes::Pure;

/// Returns the function of an opcode that computes one register from registers.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    integer::pure(opcode)
        .or_else(|| bits::pure(opcode))
        .or_else(|| packed::pure(opcode))
        .or_else(|| float::pure(opcode))
        .or_else(|| half::pure(opcode))
        .or_else(|| double::pure(opcode))
        .or_else(|| convert::pure(opcode))
}

/// Returns the comparison of `setp.<comparison>.<type>`.
pub(crate) fn comparison(comparison: &str, ty: &str, ftz: bool) -> Option<Pure> {
    compare::comparison(comparison, ty, ftz)
}
