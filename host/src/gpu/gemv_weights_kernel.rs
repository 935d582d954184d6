//! The kernels for weights in four bits times activations in 16.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{PIPELINED_COLUMN_LIMIT, WEIGHTS_THREADS};

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
        "unpipelined" Unpipelined { 1: 1 2 4 8; 2: 1 2 4 8; }
    };
}

words!(GemvWeightsKernel);

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

    /// Returns whether it multiplies with one token at a time where it can.
    pub fn is_for_one_token(self) -> bool {
        self.kind == Kind::M1
    }

    /// Returns whether weights of a shape are multiplied with one token at a time.
    pub fn takes_one_token(self, shape: QuantizedShape) -> bool {
        self.on(shape).kind == Kind::M1
    }
}
