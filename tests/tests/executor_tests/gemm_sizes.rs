//! Products of many tokens that are executed.

use microscale_test_support::operands::Scales;
use microscale_test_support::weights::Activations as X;

use super::weights::Weights::{self, Beyond, Cancelling, Edges, Far, Of, Zeros};

/// A product of many tokens, and how it is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct GemmCase {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) tokens: usize,
    /// Thread blocks, or clusters that share rows, that the GPU has room for.
    pub(super) thread_blocks: u32,
    /// Stages in shared memory, if that many fit.
    pub(super) stages: u32,
    pub(super) weights: Weights,
    pub(super) activations: X,
}

/// Common numbers.
const CASE: GemmCase = GemmCase {
    rows: 1,
    cols: 64,
    tokens: 1,
    thread_blocks: 1,
    stages: 2,
    weights: Of(Scales::Common),
    activations: X::Common,
};

/// Without clusters that share K-iterations: one work tile and several, whole ones and split ones,
/// by two thread blocks and by many; rows, columns and tokens that end within a tile; fewer
/// K-iterations than stages, and more; more work tiles than their queue has entries.
pub(super) const SINGLE: [GemmCase; 23] = [
    GemmCase { rows: 1, cols: 64, tokens: 1, thread_blocks: 1, stages: 2, ..CASE },
    GemmCase {
        rows: 16,
        cols: 128,
        tokens: 16,
        thread_blocks: 4,
        stages: 3,
        activations: X::Numbers,
        ..CASE
    },
    GemmCase { rows: 300, cols: 128, tokens: 17, thread_blocks: 3, stages: 2, ..CASE },
    GemmCase { rows: 20, cols: 1152, tokens: 5, thread_blocks: 2, stages: 3, weights: Edges, ..CASE },
    GemmCase { rows: 17, cols: 2304, tokens: 7, thread_blocks: 3, stages: 8, weights: Beyond, ..CASE },
    GemmCase {
        rows: 70,
        cols: 640,
        tokens: 40,
        thread_blocks: 5,
        stages: 4,
        weights: Zeros,
        activations: X::Numbers,
    },
    GemmCase { rows: 520, cols: 256, tokens: 16, thread_blocks: 1, stages: 2, ..CASE },
    GemmCase { rows: 600, cols: 512, tokens: 33, thread_blocks: 2, stages: 3, weights: Beyond, ..CASE },
    GemmCase {
        rows: 5,
        cols: 1020,
        tokens: 3,
        thread_blocks: 4,
        stages: 2,
        weights: Of(Scales::Any),
        activations: X::Any,
    },
    GemmCase {
        rows: 33,
        cols: 380,
        tokens: 65,
        thread_blocks: 2,
        stages: 3,
        weights: Of(Scales::Numbers),
        ..CASE
    },
    GemmCase { rows: 40, cols: 1088, tokens: 9, thread_blocks: 7, stages: 5, activations: X::Tiny, ..CASE },
    GemmCase { rows: 6, cols: 1024, tokens: 6, thread_blocks: 2, stages: 3, weights: Cancelling, ..CASE },
    GemmCase { rows: 260, cols: 704, tokens: 130, thread_blocks: 3, stages: 4, ..CASE },
    GemmCase { rows: 250, cols: 2880, tokens: 2, thread_blocks: 2, stages: 6, weights: Zeros, ..CASE },
    GemmCase { rows: 140, cols: 256, tokens: 270, thread_blocks: 3, stages: 3, ..CASE },
    GemmCase { rows: 20, cols: 640, tokens: 100, thread_blocks: 2, stages: 6, ..CASE },
    GemmCase {
        rows: 130,
        cols: 384,
        tokens: 160,
        thread_blocks: 3,
        stages: 4,
        activations: X::Numbers,
        ..CASE
    },
    GemmCase { rows: 10, cols: 700, tokens: 180, thread_blocks: 1, stages: 3, weights: Zeros, ..CASE },
    GemmCase { rows: 40, cols: 256, tokens: 20, thread_blocks: 2, stages: 3, weights: Far, ..CASE },
    GemmCase { rows: 40, cols: 256, tokens: 20, thread_blocks: 2, stages: 3, weights: Far, ..CASE },
    GemmCase { rows: 3, cols: 64, tokens: 290, thread_blocks: 1, stages: 2, ..CASE },
    GemmCase { rows: 9, cols: 1016, tokens: 11, thread_blocks: 2, stages: 8, ..CASE },
    GemmCase {
        rows: 140,
        cols: 376,
        tokens: 55,
        thread_blocks: 3,
        stages: 4,
        activations: X::Numbers,
        ..CASE
    },
];

/// In clusters of two that share K-iterations: a cluster for each work tile and several; work tiles
/// in a row and side by side; tokens of both halves of a token tile, of one of them, and of two
/// token tiles.
pub(super) const CLUSTERS: [GemmCase; 6] = [
    GemmCase { rows: 20, cols: 512, tokens: 16, thread_blocks: 2, stages: 2, ..CASE },
    GemmCase {
        rows: 300,
        cols: 1024,
        tokens: 33,
        thread_blocks: 12,
        stages: 3,
        weights: Beyond,
        activations: X::Numbers,
    },
    GemmCase { rows: 70, cols: 2048, tokens: 64, thread_blocks: 8, stages: 2, weights: Edges, ..CASE },
    GemmCase { rows: 36, cols: 2048, tokens: 70, thread_blocks: 12, stages: 4, weights: Zeros, ..CASE },
    GemmCase { rows: 6, cols: 1024, tokens: 128, thread_blocks: 8, stages: 3, weights: Cancelling, ..CASE },
    GemmCase {
        rows: 140,
        cols: 960,
        tokens: 30,
        thread_blocks: 10,
        stages: 4,
        weights: Of(Scales::Any),
        activations: X::Any,
    },
];

/// Products with an epilogue.
pub(super) const WITH_STEPS: [GemmCase; 3] = [
    GemmCase { rows: 38, cols: 256, tokens: 21, thread_blocks: 2, stages: 2, ..CASE },
    GemmCase { rows: 290, cols: 512, tokens: 70, thread_blocks: 3, stages: 3, weights: Beyond, ..CASE },
    GemmCase {
        rows: 20,
        cols: 384,
        tokens: 150,
        thread_blocks: 2,
        stages: 3,
        activations: X::Numbers,
        ..CASE
    },
];
