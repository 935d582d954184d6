//! Weights in four bits times activations in 16, for any number of tokens.
//!
//! A first kernel arranges the activations as tensor cores read them ([`ArrangeGrid`]); a second one
//! multiplies ([`GemmGrid`]). There are two editions of the second: `mma` for every GPU, and `wgmma` for
//! compute capability 9.0.

use microscale_formats::dot::CHUNK;

use crate::grid::Divider;
use crate::launch::{Converts, Dtype, Family, Kernel, KernelId, Launch, THREADS, WARP, bounded, kernel};
use crate::weights::{QUAD, TILE_ROWS, TOKEN_LIMIT, WeightsFormat, WeightsShape};

/// Rows of a work tile.
pub const ROWS: u32 = 256;
/// Columns of a k-iteration: a chunk for each lane of four.
pub const COLUMNS: u32 = QUAD * CHUNK as u32;
/// Tiles of 16 rows in a work tile.
pub const TILES: u32 = ROWS / TILE_ROWS;
/// Bytes of codes in a stage.
pub const CODES_BYTES: u32 = ROWS * COLUMNS / 2;
/// Bytes of a row's scales in a stage: the two words that hold them, wherever they begin in the first.
pub const ROW_SCALES_BYTES: u32 = 8;
/// Bytes of scales in a stage.
pub const SCALES_BYTES: u32 = ROWS * ROW_SCALES_BYTES;
/// Bytes of shared memory in front of the stages: barriers, and a word for all threads at its end.
pub const FRONT_BYTES: u32 = 256;
/// Counters for shared work tiles, zeros before a launch and after it. There are at most two such tiles a thread block.
pub const COUNTERS: u32 = 1 << 14;
/// Stages, at most.
pub const MOST_STAGES: u32 = 8;
/// Bytes of shared memory that a thread block has at most, on GPUs of compute capability 8.0 and 9.0.
const MOST_SHARED: [u32; 2] = [163 << 10, 227 << 10];

/// How a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// By warps, with operands in registers: every GPU.
    Mma,
    /// By warp groups, with activations in shared memory: compute capability 9.0.
    Wgmma,
}

impl Edition {
    /// Warps that multiply.
    pub const fn multipliers(self) -> u32 {
        match self {
            Self::Mma => TILES / 2,
            Self::Wgmma => TILES,
        }
    }

    /// Warps that copy; with none, those that multiply do.
    pub const fn copiers(self) -> u32 {
        match self {
            Self::Mma => 0,
            Self::Wgmma => 4,
        }
    }

    /// Returns whether it has kernels for a token tile: a warp has no registers for 128 tokens.
    pub const fn has(self, tile: TokenTile) -> bool {
        matches!(self, Self::Wgmma) || !matches!(tile, TokenTile::N128)
    }

    /// Threads of a thread block.
    pub const fn threads(self) -> u32 {
        (self.multipliers() + self.copiers()) * WARP
    }
}

/// The tokens of a work tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenTile {
    /// 16.
    N16,
    /// 32.
    N32,
    /// 64.
    N64,
    /// 128, for warp groups only.
    N128,
}

impl TokenTile {
    /// All, from the smallest to the largest.
    pub const ALL: [Self; 4] = [Self::N16, Self::N32, Self::N64, Self::N128];

    /// The number of tokens.
    pub const fn tokens(self) -> u32 {
        16 << self as u32
    }

    /// Bytes of the activations of a k-iteration.
    pub const fn activation_bytes(self) -> u32 {
        self.tokens() * COLUMNS * 2
    }

    /// Bytes of a stage: codes, scales, activations.
    pub const fn stage_bytes(self) -> u32 {
        CODES_BYTES + SCALES_BYTES + self.activation_bytes()
    }

    /// Stages for which there is room in so many bytes of shared memory.
    pub const fn stages(self, shared: u32) -> u32 {
        let stages = shared.saturating_sub(FRONT_BYTES) / self.stage_bytes();
        if stages < MOST_STAGES { stages } else { MOST_STAGES }
    }

    /// Bytes of shared memory for so many stages.
    pub const fn shared_bytes(self, stages: u32) -> u32 {
        FRONT_BYTES + stages * self.stage_bytes()
    }

    /// Bytes of the sums of a work tile.
    pub const fn sums_bytes(self) -> u64 {
        ROWS as u64 * self.tokens() as u64 * 4
    }

