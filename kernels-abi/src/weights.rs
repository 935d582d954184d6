//! Weights in four bits times activations in 16.

use microscale_formats::dot::CHUNK;

use crate::gemv::BLOCK_LIMIT;
use crate::grid::Divider;
use crate::launch::{Converts, Dtype, Family, Kernel, KernelId, Launch, WARP, kernel};

/// Places of rows in a tile of weights: what one instruction of tensor cores multiplies.
pub const ROW_PLACES: u32 = 16;
/// Places of tokens that it is multiplied with.
pub const TOKEN_PLACES: u32 = 8;
/// Lanes that share a place: each has a chunk of a step.
pub const QUAD: u32 = 4;
/// Threads in a thread block of the kernels without copies ahead.
pub const WEIGHTS_THREADS: u32 = 256;
/// More tokens than are multiplied with weights at once.
pub const TOKEN_LIMIT: u64 = 1 << 24;
/// More columns than weights may have for the kernels that copy ahead: they count bytes in 32 bits.
pub const AHEAD_COLUMN_LIMIT: u64 = 1 << 24;

/// The format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsFormat {
    /// NVFP4.
    Nvfp4,
    /// MXFP4.
    Mxfp4,
}

/// The kernels by how they multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// One token, copied ahead, a tile a warp.
    One1,
    /// The same, two tiles.
    One2,
    /// The same, four tiles.
    One4,
    /// A lot of up to eight tokens, copied ahead, a tile a warp.
    Lot1,
    /// The same, two tiles.
    Lot2,
    /// A lot of up to eight tokens by loads, a tile a warp.
    Many1,
    /// The same, two tiles.
    Many2,
    /// Rows that are not whole chunks, by the definition.
    Cut,
}

impl Weights {
    /// The kernel for a format and the activations' dtype, f16 or bf16; none for f32.
    pub const fn of(self, format: WeightsFormat, dtype: Dtype) -> Option<KernelId> {
        let dtype = match dtype {
            Dtype::F32 => return None,
            Dtype::F16 => 0,
            Dtype::Bf16 => 1,
        };
        Some(KernelId::new(Family::Weights, self as usize * 4 + format as usize * 2 + dtype))
    }
}

/// The table: of each row, kernels for NVFP4 and MXFP4 with f16 and bf16 each, of which those with f16 convert.
macro_rules! table {
    ($($variant:literal $launch:expr, $converts:ident;)+) => {
        &[$(
            kernel(concat!("nvfp4_gemv_weights_f16_", $variant), Some(Dtype::F16), $launch, Converts::$converts),
            kernel(concat!("nvfp4_gemv_weights_bf16_", $variant), Some(Dtype::Bf16), $launch, Converts::Nothing),
            kernel(concat!("mxfp4_gemv_weights_f16_", $variant), Some(Dtype::F16), $launch, Converts::$converts),
            kernel(concat!("mxfp4_gemv_weights_bf16_", $variant), Some(Dtype::Bf16), $launch, Converts::Nothing),
        )+]
    };
}

pub(crate) const KERNELS: &[Kernel] = table! {
    "one_tiles1" ahead(true, 1), E2m1;
    "one_tiles2" ahead(true, 2), E2m1;
    "one_tiles4" ahead(true, 4), E2m1;
    "lot_tiles1" ahead(false, 1), E2m1;
    "lot_tiles2" ahead(false, 2), E2m1;
    "tiles1" by_loads(1), E2m1;
    "tiles2" by_loads(2), E2m1;
    "cut" (WEIGHTS_THREADS, WEIGHTS_THREADS / WARP, 0), Nothing;
};

/// Kernels without copies ahead, of so many tiles a warp: their grid says how many thread blocks there are.
const fn by_loads(tiles: u32) -> Launch {
    (WEIGHTS_THREADS, 0, weights_shared_bytes(tiles))
}

