//! Weights in four bits times activations in 16, for any number of tokens.
//!
//! A first kernel arranges the activations as tensor cores read them; a second one multiplies. There are two editions of the second:
//! `mma` for every GPU, and `wgmma` for compute capability 9.0. Their grids are in [`crate::gemm_grids`].

use microscale_formats::dot::CHUNK;

use crate::epilogue::ELEMENTWISE;
use crate::experts::Plan;
use crate::launch::{Converts, Dtype, Family, Kernel, KernelId, Launch, WARP, kernel, resident};
use crate::weights::{QUAD, TILE_ROWS, WeightsFormat};

/// Columns of an image of activations: a chunk for each lane of four. A k-iteration is an image or two.
pub const COLUMNS: u32 = QUAD * CHUNK as u32;
/// Tiles of 16 rows in a work tile, at most.
pub const MOST_TILES: u32 = 16;
/// The offset of the [`Plan`] in shared memory, behind two barriers for each stage.
pub const PLAN_OFFSET: u32 = MOST_STAGES * 16;
/// The offset of a word for all threads.
pub const WORD_OFFSET: u32 = PLAN_OFFSET + size_of::<Plan>() as u32;
/// The offset of the ring of tasks that those who copy give those who multiply.
pub const TASKS_OFFSET: u32 = (WORD_OFFSET + 4).next_multiple_of(16);
/// Bytes of a task.
pub const TASK_BYTES: u32 = 48;
/// Tasks in their ring. Those who copy are as many stages ahead at most, of a task each, and a power of two has a mask.
pub const TASKS: u32 = 2 * MOST_STAGES;
/// Bytes of shared memory in front of the stages, which is all of that: on a multiple of what all banks have, or copies of lines would take
/// twice as many cycles, and products up to a fifth longer.
pub const FRONT_BYTES: u32 = (TASKS_OFFSET + TASKS * TASK_BYTES).next_multiple_of(128);
/// Counters for the tiles of 16 rows of shared work tiles, zeros before a launch and after it. There are fewer shared work tiles
/// than thread blocks.
pub const COUNTERS: u32 = 1 << 14;
/// Stages, at most.
pub const MOST_STAGES: u32 = 8;
/// Bytes of shared memory that a thread block has at most, on any GPU.
pub(crate) const MOST_SHARED: u32 = 227 << 10;

/// How a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// By warps, with operands in registers: every GPU.
    Mma,
    /// By warp groups, with activations in shared memory: compute capability 9.0.
    Wgmma,
}

impl Edition {
    /// Warps that multiply a work tile: each has two tiles of 16 rows, or one.
    pub const fn multipliers(self, tile: TokenTile) -> u32 {
        match self {
            Self::Mma => tile.tiles() / 2,
            Self::Wgmma => tile.tiles(),
        }
    }

    /// Warps that copy; with none, those that multiply do.
    pub const fn copiers(self) -> u32 {
        match self {
            Self::Mma => 0,
            Self::Wgmma => 4,
        }
    }

    /// Returns whether it has kernels for a token tile: warps that multiply two tiles have no registers for more than 64 tokens.
    pub const fn has(self, tile: TokenTile) -> bool {
        matches!(self, Self::Wgmma) || tile.tokens() <= 64
    }

    /// Returns whether thread blocks start beside one that arranges activations, for which they leave a multiprocessor registers.
    pub(crate) const fn starts_beside(self, tile: TokenTile) -> bool {
        matches!(self, Self::Wgmma) && tile.tokens() <= 64
    }

    /// Returns whether thread blocks may be in pairs, which give each other sums of half of the tokens. The smallest token tile has few sums, and
    /// work tiles of the largest one are mostly whole.
    pub const fn has_pairs(self, tile: TokenTile) -> bool {
        matches!((self, tile), (Self::Wgmma, TokenTile::N32 | TokenTile::N64 | TokenTile::N128))
    }

