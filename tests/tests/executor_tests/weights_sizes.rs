//! Sizes of executed products of weights and activations, with kinds of weights and activations.

use std::ops::RangeInclusive;

use microscale_kernels_abi::{GemmConfig, Mainloop};
use microscale_test_support::operands::Scales;
use microscale_test_support::weights::Activations as X;

use super::weights::Weights::{self, Beyond, Cancelling, Edges, Of, Ordered, Zeros};

/// A product of few tokens, and how it is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct GemvCase {
    pub(super) rows: usize,
    /// Columns. The GEMV that copies ahead has 64 more in NVFP4 if they are an odd number of 128: whole words
    /// of scales.
    pub(super) cols: usize,
    pub(super) tokens: usize,
    /// Slices of K.
    pub(super) slices: u32,
    /// Activations start one element after a multiple of 16 bytes.
    pub(super) unaligned: bool,
    pub(super) weights: Weights,
    pub(super) activations: X,
}

/// One row of common numbers.
const CASE: GemvCase = GemvCase {
    rows: 1,
    cols: 32,
    tokens: 1,
    slices: 1,
    unaligned: false,
    weights: Of(Scales::Common),
    activations: X::Common,
};

/// Cases, and the configurations that execute them.
pub(super) struct GemvCases {
    pub(super) are_for: fn(GemmConfig) -> bool,
    pub(super) cases: &'static [GemvCase],
}

/// The cases of every configuration of the GEMV.
pub(super) const GEMV: [GemvCases; 5] = [
    GemvCases { are_for: |config| config.mainloop == Mainloop::GemvPlain, cases: &PLAIN },
    GemvCases { are_for: |config| copies_ahead(config, 1..=1), cases: &ONE_TOKEN },
    GemvCases { are_for: |config| copies_ahead(config, 2..=8), cases: &EIGHT_TOKENS },
    GemvCases { are_for: |config| copies_ahead(config, 9..=u32::MAX), cases: &MORE_TOKENS },
    GemvCases { are_for: |config| config.mainloop == Mainloop::GemvRagged, cases: &RAGGED },
];

fn copies_ahead(config: GemmConfig, tile_n: RangeInclusive<u32>) -> bool {
    config.mainloop == Mainloop::Gemv && tile_n.contains(&config.tile_n)
}

/// One K-iteration and several, rows that end within one, fewer K-iterations than slices; rows that do not
/// fill a warp group; warp groups and thread blocks in part; one token tile and several.
const PLAIN: [GemvCase; 15] = [
    GemvCase { rows: 1, cols: 32, tokens: 1, ..CASE },
    GemvCase { rows: 5, cols: 96, tokens: 2, slices: 8, weights: Zeros, ..CASE },
    GemvCase { rows: 35, cols: 160, tokens: 3, slices: 2, activations: X::Numbers, ..CASE },
    GemvCase { rows: 20, cols: 1056, tokens: 1, slices: 8, weights: Edges, ..CASE },
    GemvCase { rows: 17, cols: 4128, tokens: 1, slices: 4, ..CASE },
    GemvCase { rows: 38, cols: 1056, tokens: 5, slices: 4, weights: Beyond, ..CASE },
    GemvCase { rows: 131, cols: 96, tokens: 8, weights: Edges, activations: X::Tiny, ..CASE },
    GemvCase { rows: 9, cols: 288, tokens: 9, slices: 2, weights: Zeros, activations: X::Numbers, ..CASE },
    GemvCase { rows: 3, cols: 1056, tokens: 17, slices: 8, activations: X::Any, ..CASE },
    GemvCase { rows: 18, cols: 2080, tokens: 2, weights: Of(Scales::Numbers), ..CASE },
    GemvCase {
        rows: 33,
        cols: 1024,
        tokens: 4,
        slices: 2,
        weights: Of(Scales::Any),
        activations: X::Any,
        ..CASE
    },
    GemvCase { rows: 270, cols: 32, tokens: 8, ..CASE },
    GemvCase { rows: 6, cols: 1024, tokens: 5, slices: 2, weights: Cancelling, ..CASE },
    GemvCase { rows: 18, cols: 4096, tokens: 3, weights: Ordered, ..CASE },
    GemvCase { rows: 17, cols: 1568, tokens: 10, slices: 4, weights: Ordered, ..CASE },
];

