//! Conversion of MXFP4 and NVFP4 between separate codes and scales and ggml's blocks, which hold
//! both.
//!
//! | type | elements | bytes: scales, then codes |
//! |---|---|---|
//! | MXFP4 | 32 | 1 E8M0, 16: byte j has elements j and 16 + j |
//! | NVFP4 | 64 | 4 E4M3, 4 times 8: byte j of group g has elements 16 g + j and 16 g + 8 + j |
//!
//! In our codes byte i has element 2 i in the low nibble and element 2 i + 1 in the high nibble. In
//! ggml's order the first half of a scale's codes are low nibbles, and the second half high
//! nibbles.
//!
//! ggml has no NaN scales and no signed scales. It reads MXFP4's byte 255 as 2^128 and NVFP4's 0x7F
//! as 0. Its CPU code ignores a sign bit, and its CUDA code honors it.

#[cfg(test)]
use microscale::Format;
use rayon::prelude::*;

use super::metadata::FileType;
#[cfg(test)]
use crate::dtype::ggml::GgmlType;

/// Blocks per task, about 64 KiB.
const BLOCKS_PER_TASK: usize = 2048;

/// A ggml block type that stores one of our formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    Mxfp4,
    Nvfp4,
}

impl Blocks {
    #[cfg(test)]
    /// The blocks of a tensor type; `None` if it is not one of our formats.
    pub(crate) fn of(kind: GgmlType) -> Option<Self> {
        [Self::Mxfp4, Self::Nvfp4].into_iter().find(|blocks| blocks.kind() == kind)
    }

    #[cfg(test)]
    /// The blocks that store a format, if ggml has them.
    pub(crate) fn of_format(format: Format) -> Option<Self> {
        [Self::Mxfp4, Self::Nvfp4].into_iter().find(|blocks| blocks.format() == format)
    }

    #[cfg(test)]
    /// The tensor type.
    pub(crate) fn kind(self) -> GgmlType {
        match self {
            Self::Mxfp4 => GgmlType::MXFP4,
            Self::Nvfp4 => GgmlType::NVFP4,
        }
    }

    #[cfg(test)]
    /// The format.
    pub(crate) fn format(self) -> Format {
        match self {
            Self::Mxfp4 => Format::Mxfp4,
            Self::Nvfp4 => Format::Nvfp4,
        }
    }

    /// The file type of models whose weights are mostly of this type.
    pub(crate) fn file_type(self) -> FileType {
        match self {
            Self::Mxfp4 => FileType::Mxfp4,
            Self::Nvfp4 => FileType::Nvfp4,
        }
    }

    /// Elements per block.
    pub(crate) fn elements(self) -> usize {
        match self {
            Self::Mxfp4 => 32,
            Self::Nvfp4 => 64,
        }
    }

    /// The size in bytes of `elements` elements, a whole number of blocks.
    pub(crate) fn bytes_of(self, elements: usize) -> usize {
        let (codes, scales) = self.bytes();
        elements / self.elements() * (codes + scales)
    }

    /// The index of the first scale that ggml reads as another number.
    pub(crate) fn first_unheld(self, scales: &[u8]) -> Option<usize> {
        scales.iter().position(|scale| match self {
            Self::Mxfp4 => *scale == 0xFF,
            Self::Nvfp4 => *scale >= 0x7F,
        })
    }

    /// Packs codes, two per byte, and linear scales into ggml's blocks.
    ///
    /// Rows must be whole blocks. A partial block at the end is dropped.
    pub(crate) fn pack(self, codes: &[u8], scales: &[u8]) -> Vec<u8> {
        let (codes_each, scales_each) = self.bytes();
        let blocks = (codes.len() / codes_each).min(scales.len() / scales_each);
        let mut packed = vec![0; blocks * (codes_each + scales_each)];
        self.pack_into(codes, scales, &mut packed);
        packed
    }

    /// Unpacks ggml's blocks into codes, two per byte, and linear scales.
    pub(crate) fn unpack(self, packed: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (codes_each, scales_each) = self.bytes();
        let blocks = packed.len() / (codes_each + scales_each);
        let (mut codes, mut scales) = (vec![0; blocks * codes_each], vec![0; blocks * scales_each]);
        self.unpack_into(packed, &mut codes, &mut scales);
        (codes, scales)
    }