    /// Images of a k-iteration. Where there is room for several stages of two, copies have whole lines of cache.
    pub const fn images(self, tile: TokenTile) -> u32 {
        if matches!(self, Self::Wgmma) && tile.tokens() <= 64 { 2 } else { 1 }
    }

    /// A stage for token tiles of which the largest has so many tokens, and rows whose scales lie in such pieces.
    pub const fn stage(self, tile: TokenTile, tokens: u32, scales: ScalePieces) -> Stage {
        Stage { tile, tokens: tile.multiplied(tokens), images: self.images(tile), scales }
    }

    /// Threads of a thread block.
    pub const fn threads(self, tile: TokenTile) -> u32 {
        (self.multipliers(tile) + self.copiers()) * WARP
    }

    /// Bytes of shared memory, of so many that a thread block may have, for as many stages as there is room for, however many tokens the
    /// largest token tile has, and however scales lie.
    pub const fn shared_bytes(self, tile: TokenTile, most: u32) -> u32 {
        let (mut bytes, mut i) = (0, 0);
        while i < 2 * tile.tokens() {
            let scales = if i % 2 == 0 { ScalePieces::ONE } else { ScalePieces::MOST };
            let stage = self.stage(tile, i / 2 + 1, scales);
            let of_stages = stage.shared_bytes(stage.count(most));
            bytes = if of_stages > bytes { of_stages } else { bytes };
            i += 1;
        }
        bytes
    }
}

/// The tokens of a work tile, and with them its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenTile {
    /// 16.
    N16,
    /// 32.
    N32,
    /// 64.
    N64,
    /// 128, for warp groups only, with half as many rows.
    N128,
    /// 256, for warp groups only, with half as many rows.
    N256,
}

impl TokenTile {
    /// All, from the smallest to the largest.
    pub const ALL: [Self; 5] = [Self::N16, Self::N32, Self::N64, Self::N128, Self::N256];

    /// The number of tokens.
    pub const fn tokens(self) -> u32 {
        16 << self as u32
    }

    /// Tiles of 16 rows.
    pub const fn tiles(self) -> u32 {
        match self {
            Self::N128 | Self::N256 => MOST_TILES / 2,
            _ => MOST_TILES,
        }
    }

    /// Rows.
    pub const fn rows(self) -> u32 {
        self.tiles() * TILE_ROWS
    }

    /// The tokens that are multiplied of a tile with so many: [`multiplied`].
    pub const fn multiplied(self, tokens: u32) -> u32 {
        multiplied(self.tokens(), tokens)
    }

    /// Bytes of the sums of a work tile.
    pub const fn sums_bytes(self) -> u64 {
        self.rows() as u64 * self.tokens() as u64 * 4
    }

    /// The kernel that multiplies weights of a format with activations in f16 or bf16, its thread blocks in pairs or not; none for f32, and
    /// none that the edition does not have ([`Edition::has`], [`Edition::has_pairs`]).
    pub const fn kernel(
        self,
        edition: Edition,
        paired: bool,
        format: WeightsFormat,
        dtype: Dtype,
    ) -> Option<KernelId> {
        let dtype = match dtype {
            _ if !edition.has(self) || paired && !edition.has_pairs(self) => return None,
            Dtype::F32 => return None,
            Dtype::F16 => 0,
            Dtype::Bf16 => 1,
        };
        // Kernels in pairs come behind all others, without the smallest and the largest tile.
        let tile = self as usize + if paired { Self::ALL.len() - Self::N32 as usize } else { 0 };
        let number = tile * 4 + format as usize * 2 + dtype;
        Some(match edition {
            Edition::Mma => KernelId::new(Family::Gemm, FRONT + number),
            Edition::Wgmma => KernelId::new(Family::Wgmma, number),
        })
    }
}