/// Kernels that copy ahead, with as many warps as a thread block may have.
const fn ahead(one: bool, tiles: u32) -> Launch {
    (AHEAD_WARPS * WARP, 0, AHEAD_WARPS * Ahead { one, tiles }.warp_bytes())
}

/// Bytes of shared memory that a thread block of the kernels that multiply weights needs, if a warp has so many
/// tiles: their sums, and a flag for each warp.
const fn weights_shared_bytes(tiles: u32) -> u32 {
    WEIGHTS_THREADS / WARP * (tiles * ROW_PLACES * TOKEN_PLACES + 1) * 4
}

/// Warps of a thread block of the kernels that copy ahead, at most: what keeps an H200's multiprocessor busy.
pub const AHEAD_WARPS: u32 = 16;

/// A kernel for weights that copies what it needs next to shared memory, and how it uses that. Thread blocks stay for as
/// long as there are rows; the rows of which they have some warps multiply at once are a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Whether it is for one token, or for a lot of up to eight.
    pub one: bool,
    /// Tiles of a warp.
    pub tiles: u32,
}

impl Ahead {
    /// The exponent of the segments of rows and tokens, given that of the tokens of a lot.
    #[inline(always)]
    pub const fn segment_bits(self, lot_bits: u32) -> u32 {
        if self.one { 1 } else { TOKEN_PLACES.ilog2() - lot_bits }
    }

    /// Steps of a warp that are in shared memory at once, or on their way to it: three, or two of many bytes, so that
    /// there is room for all warps.
    pub const fn slots(self) -> u32 {
        if self.tiles > if self.one { 2 } else { 1 } { 2 } else { 3 }
    }

    /// Bytes of a step's activations: of one token, eight chunks of 64 and zeros; of a lot, a chunk for each lane.
    pub const fn activation_bytes(self) -> u32 {
        64 * if self.one { 9 } else { WARP }
    }

    /// Bytes of a step: codes of two rows a lane and tile, a word of scales, and activations.
    pub const fn slot_bytes(self) -> u32 {
        self.tiles * WARP * (2 * 16 + 4) + self.activation_bytes()
    }

    /// Bytes of all steps of a warp.
    pub const fn slots_bytes(self) -> u32 {
        self.slots() * self.slot_bytes()
    }

    /// Turns of a warp, at most.
    pub const fn turns(self) -> u32 {
        if self.one { 8 } else { 4 }
    }

    /// Bytes of the sums that a warp keeps of a turn: one token's of each row, or a lot's, as tensor cores have them.
    pub const fn sums_bytes(self) -> u32 {
        let sums = if self.one { ROW_PLACES >> self.segment_bits(0) } else { ROW_PLACES * TOKEN_PLACES };
        self.tiles * sums * 4
    }

    /// Bytes that a warp keeps of a turn: sums, and of a lot a flag behind them, on 16 bytes.
    pub const fn turn_bytes(self) -> u32 {
        self.sums_bytes() + if self.one { 0 } else { 16 }
    }

    /// Bytes of a warp.
    pub const fn warp_bytes(self) -> u32 {
        self.slots_bytes() + self.turns() * self.turn_bytes()
    }
}

/// Weights, a quantized matrix, to multiply with tokens' activations, which are not quantized.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsShape {
    /// Rows of the matrix, at least 1.
    pub rows: u64,
    /// Its columns, and a token's activations.
    pub cols: u64,
    /// Blocks in a row; fewer than [`BLOCK_LIMIT`].
    pub blocks: u64,
}

impl WeightsShape {
    /// Whether kernels can count what there is, with so many tokens, and there is something.
    const fn counts(&self, tokens: u64) -> bool {
        self.rows > 0 && self.blocks < BLOCK_LIMIT && tokens > 0 && tokens < TOKEN_LIMIT
    }
}

