//! The trait of formats that are quantized in groups.

use microscale_formats::NegativeZero;

use crate::cpu::blocks::format::BlockFormat;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::simd::{Lanes, Vector};
use crate::element::Element;

/// Factors of two blocks, one per half of a vector.
///
/// Elements are multiplied by them, or divided as by `nvfp4::quotient`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Factors<N> {
    pub(in crate::cpu) y: N,
    /// For a quotient: the low part of the reciprocal, and the divisor.
    pub(in crate::cpu) rest: Option<[N; 2]>,
}

/// A format that is quantized in groups of sixteen blocks.
pub(in crate::cpu) trait GroupFormat<const N: usize>: BlockFormat<N> {
    /// Writes the scale byte of each block of a group, given finite amaxes, and counts the events.
    ///
    /// Returns false, and writes and counts nothing, if the group needs the slow path.
    fn scales<T: Element, V: Vector>(
        &self,
        simd: V,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool;

    /// The factors of f32 elements in blocks with these scale bytes.
    fn factors<V: Vector>(&self, simd: V, bytes: [u8; 2]) -> Factors<V::Number>;

    /// The thresholds of 16-bit values.
    fn thresholds(&self) -> &Thresholds;
}

/// The rules for −0, as constants: loops are compiled for each.
pub(in crate::cpu) const KEEP: u8 = NegativeZero::Keep as u8;
pub(in crate::cpu) const DROP_INPUT: u8 = NegativeZero::DropInput as u8;
pub(in crate::cpu) const DROP: u8 = NegativeZero::Drop as u8;
pub(in crate::cpu) const FORCE: u8 = NegativeZero::Force as u8;