/// The tokens that are multiplied of a token tile for `tile`, if it has `tokens`: of the largest only about as many as there are.
pub const fn multiplied(tile: u32, tokens: u32) -> u32 {
    match (tile, tokens) {
        (256, ..=96) => 96,
        (256, ..=128) => 128,
        (256, ..=160) => 160,
        (256, ..=192) => 192,
        _ => tile,
    }
}

/// The pieces in which a row's scales of a k-iteration lie. Each is copied at once, and lies on a multiple of its bytes.
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

    /// The pieces of rows that have `each` scales in a k-iteration, given the address of the first one and how many a row has.
    pub const fn of(address: u64, blocks: u32, each: u32) -> Self {
        match each {
            _ if (address as u32 | blocks).is_multiple_of(each) => Self::ONE,
            16 => Self::MOST,
            // Eight scales or fewer, wherever they begin in the first piece.
            _ => Self { bytes: 8, count: 2 },
        }
    }

    /// Bytes of all.
    pub const fn all(self) -> u32 {
        self.bytes * self.count
    }
}

/// A stage of the ring: what a thread block has of a k-iteration in shared memory, codes, activations and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The work tile.
    pub tile: TokenTile,
    /// Tokens that are multiplied, at most.
    pub tokens: u32,
    /// Images of activations.
    pub images: u32,
    /// The pieces in which a row's scales lie.
    pub scales: ScalePieces,
}

impl Stage {
    /// Bytes of codes.
    pub const fn codes_bytes(self) -> u32 {
        self.tile.rows() * self.images * COLUMNS / 2
    }

    /// Bytes of activations, which are behind the codes.
    pub const fn activation_bytes(self) -> u32 {
        self.tokens * self.images * COLUMNS * 2
    }

    /// The offset of the scales, behind the activations.
    pub const fn scales_offset(self) -> u32 {
        self.codes_bytes() + self.activation_bytes()
    }

    /// Bytes.
    pub const fn bytes(self) -> u32 {
        self.scales_offset() + self.tile.rows() * self.scales.all()
    }

    /// Stages for which there is room in so many bytes of shared memory.
    pub const fn count(self, shared: u32) -> u32 {
        let stages = shared.saturating_sub(FRONT_BYTES) / self.bytes();
        if stages < MOST_STAGES { stages } else { MOST_STAGES }
    }

    /// Bytes of shared memory for so many stages.
    pub const fn shared_bytes(self, stages: u32) -> u32 {
        FRONT_BYTES + stages * self.bytes()
    }
}

/// Kernels around products, in front of those that multiply.
const FRONT: usize = 4;

/// The kernel that makes bf16 parts of activations in f32 ([`SplitGrid`](crate::epilogue::SplitGrid)).
pub const SPLIT: KernelId = KernelId::new(Family::Gemm, 2);

/// The kernel that adds up the sums of such parts ([`MergeGrid`](crate::epilogue::MergeGrid)).
pub const MERGE: KernelId = KernelId::new(Family::Gemm, 3);

/// The kernel that arranges activations in f16 or bf16; none for f32.
pub const fn arrange(dtype: Dtype) -> Option<KernelId> {
    match dtype {
        Dtype::F32 => None,
        Dtype::F16 => Some(KernelId::new(Family::Gemm, 0)),
        Dtype::Bf16 => Some(KernelId::new(Family::Gemm, 1)),
    }
}

/// The rows of an edition: NVFP4 and MXFP4, each with f16, which some convert, and with bf16, for each token tile.
macro_rules! table {
    ($edition:ident $converts:ident, [$($front:expr,)*]; $($n:ident $suffix:literal,)+) => {
        &[$($front,)* $(
            resident(kernel(concat!("nvfp4_gemm_weights_f16_", $suffix), Some(Dtype::F16), launch(Edition::$edition, TokenTile::$n), Converts::$converts), 1),
            resident(kernel(concat!("nvfp4_gemm_weights_bf16_", $suffix), Some(Dtype::Bf16), launch(Edition::$edition, TokenTile::$n), Converts::Nothing), 1),
            resident(kernel(concat!("mxfp4_gemm_weights_f16_", $suffix), Some(Dtype::F16), launch(Edition::$edition, TokenTile::$n), Converts::$converts), 1),
            resident(kernel(concat!("mxfp4_gemm_weights_bf16_", $suffix), Some(Dtype::Bf16), launch(Edition::$edition, TokenTile::$n), Converts::Nothing), 1),
        )+]
    };
}

