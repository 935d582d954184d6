//! The trait of formats that are quantized in groups: their scales, factors and thresholds.

use microscale_formats::NegativeZero;

use crate::cpu::blocks::reference::BlockFormat;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::simd::{Lanes, Vector};
use crate::element::Element;

/// Factors of two blocks, one in each half of a vector: what elements are multiplied with, or divided by as
/// `nvfp4::quotient` does it.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Factors<N> {
    pub(in crate::cpu) y: N,
    /// The rest of the reciprocal and the divisor, for a quotient.
    pub(in crate::cpu) rest: Option<[N; 2]>,
}

/// A format's blocks, in groups.
pub(in crate::cpu) trait GroupFormat<const N: usize>: BlockFormat<N> {
    /// Writes the scale byte of each block of a group with these finite amaxes, and adds what happens in
    /// them. Returns false, having done neither, if the group is not for this.
    fn scales<T: Element, V: Vector>(
        &self,
        simd: V,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool;

    /// The factors of f32 in blocks with these scales.
    fn factors<V: Vector>(&self, simd: V, bytes: [u8; 2]) -> Factors<V::Number>;

    /// The thresholds that 16-bit values are compared with.
    fn thresholds(&self) -> &Thresholds;
}

/// The treatments of −0, for which loops are compiled apart; each is `NegativeZero as u8`.
pub(in crate::cpu) const KEEP: u8 = NegativeZero::Keep as u8;
pub(in crate::cpu) const DROP_INPUT: u8 = NegativeZero::DropInput as u8;
pub(in crate::cpu) const DROP: u8 = NegativeZero::Drop as u8;
pub(in crate::cpu) const FORCE: u8 = NegativeZero::Force as u8;
