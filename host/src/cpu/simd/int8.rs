//! Products of 4-bit codes and INT8 activations: one trait, and one file per instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use super::products::{Products, STEP};
use super::tokens::{LANES, Lanes};

/// Four bytes for each of sixteen groups: a fourth of their elements.
///
/// Quarter `2 * half + odd` has the elements of one half of each group with an even index, or those
/// with an odd index.
pub(in crate::cpu) type Quarter = [[i8; 4]; LANES];

/// The INT8 elements of sixteen groups.
pub(in crate::cpu) type Quarters = [Quarter; 4];

/// Instructions that multiply bytes. `V` is the token of their vectors.
pub(in crate::cpu) trait Int8Products<V: Products>: Copy {
    /// A vector of a [`Quarter`]'s bytes.
    type Bytes: Copy;

    /// Decodes sixteen groups of codes to twice each weight, plus
    /// [`OFFSET`](super::products::OFFSET).
    fn raised(self, codes: &[u8; STEP]) -> [Self::Bytes; 4];

    /// Loads a quarter from memory.
    fn load(self, quarter: &Quarter) -> Self::Bytes;

    /// Stores a quarter to memory.
    fn store(self, bytes: Self::Bytes) -> Quarter;

    /// Adds the products of each group to its integer. Weights are [raised](Self::raised).
    fn add_groups(self, sums: &Lanes<i32>, weights: [Self::Bytes; 4], x: [Self::Bytes; 4]) -> V::Bits;
}

#[cfg(test)]
mod tests;