pub(crate) const KERNELS: &[Kernel] = table! {
    Mma E2m1, [
        resident(kernel("arrange_f16", Some(Dtype::F16), ARRANGE, Converts::Nothing), ARRANGE_RESIDENT),
        resident(kernel("arrange_bf16", Some(Dtype::Bf16), ARRANGE, Converts::Nothing), ARRANGE_RESIDENT),
        kernel("split_f32", Some(Dtype::F32), ELEMENTWISE, Converts::Nothing),
        kernel("merge_f32", Some(Dtype::F32), ELEMENTWISE, Converts::Nothing),
    ];
    N16 "mma_n16", N32 "mma_n32", N64 "mma_n64",
};

pub(crate) const WGMMA_KERNELS: &[Kernel] = table! {
    Wgmma Nothing, [];
    N16 "wgmma_n16", N32 "wgmma_n32", N64 "wgmma_n64", N128 "wgmma_n128", N256 "wgmma_n256",
    N32 "wgmma_n32_paired", N64 "wgmma_n64_paired", N128 "wgmma_n128_paired",
};

/// Threads of a thread block of the kernels that arrange.
pub const ARRANGE_THREADS: u32 = 128;
/// Thread blocks of these that a multiprocessor has registers for, 32 a thread: so that one has room on a multiprocessor of compute
/// capability 9.0 beside a thread block that multiplies up to 64 tokens, which leaves 4096.
const ARRANGE_RESIDENT: u32 = 2048 / ARRANGE_THREADS;
/// The launch of the kernels that arrange: the grid says how many thread blocks there are.
const ARRANGE: Launch = (ARRANGE_THREADS, 0, 0);

/// The launch of a kernel that multiplies, with as many stages as the GPUs with the most shared memory have room for.
const fn launch(edition: Edition, tile: TokenTile) -> Launch {
    (edition.threads(tile), 0, edition.shared_bytes(tile, MOST_SHARED))
}

/// A pair has room for half of a work tile's sums, and a word for each tile of 16 rows, in place of two stages.
const _: () = {
    let mut i = 0;
    while i < TokenTile::ALL.len() {
        let tile = TokenTile::ALL[i];
        let stage = Edition::Wgmma.stage(tile, 1, ScalePieces::ONE);
        let given = tile.sums_bytes() / 2 + tile.tiles() as u64 * 4;
        assert!(!Edition::Wgmma.has_pairs(tile) || given <= 2 * stage.bytes() as u64);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_fit_into_any_gpu() {
        // Compute capability 8.6, 8.0, 9.0.
        for (kib, stages) in [(99, [4, 3, 2]), (163, [6, 5, 4]), (227, [8, 8, 6])] {
            let of_mma =
                TokenTile::ALL.map(|tile| Edition::Mma.stage(tile, 1, ScalePieces::ONE).count(kib << 10));
            assert_eq!(of_mma[..3], stages);
        }
        let of_warp_groups =
            |tile: TokenTile, tokens| Edition::Wgmma.stage(tile, tokens, ScalePieces::ONE).count(MOST_SHARED);
        assert_eq!(TokenTile::ALL.map(|tile| of_warp_groups(tile, tile.tokens())), [5, 4, 3, 5, 3]);
        assert_eq!(
            [96, 128, 160, 192, 193].map(|tokens| of_warp_groups(TokenTile::N256, tokens)),
            [6, 5, 4, 3, 3]
        );
    }
}
