//! The length of blocks and the width of codes: all that access to a matrix needs to know of a
//! format.

/// How long blocks are, and how wide codes.
pub(crate) trait Blocks {
    /// Elements that share a scale.
    const BLOCK: u32;
    /// Bits of a code.
    const BITS: u32;
    /// Bytes of a block's codes.
    const BYTES: u32 = Self::BLOCK * Self::BITS / 8;
}