/// How weights are multiplied with up to eight tokens at a time.
///
/// Tensor cores multiply 16 places of rows with eight places of tokens. With fewer tokens than that, parts of the
/// same row and of the same token lie in places side by side: segments. Counts that kernels divide by are powers of
/// two, given by their exponents.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsGrid {
    /// What is multiplied.
    pub shape: WeightsShape,
    /// Tokens, at least 1; fewer than [`TOKEN_LIMIT`].
    pub tokens: u64,
    /// Of the warps that share rows, each with a part of the columns: at most as many as a thread block has.
    pub split_bits: u32,
    /// Of the segments: up to 3.
    pub segment_bits: u32,
    /// Of the tokens of a lot.
    pub lot_bits: u32,
    /// Of the tiles that a warp has.
    pub tile_bits: u32,
    /// Lots that the tokens fall to, one for each thread block with the same rows: fewer than 2³¹ thread blocks in all.
    pub lots: Divider,
}

impl WeightsGrid {
    /// With so many tiles a warp, and rows shared by so many warps; `None` if there is nothing to multiply, or more
    /// than a launch can count, or if these are not powers of two or more warps than a thread block has.
    pub fn new(shape: WeightsShape, tokens: u64, tiles: u32, splits: u32) -> Option<Self> {
        let shared = tiles.is_power_of_two() && splits.is_power_of_two() && splits <= WEIGHTS_THREADS / WARP;
        if !shared || !shape.counts(tokens) {
            return None;
        }
        let lot = (tokens as u32).next_power_of_two().min(TOKEN_PLACES);
        let grid = Self {
            shape,
            tokens,
            split_bits: splits.ilog2(),
            segment_bits: (TOKEN_PLACES / lot).ilog2(),
            tile_bits: tiles.ilog2(),
            lot_bits: lot.ilog2(),
            lots: Divider::new(tokens.div_ceil(u64::from(lot))),
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// The exponent of the rows that half a tile stands for.
    #[inline(always)]
    pub const fn half_row_bits(&self) -> u32 {
        (ROW_PLACES / 2).ilog2() - self.segment_bits
    }

    /// The exponent of the rows that a group of warps shares.
    #[inline(always)]
    pub const fn group_row_bits(&self) -> u32 {
        ROW_PLACES.ilog2() + self.tile_bits - self.segment_bits
    }

    /// The exponent of the groups in a thread block.
    #[inline(always)]
    pub const fn group_bits(&self) -> u32 {
        (WEIGHTS_THREADS / WARP).ilog2() - self.split_bits
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.shape.rows.div_ceil(1 << (self.group_bits() + self.group_row_bits())) * self.lots.divisor
    }
}

/// How weights are multiplied by the kernels that copy ahead.
///
/// The rows of a turn are multiplied by the warps of a team, each with steps of its own; a thread block has one team or
/// several. Teams take turns' rows one after the other, the first teams of all thread blocks first, so that thread
/// blocks have as many turns, or one more.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TurnsGrid {
    /// What is multiplied: columns fewer than [`AHEAD_COLUMN_LIMIT`].
    pub shape: WeightsShape,
    /// Lots that the tokens fall to. Each has thread blocks of its own.
    pub lots: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of those of a lot.
    pub lot_bits: u32,
    /// Thread blocks of a lot.
    pub row_blocks: u32,
    /// Turns that each team has, and how many teams have one more: at most [`Ahead::turns`] each.
    pub turns: [u32; 2],
    /// Warps of a thread block.
    pub warps: u32,
    /// The exponent of the warps of a team.
    pub split_bits: u32,
    /// Steps of a row: every so many-th is a warp's.
    pub steps: u32,
}

impl TurnsGrid {
    /// For a kernel, with so many warps of a team and of a thread block, on a GPU that has so many thread blocks at
    /// once; `None` if there is nothing to multiply, or more than a launch can count, or [`AHEAD_COLUMN_LIMIT`], or if
    /// warps are not powers of two or a team has more than a thread block.
    pub fn new(
        kernel: Ahead,
        shape: WeightsShape,
        tokens: u64,
        [splits, warps]: [u32; 2],
        at_once: u32,
    ) -> Option<Self> {
        let teams = splits.is_power_of_two() && warps.is_power_of_two() && splits <= warps;
        if !teams || at_once == 0 || !shape.counts(tokens) || shape.cols >= AHEAD_COLUMN_LIMIT {
            return None;
        }
        let lot = if kernel.one { 1 } else { (tokens as u32).next_power_of_two().min(TOKEN_PLACES) };
        let segment_bits = kernel.segment_bits(lot.ilog2());
        let teams = u64::from(warps / splits);
        let turns = shape.rows.div_ceil(u64::from((kernel.tiles * ROW_PLACES) >> segment_bits));
        if turns >= 1 << 31 {
            return None;
        }
        let waves = turns.div_ceil(u64::from(at_once) * teams * u64::from(kernel.turns()));
        let row_blocks = turns.div_ceil(teams).min(u64::from(at_once) * waves);
        let (each, more) = (turns / (row_blocks * teams), turns % (row_blocks * teams));
        let grid = Self {
            shape,
            lots: Divider::new(tokens.div_ceil(u64::from(lot))),
            tokens: tokens as u32,
            lot_bits: lot.ilog2(),
            row_blocks: row_blocks as u32,
            turns: [each as u32, more as u32],
            warps,
            split_bits: splits.ilog2(),
            // A chunk for each of four lanes, in each segment.
            steps: u32::try_from(shape.cols.div_ceil((u64::from(QUAD) * CHUNK as u64) << segment_bits))
                .ok()?,
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.row_blocks as u64 * self.lots.divisor
    }

    /// Threads in a thread block, and bytes of shared memory for them.
    pub const fn threads_and_shared(&self, kernel: Ahead) -> (u32, u32) {
        (self.warps * WARP, self.warps * kernel.warp_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        let ahead = |cols: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols, blocks: cols / 32 };
            TurnsGrid::new(Ahead { one: true, tiles: 1 }, shape, tokens, [2, 16], 132).is_some()
        };
        assert_eq!([1, 0].map(|tokens| ahead(4096, tokens)), [true, false]);
        let [columns, tokens] = [AHEAD_COLUMN_LIMIT, TOKEN_LIMIT];
        assert_eq!([columns - 128, columns].map(|cols| ahead(cols, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| ahead(4096, tokens)), [true, false]);
        let by_loads = |blocks: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols: blocks * 32, blocks };
            WeightsGrid::new(shape, tokens, 2, 8).is_some()
        };
        assert_eq!([BLOCK_LIMIT - 1, BLOCK_LIMIT].map(|blocks| by_loads(blocks, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| by_loads(128, tokens)), [true, false]);
    }