    /// The kernel that multiplies weights of a format with activations in f16 or bf16; none for f32, and
    /// none that the edition [does not have](Edition::has).
    pub const fn kernel(self, edition: Edition, format: WeightsFormat, dtype: Dtype) -> Option<KernelId> {
        let dtype = match dtype {
            _ if !edition.has(self) => return None,
            Dtype::F32 => return None,
            Dtype::F16 => 0,
            Dtype::Bf16 => 1,
        };
        let number = self as usize * 4 + format as usize * 2 + dtype;
        Some(match edition {
            Edition::Mma => KernelId::new(Family::Gemm, 2 + number),
            Edition::Wgmma => KernelId::new(Family::Wgmma, number),
        })
    }
}

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
            bounded(kernel(concat!("nvfp4_gemm_weights_f16_", $suffix), Some(Dtype::F16), launch(Edition::$edition, TokenTile::$n), Converts::$converts)),
            bounded(kernel(concat!("nvfp4_gemm_weights_bf16_", $suffix), Some(Dtype::Bf16), launch(Edition::$edition, TokenTile::$n), Converts::Nothing)),
            bounded(kernel(concat!("mxfp4_gemm_weights_f16_", $suffix), Some(Dtype::F16), launch(Edition::$edition, TokenTile::$n), Converts::$converts)),
            bounded(kernel(concat!("mxfp4_gemm_weights_bf16_", $suffix), Some(Dtype::Bf16), launch(Edition::$edition, TokenTile::$n), Converts::Nothing)),
        )+]
    };
}

pub(crate) const KERNELS: &[Kernel] = table! {
    Mma E2m1, [
        kernel("arrange_f16", Some(Dtype::F16), ARRANGE, Converts::Nothing),
        kernel("arrange_bf16", Some(Dtype::Bf16), ARRANGE, Converts::Nothing),
    ];
    N16 "mma_n16", N32 "mma_n32", N64 "mma_n64",
};

pub(crate) const WGMMA_KERNELS: &[Kernel] = table! {
    Wgmma Nothing, [];
    N16 "wgmma_n16", N32 "wgmma_n32", N64 "wgmma_n64", N128 "wgmma_n128",
};

/// The launch of the kernels that arrange: a thread has eight activations of each of four chunks.
const ARRANGE: Launch = (THREADS, THREADS * 32, 0);

/// The launch of a kernel that multiplies, with as many stages as the GPUs with the most shared memory have room for.
const fn launch(edition: Edition, tile: TokenTile) -> Launch {
    let stages = tile.stages(MOST_SHARED[edition as usize]);
    (edition.threads(), 0, tile.shared_bytes(stages))
}

/// How activations are arranged: an image of each k-iteration of each token tile, in pieces of 16 bytes. Tokens and columns
/// that do not exist are zeros.
///
/// Weights are decoded eight at a time, to four pairs, and activations come in the same pairs. For warps, a piece has the pairs of
/// one token and chunk; pieces come by chunk, then token, then by the number of their eight in the chunk. For warp groups, a piece
/// has one of these pairs of each of the four chunks of a token, and eight tokens' pieces make a core matrix; these come token by
/// token, then by pair, then by eight.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrangeGrid {
    /// Columns.
    pub cols: u64,
    /// K-iterations, which divide the number of one among those of all token tiles.
    pub k_iterations: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of the tokens of a tile.
    pub tile_bits: u32,
    /// Eights of tokens in all tiles, times k-iterations: a warp has one.
    pub eights: u32,
    /// 1 if every token's activations start on 16 bytes.
    pub aligned: u32,
    /// 1 for core matrices, as warp groups read them.
    pub core_matrices: u32,
    _padding: u32,
}

impl ArrangeGrid {
    /// Makes a grid; `None` if there is nothing to arrange, or more than a launch can count.
    pub fn new(edition: Edition, tile: TokenTile, cols: u64, tokens: u64, aligned: bool) -> Option<Self> {
        if tokens == 0 || cols == 0 || tokens >= TOKEN_LIMIT {
            return None;
        }
        let k_iterations = cols.div_ceil(u64::from(COLUMNS));
        let eights = tokens.next_multiple_of(u64::from(tile.tokens())) / 8;
        let eights = k_iterations.checked_mul(eights).filter(|eights| *eights < 1 << 31)?;
        Some(Self {
            cols,
            k_iterations: Divider::new(k_iterations),
            tokens: tokens as u32,
            tile_bits: tile.tokens().ilog2(),
            eights: eights as u32,
            aligned: u32::from(aligned),
            core_matrices: u32::from(edition == Edition::Wgmma),
            _padding: 0,
        })
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        (self.eights as u64).div_ceil((THREADS / WARP) as u64)
    }

    /// Bytes of the arranged activations.
    pub const fn bytes(&self) -> u64 {
        self.eights as u64 * 8 * COLUMNS as u64 * 2
    }
}

/// How work tiles fall to thread blocks, which are persistent (stream-K).
///
/// Each thread block has as many whole work tiles as every other, one after the other. The k-iterations of the tiles that
/// are left, in their order, fall to the thread blocks in equal shares. Where a tile is shared, each thread block leaves its
/// sums in memory, and the one that comes last adds them up, in the order of K.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemmGrid {
    /// The weights.
    pub shape: WeightsShape,
    /// Divides a work tile's number: the quotient is its row tile, the rest its token tile.
    pub token_tiles: Divider,
    /// K-iterations of a work tile, which divide the number of one among those of all shared tiles.
    pub k_iterations: Divider,
    /// Shared k-iterations that each thread block has, and one more.
    pub share: [Divider; 2],
    /// How many of the first thread blocks have one more.
    pub longer: u32,
    /// Tokens.
    pub tokens: u32,
    /// Thread blocks.
    pub thread_blocks: u32,
    /// Work tiles that each thread block has whole.
    pub waves: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// The number of the first shared work tile.
    pub first_shared: u32,
}

