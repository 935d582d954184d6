//! Weights in four bits times activations in 16, for any number of tokens.
//!
//! A first kernel arranges the activations as tensor cores read them ([`ArrangeGrid`]); a second one
//! multiplies ([`GemmGrid`]). There are two editions of the second: `mma` for every GPU, and `wgmma` for
//! compute capability 9.0.

use microscale_formats::dot::CHUNK;

use crate::epilogue::ELEMENTWISE;
use crate::experts::Plan;
use crate::grid::Divider;
use crate::launch::{Converts, Dtype, Family, Kernel, KernelId, Launch, WARP, kernel, resident};
use crate::schedule::Schedule;
use crate::weights::{PIPELINED_COLUMN_LIMIT, QUAD, TILE_ROWS, TOKEN_LIMIT, WeightsFormat, WeightsShape};

/// Columns of an image of activations: a chunk for each lane of four. A k-iteration is an image or two.
pub const COLUMNS: u32 = QUAD * CHUNK as u32;
/// Tiles of 16 rows in a work tile, at most.
pub const MOST_TILES: u32 = 16;
/// Bytes of shared memory in front of the stages: barriers, the [`Plan`], and a word for all threads, eight bytes before the end.
pub const FRONT_BYTES: u32 = 256;
/// The offset of the [`Plan`], behind two barriers for each stage.
pub const PLAN_OFFSET: u32 = MOST_STAGES * 16;
const _: () = assert!(PLAN_OFFSET as usize + size_of::<Plan>() <= FRONT_BYTES as usize - 8);
/// Counters for the tiles of 16 rows of shared work tiles, zeros before a launch and after it. There are fewer shared work tiles
/// than thread blocks.
pub const COUNTERS: u32 = 1 << 14;
/// Stages, at most.
pub const MOST_STAGES: u32 = 8;
/// Bytes of shared memory that a thread block has at most, on any GPU.
const MOST_SHARED: u32 = 227 << 10;

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
    const fn starts_beside(self, tile: TokenTile) -> bool {
        matches!(self, Self::Wgmma) && tile.tokens() <= 64
    }

    /// Returns whether thread blocks may be in pairs, which give each other sums of half of the tokens. Those of the smallest token tile have few,
    /// and the largest one's are whole.
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
        // Those in pairs come behind all others, without the smallest and the largest.
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

/// How activations are arranged: images of each k-iteration of each token tile, in pieces of 16 bytes. Tokens and columns
/// that do not exist are zeros.
///
/// Weights are decoded eight at a time, to four pairs, and activations come in the same pairs. For warps, a piece has the pairs of
/// one token and chunk; pieces come by chunk, then token, then by the number of their eight in the chunk. For warp groups, a piece
/// has one of these pairs of each of the four chunks of a token, and eight tokens' pieces make a core matrix; these come by pair, then
/// by eight of the chunk, then by eight of tokens, so that the first tokens' are together.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrangeGrid {
    /// Columns: fewer than [`PIPELINED_COLUMN_LIMIT`].
    pub cols: u64,
    /// Images of a token tile, which divide the number of one among those of all.
    pub images: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of the tokens of a tile.
    pub tile_bits: u32,
    /// Eights of tokens in all tiles, times images: a warp has one.
    pub eights: u32,
    /// 1 if every token's activations start on 16 bytes.
    pub aligned: u32,
    /// 1 for core matrices, as warp groups read them.
    pub core_matrices: u32,
    /// Thread blocks, whose warps take turns.
    pub thread_blocks: u32,
}

impl ArrangeGrid {
    /// Makes a grid, for a GPU with so many multiprocessors; `None` if there is nothing to arrange, or more than a launch can count.
    pub fn new(
        (edition, tile): (Edition, TokenTile),
        cols: u64,
        tokens: u64,
        aligned: bool,
        multiprocessors: u32,
    ) -> Option<Self> {
        if tokens == 0 || cols == 0 || tokens >= TOKEN_LIMIT || cols >= PIPELINED_COLUMN_LIMIT {
            return None;
        }
        let of_k_iteration = u64::from(edition.images(tile));
        let images = cols.div_ceil(u64::from(COLUMNS) * of_k_iteration) * of_k_iteration;
        let eights = tokens.next_multiple_of(u64::from(tile.tokens())) / 8;
        let eights = images.checked_mul(eights).filter(|eights| *eights < 1 << 31)?;
        let all = (eights as u32).div_ceil(ARRANGE_THREADS / WARP);
        Some(Self {
            cols,
            images: Divider::new(images),
            tokens: tokens as u32,
            tile_bits: tile.tokens().ilog2(),
            eights: eights as u32,
            aligned: u32::from(aligned),
            core_matrices: u32::from(edition == Edition::Wgmma),
            thread_blocks: if edition.starts_beside(tile) { all.min(multiprocessors) } else { all },
        })
    }

    /// Bytes of the arranged activations.
    pub const fn bytes(&self) -> u64 {
        self.eights as u64 * 8 * COLUMNS as u64 * 2
    }
}