    #[test]
    fn launches_fit_into_any_gpu() {
        let ahead = |one: bool, tiles| (if one { "one" } else { "lot" }, Ahead { one, tiles });
        let ahead = [ahead(true, 1), ahead(true, 2), ahead(true, 4), ahead(false, 1), ahead(false, 2)];
        // KiB of shared memory that a thread block may have: before one asks, on compute capability 8.6, 8.0 and 9.0.
        let warps = [(48, [8, 4, 4, 4, 2]), (99, [16, 8, 8, 8, 4]), (163, [16, 16, 8, 8, 8]), (227, [16; 5])];
        for (kib, warps) in warps {
            for kernel in KERNELS {
                let within = kernel.within(kib << 10);
                assert!(within.shared <= kib << 10, "{} with {kib} KiB", kernel.name);
                assert!(within == *kernel || kernel.elements == 0 && within.threads >= WARP);
                for ((kind, ahead), warps) in ahead.into_iter().zip(warps) {
                    let [kind, tiles] = [kind, ["tiles1", "tiles2", "tiles4"][ahead.tiles.ilog2() as usize]];
                    if kernel.name.contains(kind) && kernel.name.ends_with(tiles) {
                        assert_eq!(
                            (within.threads, within.shared),
                            (warps * WARP, warps * ahead.warp_bytes())
                        );
                    }
                }
            }
        }
    }
}