/// One token at a time.
const ONE_TOKEN: [GemvCase; 22] = [
    GemvCase { rows: 20, cols: 1216, tokens: 2, slices: 4, ..CASE },
    GemvCase { rows: 36, cols: 1056, tokens: 1, slices: 2, weights: Edges, ..CASE },
    GemvCase { rows: 4, cols: 2080, tokens: 3, slices: 8, weights: Zeros, activations: X::Numbers, ..CASE },
    GemvCase { rows: 1, cols: 128, tokens: 1, ..CASE },
    GemvCase { rows: 5, cols: 128, tokens: 1, slices: 8, weights: Zeros, ..CASE },
    GemvCase { rows: 35, cols: 256, tokens: 1, slices: 2, activations: X::Numbers, ..CASE },
    GemvCase { rows: 20, cols: 1152, tokens: 1, slices: 8, weights: Edges, ..CASE },
    GemvCase { rows: 17, cols: 4224, tokens: 1, slices: 4, ..CASE },
    GemvCase { rows: 38, cols: 1024, tokens: 2, slices: 4, weights: Beyond, ..CASE },
    GemvCase { rows: 131, cols: 384, tokens: 1, weights: Edges, activations: X::Tiny, ..CASE },
    GemvCase { rows: 9, cols: 640, tokens: 3, slices: 2, weights: Zeros, activations: X::Numbers, ..CASE },
    GemvCase { rows: 3, cols: 1152, tokens: 1, slices: 8, activations: X::Any, ..CASE },
    GemvCase { rows: 18, cols: 2176, tokens: 1, weights: Of(Scales::Numbers), ..CASE },
    GemvCase {
        rows: 33,
        cols: 1024,
        tokens: 1,
        slices: 2,
        weights: Of(Scales::Any),
        activations: X::Any,
        ..CASE
    },
    GemvCase {
        rows: 11,
        cols: 896,
        tokens: 2,
        weights: Of(Scales::Largest),
        activations: X::Numbers,
        ..CASE
    },
    GemvCase { rows: 270, cols: 128, tokens: 1, ..CASE },
    GemvCase { rows: 6, cols: 1024, tokens: 1, slices: 2, weights: Cancelling, ..CASE },
    GemvCase {
        rows: 7,
        cols: 2048,
        tokens: 1,
        slices: 8,
        weights: Of(Scales::Any),
        activations: X::Tiny,
        ..CASE
    },
    GemvCase { rows: 70, cols: 4096, tokens: 1, slices: 2, weights: Ordered, ..CASE },
    GemvCase { rows: 37, cols: 3712, tokens: 2, weights: Ordered, ..CASE },
    GemvCase { rows: 5, cols: 4352, tokens: 1, slices: 16, weights: Ordered, ..CASE },
    GemvCase { rows: 9, cols: 256, tokens: 1, weights: Of(Scales::Smallest), activations: X::Large, ..CASE },
];

/// Token tiles of up to eight.
const EIGHT_TOKENS: [GemvCase; 17] = [
    GemvCase { rows: 1, cols: 128, tokens: 1, ..CASE },
    GemvCase { rows: 5, cols: 128, tokens: 2, slices: 8, weights: Zeros, ..CASE },
    GemvCase { rows: 35, cols: 256, tokens: 3, slices: 2, activations: X::Numbers, ..CASE },
    GemvCase { rows: 20, cols: 1152, tokens: 4, slices: 8, weights: Edges, ..CASE },
    GemvCase { rows: 17, cols: 2176, tokens: 5, slices: 4, ..CASE },
    GemvCase { rows: 38, cols: 1024, tokens: 7, slices: 4, weights: Beyond, ..CASE },
    GemvCase { rows: 131, cols: 384, tokens: 8, weights: Edges, activations: X::Tiny, ..CASE },
    GemvCase { rows: 9, cols: 640, tokens: 9, slices: 2, weights: Zeros, activations: X::Numbers, ..CASE },
    GemvCase { rows: 3, cols: 1152, tokens: 17, slices: 8, activations: X::Any, ..CASE },
    GemvCase { rows: 70, cols: 640, tokens: 2, weights: Beyond, ..CASE },
    GemvCase {
        rows: 33,
        cols: 1024,
        tokens: 4,
        slices: 2,
        weights: Of(Scales::Any),
        activations: X::Any,
        ..CASE
    },
    GemvCase { rows: 270, cols: 128, tokens: 8, ..CASE },
    GemvCase { rows: 6, cols: 1024, tokens: 6, slices: 2, weights: Cancelling, ..CASE },
    GemvCase { rows: 150, cols: 256, tokens: 8, slices: 4, weights: Of(Scales::Numbers), ..CASE },
    GemvCase { rows: 18, cols: 4096, tokens: 3, weights: Ordered, ..CASE },
    GemvCase { rows: 37, cols: 2176, tokens: 8, slices: 4, weights: Ordered, ..CASE },
    GemvCase { rows: 5, cols: 4224, tokens: 8, slices: 16, weights: Ordered, ..CASE },
];

