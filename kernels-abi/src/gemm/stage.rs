//! Shared memory of the `mma` and `wgmma` kernels: the front, and the ring of stages.

use super::PACK_COLUMNS;
use crate::experts::Plan;

/// Stages, at most.
pub const MOST_STAGES: u32 = 8;
/// Offset of the [`Plan`] in shared memory, after two barriers per stage.
pub const PLAN_OFFSET: u32 = MOST_STAGES * 16;
/// Offset of a word for all threads.
pub const WORD_OFFSET: u32 = PLAN_OFFSET + size_of::<Plan>() as u32;
/// Offset of the barriers on which warps that prepare stages arrive, one per stage: decoder warps
/// and packing warps.
pub const PREPARED_BARRIERS_OFFSET: u32 = (WORD_OFFSET + 4).next_multiple_of(8);
/// Offset of the queue of work tiles from producer warps to consumer warps.
pub const QUEUE_OFFSET: u32 = (PREPARED_BARRIERS_OFFSET + MOST_STAGES * 8).next_multiple_of(16);
/// Bytes of an entry of the queue.
pub const QUEUE_ENTRY_BYTES: u32 = 48;
/// Entries of the queue, a power of two. Producers are at most `MOST_STAGES` stages ahead, of one
/// work tile each.
pub const QUEUE_ENTRIES: u32 = 2 * MOST_STAGES;
/// Bytes of shared memory before the stages. The stages start on a multiple of 128 bytes, the width
/// of all banks: copies of cache lines would take twice the cycles otherwise, and products up to a
/// fifth longer.
pub const FRONT_BYTES: u32 = (QUEUE_OFFSET + QUEUE_ENTRIES * QUEUE_ENTRY_BYTES).next_multiple_of(128);

/// The pieces of a row's scales in a K-iteration. Each is one copy, and starts on a multiple of its
/// bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalePieces {
    /// Bytes of a piece. Copies of fewer than 16 go through the L1 cache, and take longer.
    pub bytes: u32,
    /// The number of pieces.
    pub count: u32,
}

impl ScalePieces {
    /// One piece.
    pub const ONE: Self = Self { bytes: 16, count: 1 };
    /// The pieces that take the most room.
    pub const MOST: Self = Self { bytes: 16, count: 2 };

    /// The pieces of rows with `blocks` scales, `each` of them per K-iteration, the first at
    /// `address`.
    pub const fn of(address: u64, blocks: u32, each: u32) -> Self {
        match each {
            _ if (address as u32 | blocks).is_multiple_of(each) => Self::ONE,
            16 => Self::MOST,
            // Eight scales or fewer, wherever they begin in the first piece.
            _ => Self { bytes: 8, count: 2 },
        }
    }

    /// Bytes of all pieces.
    pub const fn all(self) -> u32 {
        self.bytes * self.count
    }
}

/// Other contents of a stage than codes, activations and scales, and the alignment of stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageLayout {
    /// Nothing else.
    Copied,
    /// Decoded weights, and an f32 per row and pack: the factor of its sum. Swizzled as below.
    Decoded,
    /// Nothing else. Stages start on [`SWIZZLE_BYTES`], where tensor cores swizzle rows of 128
    /// bytes.
    Swizzled,
}

/// Bytes of eight rows of 128 bytes, whose 16-byte chunks are swizzled.
pub const SWIZZLE_BYTES: u32 = 1024;
/// Offset of the barriers on which the warps that issue products and the consumer warps arrive, two
/// per accumulator. Such kernels prepare no stages.
pub const ACCUMULATOR_BARRIERS_OFFSET: u32 = PREPARED_BARRIERS_OFFSET;

/// Offset of the front of swizzled stages, at least. Its plan and its word are not used: they lie
/// where shared memory starts.
const SWIZZLED_FRONT_OFFSET: u32 = (WORD_OFFSET + 4).next_multiple_of(16);

/// The address of the front of swizzled stages, which start on [`SWIZZLE_BYTES`], in shared memory
/// that starts at `base`, on 16 bytes.
#[inline(always)]
pub const fn swizzled_front(base: u32) -> u32 {
    (base + SWIZZLED_FRONT_OFFSET + FRONT_BYTES).next_multiple_of(SWIZZLE_BYTES) - FRONT_BYTES
}

/// A stage of the ring: codes, packed activations and scales of a K-iteration, and decoded weights
/// where a kernel has decoder warps.
///
/// `scales` is on 8 bytes. Otherwise LLVM does not see that MXFP4's pieces always have 16 bytes,
/// and kernels divide by the bytes of a stage at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Tokens of the work tile.
    pub tokens: u32,
    /// Packs of activations.
    pub packs: u32,
    /// Bytes of a token in a pack, or of a thread block's share where several share the codes.
    pub token_bytes: u32,
    /// What else the stage has.
    pub layout: StageLayout,
    /// The pieces of a row's scales.
    pub scales: ScalePieces,
    /// Rows of the work tile that the thread block has.
    pub rows: u32,
}

impl Stage {
    /// Bytes of codes.
    pub const fn codes_bytes(self) -> u32 {
        self.rows * self.packs * PACK_COLUMNS / 2
    }

    /// Bytes of activations, which follow the codes.
    pub const fn activation_bytes(self) -> u32 {
        self.tokens * self.packs * self.token_bytes
    }

    /// Offset of the decoded weights, which follow the activations. After them comes an f32 per row
    /// and pack: the factor of its sum.
    pub const fn decoded_offset(self) -> u32 {
        self.codes_bytes() + self.activation_bytes()
    }

    /// Offset of the factors of rows.
    pub const fn factors_offset(self) -> u32 {
        self.decoded_offset() + self.rows * self.packs * PACK_COLUMNS
    }

    /// Offset of the scales, which come last.
    pub const fn scales_offset(self) -> u32 {
        match self.layout {
            StageLayout::Decoded => self.factors_offset() + self.rows * self.packs * 4,
            StageLayout::Copied | StageLayout::Swizzled => self.decoded_offset(),
        }
    }

    /// Bytes of the stage.
    pub const fn bytes(self) -> u32 {
        let bytes = self.scales_offset() + self.rows * self.scales.all();
        match self.layout {
            StageLayout::Copied => bytes,
            StageLayout::Decoded | StageLayout::Swizzled => bytes.next_multiple_of(SWIZZLE_BYTES),
        }
    }

    /// Bytes of shared memory before the stages, at most.
    const fn front_bytes(self) -> u32 {
        match self.layout {
            StageLayout::Copied => FRONT_BYTES,
            StageLayout::Decoded | StageLayout::Swizzled => {
                SWIZZLED_FRONT_OFFSET + FRONT_BYTES + SWIZZLE_BYTES - 16
            }
        }
    }

    /// Stages that fit into `shared` bytes of shared memory.
    pub const fn count(self, shared: u32) -> u32 {
        let stages = shared.saturating_sub(self.front_bytes()) / self.bytes();
        if stages < MOST_STAGES { stages } else { MOST_STAGES }
    }

    /// Bytes of shared memory for `stages` stages.
    pub const fn shared_bytes(self, stages: u32) -> u32 {
        self.front_bytes() + stages * self.bytes()
    }
}
