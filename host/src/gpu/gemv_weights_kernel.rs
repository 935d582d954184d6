//! The kernels for weights in four bits times activations in 16.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{PIPELINED_COLUMN_LIMIT, WEIGHTS_THREADS};

use crate::shape::QuantizedShape;
use crate::words::Words;

/// A kernel for weights times activations, and how it is launched. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvWeightsKernel {
    pub(super) kind: Kind,
    /// Tiles of 16 places of rows that a warp has. With fewer than eight tokens, several places are parts of one row.
    pub(super) tiles: u32,
    /// Warps that share rows, each with a part of the columns.
    pub(super) slices: u32,
}

/// What a kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One token at a time, copied ahead.
    M1,
    /// Up to eight tokens at a time, copied ahead.
    M8,
    /// The same by loads: takes rows of any whole chunks.
    Unpipelined,
}

/// Kernels by word: kind, tiles and slices.
macro_rules! kernels {
    ($($word:literal $kind:ident { $($tiles:literal: $($slices:literal)+;)+ })+) => {
        &[$($($((
            concat!($word, "-", $tiles, "x", $slices),
            Self { kind: Kind::$kind, tiles: $tiles, slices: $slices },
        ),)+)+)+]
    };
}

impl Words for GemvWeightsKernel {
    const WORDS: &'static [(&'static str, Self)] = kernels! {
        "m1" M1 { 1: 1 2 4 8 16; 2: 1 2 4 8 16; 4: 1 2 4 8 16; }
        "m8" M8 { 1: 1 2 4 8 16; 2: 1 2 4 8 16; }
        "unpipelined" Unpipelined { 1: 1 2 4 8; 2: 1 2 4 8; }
    };
}

impl GemvWeightsKernel {
    pub(super) const OTHERWISE: Self = Self { kind: Kind::Unpipelined, tiles: 1, slices: 8 };

    /// Every one.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::WORDS.iter().map(|(_, kernel)| *kernel)
    }

    /// The one that multiplies weights of a shape, when this one is asked for: those that copy ahead copy whole chunks
    /// and words of scales, and have a limit of columns.
    pub(super) fn on(self, shape: QuantizedShape) -> Self {
        let whole = shape.cols.is_multiple_of(CHUNK) && shape.blocks_per_row().is_multiple_of(4);
        if self.kind == Kind::Unpipelined || whole && (shape.cols as u64) < PIPELINED_COLUMN_LIMIT {
            return self;
        }
        Self {
            kind: Kind::Unpipelined,
            tiles: self.tiles.min(2),
            slices: self.slices.min(WEIGHTS_THREADS / WARP),
        }
    }

    /// Whether it multiplies with one token at a time where it can.
    pub fn is_for_one_token(self) -> bool {
        self.kind == Kind::M1
    }

    /// Whether weights of a shape are multiplied with one token at a time.
    pub fn takes_one_token(self, shape: QuantizedShape) -> bool {
        self.on(shape).kind == Kind::M1
    }
}