/// Token tiles of 16 and of 32.
const MORE_TOKENS: [GemvCase; 9] = [
    GemvCase { rows: 35, cols: 256, tokens: 9, slices: 2, activations: X::Numbers, ..CASE },
    GemvCase { rows: 70, cols: 1152, tokens: 16, slices: 4, weights: Edges, ..CASE },
    GemvCase { rows: 5, cols: 2176, tokens: 33, slices: 8, ..CASE },
    GemvCase { rows: 131, cols: 384, tokens: 12, weights: Beyond, activations: X::Tiny, ..CASE },
    GemvCase { rows: 9, cols: 640, tokens: 50, slices: 2, weights: Zeros, activations: X::Numbers, ..CASE },
    GemvCase {
        rows: 20,
        cols: 1024,
        tokens: 3,
        slices: 2,
        weights: Of(Scales::Any),
        activations: X::Any,
        ..CASE
    },
    GemvCase { rows: 6, cols: 1024, tokens: 17, slices: 2, weights: Cancelling, ..CASE },
    GemvCase { rows: 18, cols: 4096, tokens: 16, slices: 2, weights: Ordered, ..CASE },
    GemvCase { rows: 37, cols: 2176, tokens: 31, slices: 4, weights: Ordered, ..CASE },
];

/// Groups and chunks in part, streams with nothing, one chunk and several.
const RAGGED: [GemvCase; 12] = [
    GemvCase { rows: 9, cols: 16, tokens: 1, ..CASE },
    GemvCase {
        rows: 3,
        cols: 48,
        tokens: 2,
        unaligned: true,
        weights: Of(Scales::Numbers),
        activations: X::Numbers,
        ..CASE
    },
    GemvCase { rows: 2, cols: 1040, tokens: 3, ..CASE },
    GemvCase { rows: 9, cols: 0, tokens: 2, ..CASE },
    GemvCase { rows: 5, cols: 24, tokens: 1, unaligned: true, activations: X::Tiny, ..CASE },
    GemvCase { rows: 10, cols: 100, tokens: 2, weights: Zeros, ..CASE },
    GemvCase { rows: 1, cols: 2100, tokens: 1, unaligned: true, ..CASE },
    GemvCase {
        rows: 8,
        cols: 64,
        tokens: 1,
        unaligned: true,
        weights: Of(Scales::Any),
        activations: X::Any,
        ..CASE
    },
    GemvCase { rows: 3, cols: 1, tokens: 2, unaligned: true, weights: Of(Scales::Numbers), ..CASE },
    GemvCase {
        rows: 4,
        cols: 1056,
        tokens: 1,
        unaligned: true,
        weights: Edges,
        activations: X::Numbers,
        ..CASE
    },
    GemvCase { rows: 2, cols: 1023, tokens: 9, weights: Of(Scales::Largest), ..CASE },
    GemvCase { rows: 4, cols: 1023, tokens: 4, weights: Cancelling, ..CASE },
];

/// Products with an epilogue: of one token at a time, of several, and of ragged rows. Only the GEMV
/// for ragged rows takes weights without columns.
pub(super) const WITH_STEPS: [GemvCase; 4] = [
    GemvCase { rows: 38, cols: 384, tokens: 2, slices: 2, ..CASE },
    GemvCase { rows: 70, cols: 256, tokens: 9, slices: 4, weights: Beyond, ..CASE },
    GemvCase { rows: 12, cols: 128, tokens: 5, activations: X::Numbers, ..CASE },
    GemvCase { rows: 12, cols: 0, tokens: 5, ..CASE },
];
