//! A piece: contiguous blocks that one call quantizes, and the output for them.

use super::policy::Tally;
use crate::scheme::NonFinite;

/// The output of blocks: their codes and their scale bytes.
pub(super) struct Output<'a> {
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [u8],
}

impl Output<'_> {
    /// Bytes of a block's codes.
    #[inline(always)]
    pub(super) fn block_bytes(&self) -> usize {
        self.codes.len() / self.scales.len()
    }

    /// The output of `count` of the blocks, from block `first` on.
    #[inline(always)]
    pub(super) fn blocks(&mut self, first: usize, count: usize) -> Output<'_> {
        let block_bytes = self.block_bytes();
        Output {
            codes: &mut self.codes[first * block_bytes..][..count * block_bytes],
            scales: &mut self.scales[first..][..count],
        }
    }
}

/// Contiguous blocks, the last of which may not be whole, on their way.
pub(super) struct Piece<'a, T> {
    pub(super) values: &'a [T],
    pub(super) policy: NonFinite,
    pub(super) output: Output<'a>,
    pub(super) tally: Tally,
}
