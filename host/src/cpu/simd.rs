//! Vectors: tokens that prove an instruction set, and the traits that give tokens their operations.

pub(super) mod arithmetic;
pub(super) mod halfwords;
pub(super) mod int8;
pub(super) mod products;
mod tokens;
mod vector;

pub(crate) use arithmetic::Scalars;
#[cfg(target_arch = "aarch64")]
pub(super) use tokens::Neon;
#[cfg(target_arch = "x86_64")]
pub(super) use tokens::{Avx2, Avx512, Avx512Bf16, Avx512Vnni};
pub(super) use tokens::{LANES, Lanes, Portable};
pub(super) use vector::Vector;
