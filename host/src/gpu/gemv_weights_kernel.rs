//! The kernels for weights in four bits times activations in 16, of few tokens at a time.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{
    PIPELINED_COLUMN_LIMIT, Pipelined, PipelinedGrid, TILE_COLUMNS, WEIGHTS_THREADS, WeightsShape,
};

use crate::shape::QuantizedShape;
use microscale_formats::{Format, Words, words};

/// A kernel for weights times activations, and how it is launched. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvWeightsKernel {
    pub(super) kind: Kind,
    /// Tiles of a warp, of 16 tile rows each. With fewer than eight tokens, several tile rows are parts of
    /// one row.
    pub(super) tiles: u32,
    /// Slices of K: warps that share rows, each with a part of their columns (sliced-K).
    pub(super) slices: u32,
}

/// A kernel's tokens, and its mainloop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One token at a time, pipelined.
    M1,
    /// Up to eight tokens at a time, pipelined.
    M8,
    /// Up to 16 tokens at a time, pipelined.
    M16,
    /// Up to 32 tokens at a time, pipelined.
    M32,
    /// Up to eight tokens at a time, by plain loads to registers. Takes rows of any whole chunks.
    Unpipelined,
}

/// Lists kernels by word: kind, tiles and slices, as in `m8-2x4`.
macro_rules! kernels {
    ($($word:literal $kind:ident { $($tiles:literal: $($slices:literal)+;)+ })+) => {
        &[$($($((
            concat!($word, "-", $tiles, "x", $slices),
            Self { kind: Kind::$kind, tiles: $tiles, slices: $slices },
        ),)+)+)+]
    };
}

impl Words for GemvWeightsKernel {
    const WHAT: &'static str = "kernel";

    const WORDS: &'static [(&'static str, Self)] = kernels! {
        "m1" M1 { 1: 1 2 4 8 16; 2: 1 2 4 8 16; 4: 1 2 4 8 16; }
        "m8" M8 { 1: 1 2 4 8 16; 2: 1 2 4 8 16; }
        "m16" M16 { 1: 2 4 8 16; }
        "m32" M32 { 2: 2 4 8; }
        "unpipelined" Unpipelined { 1: 1 2 4 8; 2: 1 2 4 8; }
    };
}

words!(GemvWeightsKernel);

/// The shape of weights as kernels are told it.
pub(super) fn weights_shape(weights: QuantizedShape) -> WeightsShape {
    let [rows, cols, blocks] =
        [weights.rows, weights.cols, weights.blocks_per_row()].map(|count| count as u64);
    WeightsShape { rows, cols, blocks }
}

impl GemvWeightsKernel {
    pub(super) const OTHERWISE: Self = Self { kind: Kind::Unpipelined, tiles: 1, slices: 8 };

    /// All kernels.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::WORDS.iter().map(|(_, kernel)| *kernel)
    }

    /// The kernel that multiplies weights of a shape when this one is asked for. Pipelined kernels copy whole
    /// chunks and whole words of scales, and have a limit of columns; an unpipelined one takes other weights. Words are a row's, or of
    /// MXFP4, for one token, all rows'.
    pub(super) fn on(self, shape: QuantizedShape) -> Self {
        let rows = match (self.kind, shape.format) {
            (Kind::M1, Format::Mxfp4) => shape.rows,
            _ => 1,
        };
        let whole = shape.cols.is_multiple_of(CHUNK) && (rows * shape.blocks_per_row()).is_multiple_of(4);
        if self.kind == Kind::Unpipelined || whole && (shape.cols as u64) < PIPELINED_COLUMN_LIMIT {
            return self;
        }
        Self {
            kind: Kind::Unpipelined,
            tiles: self.tiles.min(2),
            slices: self.slices.min(WEIGHTS_THREADS / WARP),
        }
    }

    /// The pipelined kernel that it is, if it is one.
    pub(super) fn pipelined(self) -> Option<Pipelined> {
        let tokens = match self.kind {
            Kind::M1 => 1,
            Kind::M8 => 8,
            Kind::M16 => 16,
            Kind::M32 => 32,
            Kind::Unpipelined => return None,
        };
        Some(Pipelined { tokens, tiles: self.tiles })
    }

    /// The tokens that it multiplies with at a time where it can.
    pub fn tokens(self) -> usize {
        self.pipelined().map_or(TILE_COLUMNS, |pipelined| pipelined.tokens) as usize
    }

    /// Returns whether it may be the fastest for so many tokens, more than eight: it takes more than eight at a time, and at most
    /// three of its token tiles have them.
    pub(super) fn is_for_more_than_eight(self, tokens: usize) -> bool {
        let eight = TILE_COLUMNS as usize;
        tokens > eight && self.tokens() > eight && tokens <= 3 * self.tokens()
    }

    /// About how long an H200 takes for more than eight tokens and weights of a shape; none if it is for others. All figures are
    /// fitted to the times of [`GemmTimes`](super::GemmTimes).
    pub(super) fn microseconds(self, weights: QuantizedShape, tokens: usize) -> Option<f64> {
        const MULTIPROCESSORS: u32 = 132;
        let is_for = self.is_for_more_than_eight(tokens) && self.on(weights) == self;
        let pipelined = self.pipelined().filter(|_| is_for)?;
        let (launch, wave, k_iteration) = match self.kind {
            Kind::M16 => (0.9, 3.9, 1.02),
            Kind::M32 => (1.4, 5.7, 1.18),
            _ => return None,
        };
        let slices_and_warps = [self.slices, pipelined.warps()];
        let shape = weights_shape(weights);
        let grid = PipelinedGrid::new(pipelined, shape, tokens as u64, slices_and_warps, MULTIPROCESSORS)?;
        let waves = grid.thread_blocks().div_ceil(u64::from(MULTIPROCESSORS)) as f64;
        let k_iterations = f64::from(grid.k_iterations.div_ceil(self.slices));
        Some(launch + waves * (wave + k_iterations * k_iteration))
    }

    /// Returns whether weights of a shape are multiplied with one token at a time.
    pub fn takes_one_token(self, shape: QuantizedShape) -> bool {
        self.on(shape).kind == Kind::M1
    }
}
