//! The kernels for weights in four bits times activations in 16.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{AHEAD_COLUMN_LIMIT, WEIGHTS_THREADS};

use crate::shape::QuantizedShape;
use crate::words::Words;

/// A kernel for weights times activations, and how it is launched. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvWeightsKernel {
    pub(super) kind: Kind,
    /// Tiles of 16 places of rows that a warp has. With fewer than eight tokens, several places are parts of
    /// one row.
    pub(super) tiles: u32,
    /// Warps that share rows, each with a part of the columns.
    pub(super) splits: u32,
}

/// The kind of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One token at a time, copied ahead.
    One,
    /// Up to eight tokens at a time, copied ahead.
    Lot,
    /// The same by loads: takes rows of any whole chunks.
    Many,
}

/// Kernels by word: kind, tiles and splits.
macro_rules! kernels {
    ($($word:literal $kind:ident { $($tiles:literal: $($splits:literal)+;)+ })+) => {
        &[$($($((
            concat!($word, "-", $tiles, "x", $splits),
            Self { kind: Kind::$kind, tiles: $tiles, splits: $splits },
        ),)+)+)+]
    };
}

impl Words for GemvWeightsKernel {
    const WORDS: &'static [(&'static str, Self)] = kernels! {
        "one" One { 1: 1 2 4 8 16; 2: 1 2 4 8 16; 4: 1 2 4 8 16; }
        "lot" Lot { 1: 1 2 4 8 16; 2: 1 2 4 8 16; }
        "many" Many { 1: 1 2 4 8; 2: 1 2 4 8; }
    };
}

impl GemvWeightsKernel {
    pub(super) const OTHERWISE: Self = Self { kind: Kind::Many, tiles: 1, splits: 8 };

    /// Every one.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::WORDS.iter().map(|(_, kernel)| *kernel)
    }

    /// The kernel that multiplies weights of a shape, when this one is asked for: those that copy ahead copy
    /// whole chunks and four scale bytes at a time, and have a limit of columns.
    pub(super) fn on(self, shape: QuantizedShape) -> Self {
        let whole = shape.cols.is_multiple_of(CHUNK) && shape.blocks_per_row().is_multiple_of(4);
        if self.kind == Kind::Many || whole && (shape.cols as u64) < AHEAD_COLUMN_LIMIT {
            return self;
        }
        Self { kind: Kind::Many, tiles: self.tiles.min(2), splits: self.splits.min(WEIGHTS_THREADS / WARP) }
    }

    /// Returns whether it multiplies with one token at a time where it can.
    pub fn is_for_one_token(self) -> bool {
        self.kind == Kind::One
    }

    /// Returns whether weights of a shape are multiplied with one token at a time.
    pub fn takes_one_token(self, shape: QuantizedShape) -> bool {
        self.on(shape).kind == Kind::One
    }
}