/// A product of weights and tokens, or experts' rows, as its kernel is told.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemmGrid {
    /// The weights, or those of an expert.
    pub shape: WeightsShape,
    /// K-iterations of a work tile, which divide the number of one among those of all shared tiles.
    pub k_iterations: Divider,
    /// The schedule. That of experts' rows is in their plan, and this one is what it would be if all token tiles existed.
    pub schedule: Schedule,
    /// Tokens.
    pub tokens: u32,
    /// Bytes of shared memory, in which are as many [`Stage`]s as there is room for.
    pub shared: u32,
}

impl GemmGrid {
    /// Makes a grid, for a GPU that has room for so many thread blocks at once, with so many bytes of shared memory each.
    ///
    /// `None` if there is nothing to multiply, or more than kernels can count, or if there is no room for two stages.
    pub fn new(
        (edition, tile): (Edition, TokenTile),
        shape: WeightsShape,
        tokens: u64,
        at_once: u32,
        shared: u32,
    ) -> Option<Self> {
        if !shape.counts(tokens) || shape.cols == 0 || at_once == 0 || at_once > COUNTERS / MOST_TILES {
            return None;
        }
        let stage = edition.stage(tile, tokens as u32, ScalePieces::MOST);
        let token_tiles = tokens.div_ceil(u64::from(tile.tokens()));
        let k_iterations = shape.cols.div_ceil(u64::from(stage.images * COLUMNS));
        let row_tiles = shape.rows.div_ceil(u64::from(tile.rows()));
        let tiles = token_tiles.checked_mul(row_tiles)?;
        // K-iterations are counted in 32 bits, with room for a divider's estimate.
        if tiles.checked_mul(k_iterations).is_none_or(|all| all >= 1 << 31) || shape.rows >= 1 << 31 {
            return None;
        }
        Some(Self {
            shape,
            k_iterations: Divider::new(k_iterations),
            schedule: Schedule::new(row_tiles as u32, token_tiles as u32, k_iterations as u32, at_once),
            tokens: tokens as u32,
            shared,
        })
        .filter(|_| stage.count(shared) >= 2)
    }

    /// The grid with work tiles for pairs of thread blocks, of which there is room for so many at once; none if that does not do.
    pub fn in_pairs(self, (edition, tile): (Edition, TokenTile), pairs: u32) -> Option<Self> {
        let k_iterations = self.k_iterations.divisor as u32;
        let row_tiles = self.shape.rows.div_ceil(u64::from(tile.rows())) as u32;
        let token_tiles = self.tokens.div_ceil(tile.tokens());
        let schedule = Schedule::in_pairs(row_tiles, token_tiles, k_iterations, pairs)?;
        edition.has_pairs(tile).then_some(Self { schedule, ..self })
    }

    /// Tokens of the largest token tile.
    pub fn most_tokens(&self, tile: TokenTile) -> u32 {
        self.tokens.min(tile.tokens())
    }

    /// Work tiles of which a thread block has k-iterations, at most, if one that it shares is one of them.
    pub fn most_work_tiles(&self) -> u64 {
        u64::from(self.schedule.waves) + u64::from(self.schedule.shared != 0)
    }

    /// K-iterations that a thread block has, at most.
    pub fn most_k_iterations(&self) -> u64 {
        let Schedule { waves, shared, share, .. } = self.schedule;
        let shared = if shared == 0 { 0 } else { share.divisor };
        u64::from(waves) * self.k_iterations.divisor + shared
    }

    /// Thread blocks that share a work tile, at most; 1 if none is shared.
    pub fn most_sharers(&self) -> u64 {
        let Schedule { shared, share, .. } = self.schedule;
        if shared == 0 { 1 } else { self.k_iterations.divisor.div_ceil(share.divisor) }
    }
}

/// Bytes of the sums that so many thread blocks leave: each of its first shared tile, and of its last.
pub const fn left_bytes(thread_blocks: u32, tile: TokenTile) -> u64 {
    2 * thread_blocks as u64 * tile.sums_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(rows: u64, cols: u64, tokens: u64, at_once: u32) -> Option<GemmGrid> {
        let shape = WeightsShape { rows, cols, blocks: cols.div_ceil(32) };
        GemmGrid::new((Edition::Mma, TokenTile::N64), shape, tokens, at_once, MOST_SHARED)
    }

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        assert!(grid(256, 128, 0, 4).is_none());
        assert!(grid(0, 128, 1, 4).is_none());
        assert!(grid(256, 0, 1, 4).is_none());
        assert!(grid(1 << 31, 128, 1, 4).is_none());
        assert!(grid(1 << 30, 1 << 20, 1 << 20, 4).is_none());
        let arranged = |cols, tokens| ArrangeGrid::new((Edition::Mma, TokenTile::N16), cols, tokens, true, 4);
        assert!(arranged(128, TOKEN_LIMIT).is_none());
        assert!(arranged(PIPELINED_COLUMN_LIMIT, 1).is_none());
        assert!(arranged(1 << 23, 1 << 20).is_none());
        assert_eq!(arranged(130, 17).unwrap().bytes(), 2 * 32 * 256);
    }

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