impl GemmGrid {
    /// Makes a grid, for a GPU that has room for so many thread blocks at once, with so many stages each.
    ///
    /// `None` if there is nothing to multiply, or more than kernels can count.
    pub fn new(tile: TokenTile, shape: WeightsShape, tokens: u64, at_once: u32, stages: u32) -> Option<Self> {
        if !shape.counts(tokens) || shape.cols == 0 || at_once == 0 || at_once > COUNTERS / 2 {
            return None;
        }
        let token_tiles = tokens.div_ceil(u64::from(tile.tokens()));
        let k_iterations = shape.cols.div_ceil(u64::from(COLUMNS));
        let tiles = token_tiles.checked_mul(shape.rows.div_ceil(u64::from(ROWS)))?;
        // K-iterations are counted in 32 bits, with room for a divider's estimate.
        if tiles.checked_mul(k_iterations).is_none_or(|all| all >= 1 << 31) || shape.rows >= 1 << 31 {
            return None;
        }
        let (at_once, tiles, k_iterations) = (u64::from(at_once), tiles, k_iterations);
        // One wave is left to be shared, unless the tiles come out even.
        let waves = (tiles / at_once).saturating_sub(u64::from(!tiles.is_multiple_of(at_once)));
        let shared = (tiles - waves * at_once) * k_iterations;
        let thread_blocks = if waves > 0 { at_once } else { at_once.min(shared) };
        let share = shared / thread_blocks;
        Some(Self {
            shape,
            token_tiles: Divider::new(token_tiles),
            k_iterations: Divider::new(k_iterations),
            share: [Divider::new(share.max(1)), Divider::new(share + 1)],
            longer: (shared % thread_blocks) as u32,
            tokens: tokens as u32,
            thread_blocks: thread_blocks as u32,
            waves: waves as u32,
            stages,
            first_shared: (waves * thread_blocks) as u32,
        })
    }

    /// Bytes of the sums that thread blocks leave: each of its first shared tile, and of its last.
    pub const fn left_bytes(&self, tile: TokenTile) -> u64 {
        2 * self.thread_blocks as u64 * tile.sums_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(rows: u64, cols: u64, tokens: u64, at_once: u32) -> Option<GemmGrid> {
        let shape = WeightsShape { rows, cols, blocks: cols.div_ceil(32) };
        GemmGrid::new(TokenTile::N64, shape, tokens, at_once, 4)
    }

    #[test]
    fn every_k_iteration_falls_to_one_thread_block() {
        for (rows, cols, tokens, at_once) in [
            (8192, 28672, 64, 132),
            (256, 128, 1, 132),
            (5000, 2880, 200, 7),
            (512, 4096, 300, 10),
            (256, 1280, 640, 5),
        ] {
            let grid = grid(rows, cols, tokens, at_once).unwrap();
            let tiles = rows.div_ceil(256) * tokens.div_ceil(64);
            let whole = u64::from(grid.waves) * u64::from(grid.thread_blocks);
            assert_eq!(whole, u64::from(grid.first_shared));
            let shares = u64::from(grid.thread_blocks) * (grid.share[1].divisor - 1) + u64::from(grid.longer);
            assert_eq!(shares, (tiles - whole) * cols.div_ceil(128), "{rows} {cols} {tokens} {at_once}");
            assert!(tiles - whole <= 2 * u64::from(at_once), "there are counters for all");
        }
    }

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        assert!(grid(256, 128, 0, 4).is_none());
        assert!(grid(0, 128, 1, 4).is_none());
        assert!(grid(256, 0, 1, 4).is_none());
        assert!(grid(1 << 31, 128, 1, 4).is_none());
        assert!(grid(1 << 30, 1 << 20, 1 << 20, 4).is_none());
        let arranged = |cols, tokens| ArrangeGrid::new(Edition::Mma, TokenTile::N16, cols, tokens, true);
        assert!(arranged(128, TOKEN_LIMIT).is_none());
        assert!(arranged(1 << 40, 1 << 20).is_none());
        assert_eq!(arranged(130, 17).unwrap().bytes(), 2 * 32 * 256);
    }

    #[test]
    fn stages_fit_into_any_gpu() {
        // Compute capability 8.6, 8.0, 9.0.
        for (kib, stages) in [(99, [4, 3, 2, 1]), (163, [7, 6, 4, 3]), (227, [8, 8, 6, 4])] {
            assert_eq!(TokenTile::ALL.map(|tile| tile.stages(kib << 10)), stages);
        }
    }
}