    /// Bytes of codes and of scales in a block.
    const fn bytes(self) -> (usize, usize) {
        match self {
            Self::Mxfp4 => (16, 1),
            Self::Nvfp4 => (32, 4),
        }
    }

    fn pack_into(self, codes: &[u8], scales: &[u8], packed: &mut [u8]) {
        match self {
            Self::Mxfp4 => pack::<1, 16, 17, 2>(codes, scales, packed, |[a, b]| {
                let [a, b] = swap_middle_halves([a, b]);
                [interleave_halves(a), interleave_halves(b)]
            }),
            Self::Nvfp4 => pack::<4, 32, 36, 4>(codes, scales, packed, |words| words.map(interleave_halves)),
        }
    }

    fn unpack_into(self, packed: &[u8], codes: &mut [u8], scales: &mut [u8]) {
        match self {
            Self::Mxfp4 => unpack::<1, 16, 17, 2>(packed, codes, scales, |[a, b]| {
                swap_middle_halves([deinterleave_halves(a), deinterleave_halves(b)])
            }),
            Self::Nvfp4 => {
                unpack::<4, 32, 36, 4>(packed, codes, scales, |words| words.map(deinterleave_halves));
            }
        }
    }
}

/// Packs blocks of `SCALES + CODES = BLOCK` bytes. `reorder` gets the codes of a block as words.
fn pack<const SCALES: usize, const CODES: usize, const BLOCK: usize, const WORDS: usize>(
    codes: &[u8],
    scales: &[u8],
    packed: &mut [u8],
    reorder: impl Fn([u64; WORDS]) -> [u64; WORDS] + Sync,
) {
    let (codes, scales) = (codes.as_chunks::<CODES>().0, scales.as_chunks::<SCALES>().0);
    let blocks = packed.as_chunks_mut::<BLOCK>().0;
    let parts = (
        blocks.par_chunks_mut(BLOCKS_PER_TASK),
        codes.par_chunks(BLOCKS_PER_TASK),
        scales.par_chunks(BLOCKS_PER_TASK),
    );
    parts.into_par_iter().for_each(|(blocks, codes, scales)| {
        for ((block, codes), scales) in blocks.iter_mut().zip(codes).zip(scales) {
            let (first, rest) = block.split_at_mut(SCALES);
            first.copy_from_slice(scales);
            store(reorder(load(codes)), rest);
        }
    });
}

/// The inverse of [`pack`].
fn unpack<const SCALES: usize, const CODES: usize, const BLOCK: usize, const WORDS: usize>(
    packed: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
    reorder: impl Fn([u64; WORDS]) -> [u64; WORDS] + Sync,
) {
    let (codes, scales) = (codes.as_chunks_mut::<CODES>().0, scales.as_chunks_mut::<SCALES>().0);
    let blocks = packed.as_chunks::<BLOCK>().0;
    let parts = (
        blocks.par_chunks(BLOCKS_PER_TASK),
        codes.par_chunks_mut(BLOCKS_PER_TASK),
        scales.par_chunks_mut(BLOCKS_PER_TASK),
    );
    parts.into_par_iter().for_each(|(blocks, codes, scales)| {
        for ((block, codes), scales) in blocks.iter().zip(codes).zip(scales) {
            let (first, rest) = block.split_at(SCALES);
            scales.copy_from_slice(first);
            store(reorder(load(rest)), codes);
        }
    });
}

