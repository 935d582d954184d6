//! The output of a run of blocks.

/// The codes and scale bytes of a run of blocks.
pub(in crate::cpu) struct Output<'a> {
    pub(in crate::cpu) codes: &'a mut [u8],
    pub(in crate::cpu) scales: &'a mut [u8],
}

impl Output<'_> {
    /// Bytes of one block's codes.
    #[inline(always)]
    pub(in crate::cpu) fn block_bytes(&self) -> usize {
        self.codes.len() / self.scales.len()
    }

    /// The output of `count` blocks, starting at block `first`.
    #[inline(always)]
    pub(in crate::cpu) fn blocks(&mut self, first: usize, count: usize) -> Output<'_> {
        let block_bytes = self.block_bytes();
        Output {
            codes: &mut self.codes[first * block_bytes..][..count * block_bytes],
            scales: &mut self.scales[first..][..count],
        }
    }
}