/// Loads bytes as words whose lowest nibble is the first code.
#[inline(always)]
fn load<const WORDS: usize>(bytes: &[u8]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

#[inline(always)]
fn store<const WORDS: usize>(words: [u64; WORDS], bytes: &mut [u8]) {
    for (word, bytes) in words.iter().zip(bytes.as_chunks_mut::<8>().0) {
        *bytes = word.to_le_bytes();
    }
}

/// Interleaves the halves of sixteen codes: 0 1 2 … 15 becomes 0 8 1 9 … 15.
///
/// Each of the three steps swaps the two middle quarters of every part of the word: first of the
/// word, then of its halves, then of its quarters, whose quarters are single codes. After each step
/// every half of a part has codes of both halves of the word in the final order.
#[inline(always)]
fn interleave_halves(word: u64) -> u64 {
    let word = swap_bits::<16>(word, 0x0000_0000_FFFF_0000);
    let word = swap_bits::<8>(word, 0x0000_FF00_0000_FF00);
    swap_bits::<4>(word, 0x00F0_00F0_00F0_00F0)
}

/// The reverse of [`interleave_halves`]: each step undoes itself.
#[inline(always)]
fn deinterleave_halves(word: u64) -> u64 {
    let word = swap_bits::<4>(word, 0x00F0_00F0_00F0_00F0);
    let word = swap_bits::<8>(word, 0x0000_FF00_0000_FF00);
    swap_bits::<16>(word, 0x0000_0000_FFFF_0000)
}

/// The first step for 32 codes: swaps the middle quarters of two words. It is its own inverse.
#[inline(always)]
fn swap_middle_halves([a, b]: [u64; 2]) -> [u64; 2] {
    let low = u64::from(u32::MAX);
    [a & low | b << 32, a >> 32 | b & !low]
}

/// Swaps the bits at `mask` with the bits `SHIFT` above them.
#[inline(always)]
fn swap_bits<const SHIFT: u32>(word: u64, mask: u64) -> u64 {
    let differing = (word ^ word >> SHIFT) & mask;
    word ^ differing ^ differing << SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(Blocks, usize, usize, usize); 2] = [(Blocks::Mxfp4, 1, 32, 17), (Blocks::Nvfp4, 4, 16, 36)];

    fn random(bytes: usize, seed: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..bytes).map(|_| random.u8(..)).collect()
    }

    /// The code of an element in our order.
    fn code(codes: &[u8], element: usize) -> u8 {
        codes[element / 2] >> (4 * (element % 2)) & 0x0F
    }

    #[test]
    fn blocks_are_as_ggml_lays_them_out() {
        for (blocks, per_block, elements, bytes) in ALL {
            let count = BLOCKS_PER_TASK + 3;
            let scales = random(count * per_block, 1);
            let codes = random(count * per_block * elements / 2, 2);
            let packed = blocks.pack(&codes, &scales);
            assert_eq!(packed.len(), count * bytes);
            for (b, block) in packed.chunks(bytes).enumerate() {
                assert_eq!(block[..per_block], scales[b * per_block..][..per_block]);
                for (g, group) in block[per_block..].chunks(elements / 2).enumerate() {
                    let first = (b * per_block + g) * elements;
                    for (j, byte) in group.iter().enumerate() {
                        assert_eq!(byte & 0x0F, code(&codes, first + j));
                        assert_eq!(byte >> 4, code(&codes, first + elements / 2 + j));
                    }
                }
            }
            assert_eq!(blocks.unpack(&packed), (codes, scales));
        }
    }

    #[test]
    fn any_bytes_come_back() {
        for (blocks, _, _, bytes) in ALL {
            for count in [0, 1, 2, 63, BLOCKS_PER_TASK, 2 * BLOCKS_PER_TASK + 1] {
                let packed = random(count * bytes, count as u64);
                let (codes, scales) = blocks.unpack(&packed);
                assert_eq!(blocks.pack(&codes, &scales), packed);
            }
            let (codes, scales) = blocks.unpack(&random(2 * bytes - 1, 3));
            assert_eq!(blocks.pack(&codes, &scales).len(), bytes, "half a block is left out");
        }
    }

    #[test]
    fn scales_that_ggml_reads_as_other_numbers() {
        for (blocks, ..) in ALL {
            let all: Vec<u8> = (0..=255).collect();
            let first = if blocks == Blocks::Mxfp4 { 255 } else { 127 };
            assert_eq!(blocks.first_unheld(&all), Some(first));
            for scale in all {
                assert_eq!(blocks.first_unheld(&[0, scale]), (usize::from(scale) >= first).then_some(1));
            }
            assert_eq!(Blocks::of(blocks.kind()), Some(blocks));
            assert_eq!(Blocks::of_format(blocks.format()), Some(blocks));
        }
        assert_eq!((Blocks::of(GgmlType::F32), Blocks::of_format(Format::Mxfp8E4m3)), (None, None));
    }
}
