//! Sizes of executed products of weights and activations, with kinds of weights and activations.

use microscale_test_support::operands::Scales;
use microscale_test_support::weights::Activations as X;

use super::weights::Weights::{self, Beyond, Cancelling, Edges, Of, Ordered, Zeros};

/// Rows, columns, tokens and slices of K for the unpipelined kernels.
///
/// The cases cover one and several k-iterations, rows that end within one, fewer k-iterations than
/// slices, rows that do not fill a warp group, partial warp groups and thread blocks, and one and
/// several token tiles.
pub(super) const UNPIPELINED: [(usize, usize, usize, u32, Weights, X); 15] = [
    (1, 32, 1, 1, Of(Scales::Common), X::Common),
    (5, 96, 2, 8, Zeros, X::Common),
    (35, 160, 3, 2, Of(Scales::Common), X::Numbers),
    (20, 1056, 1, 8, Edges, X::Common),
    (17, 4128, 1, 4, Of(Scales::Common), X::Common),
    (38, 1056, 5, 4, Beyond, X::Common),
    (131, 96, 8, 1, Edges, X::Tiny),
    (9, 288, 9, 2, Zeros, X::Numbers),
    (3, 1056, 17, 8, Of(Scales::Common), X::Any),
    (18, 2080, 2, 1, Of(Scales::Numbers), X::Common),
    (33, 1024, 4, 2, Of(Scales::Any), X::Any),
    (270, 32, 8, 1, Of(Scales::Common), X::Common),
    (6, 1024, 5, 2, Cancelling, X::Common),
    (18, 4096, 3, 1, Ordered, X::Common),
    (17, 1568, 10, 4, Ordered, X::Common),
];

/// Cases for one token at a time. NVFP4 gets 64 more columns if they are an odd multiple of 128.
pub(super) const M1: [(usize, usize, usize, u32, Weights, X); 22] = [
    (20, 1216, 2, 4, Of(Scales::Common), X::Common),
    (36, 1056, 1, 2, Edges, X::Common),
    (4, 2080, 3, 8, Zeros, X::Numbers),
    (1, 128, 1, 1, Of(Scales::Common), X::Common),
    (5, 128, 1, 8, Zeros, X::Common),
    (35, 256, 1, 2, Of(Scales::Common), X::Numbers),
    (20, 1152, 1, 8, Edges, X::Common),
    (17, 4224, 1, 4, Of(Scales::Common), X::Common),
    (38, 1024, 2, 4, Beyond, X::Common),
    (131, 384, 1, 1, Edges, X::Tiny),
    (9, 640, 3, 2, Zeros, X::Numbers),
    (3, 1152, 1, 8, Of(Scales::Common), X::Any),
    (18, 2176, 1, 1, Of(Scales::Numbers), X::Common),
    (33, 1024, 1, 2, Of(Scales::Any), X::Any),
    (11, 896, 2, 1, Of(Scales::Largest), X::Numbers),
    (270, 128, 1, 1, Of(Scales::Common), X::Common),
    (6, 1024, 1, 2, Cancelling, X::Common),
    (7, 2048, 1, 8, Of(Scales::Any), X::Tiny),
    (70, 4096, 1, 2, Ordered, X::Common),
    (37, 3712, 2, 1, Ordered, X::Common),
    (5, 4352, 1, 16, Ordered, X::Common),
    (9, 256, 1, 1, Of(Scales::Smallest), X::Large),
];

/// Cases for pipelined token tiles. The rule for columns is the same as for one token.
pub(super) const M8: [(usize, usize, usize, u32, Weights, X); 17] = [
    (1, 128, 1, 1, Of(Scales::Common), X::Common),
    (5, 128, 2, 8, Zeros, X::Common),
    (35, 256, 3, 2, Of(Scales::Common), X::Numbers),
    (20, 1152, 4, 8, Edges, X::Common),
    (17, 2176, 5, 4, Of(Scales::Common), X::Common),
    (38, 1024, 7, 4, Beyond, X::Common),
    (131, 384, 8, 1, Edges, X::Tiny),
    (9, 640, 9, 2, Zeros, X::Numbers),
    (3, 1152, 17, 8, Of(Scales::Common), X::Any),
    (70, 640, 2, 1, Beyond, X::Common),
    (33, 1024, 4, 2, Of(Scales::Any), X::Any),
    (270, 128, 8, 1, Of(Scales::Common), X::Common),
    (6, 1024, 6, 2, Cancelling, X::Common),
    (150, 256, 8, 4, Of(Scales::Numbers), X::Common),
    (18, 4096, 3, 1, Ordered, X::Common),
    (37, 2176, 8, 4, Ordered, X::Common),
    (5, 4224, 8, 16, Ordered, X::Common),
];

/// Cases for pipelined token tiles of 16 and 32. The rule for columns is the same as for one token.
pub(super) const M16_AND_M32: [(usize, usize, usize, u32, Weights, X); 9] = [
    (35, 256, 9, 2, Of(Scales::Common), X::Numbers),
    (70, 1152, 16, 4, Edges, X::Common),
    (5, 2176, 33, 8, Of(Scales::Common), X::Common),
    (131, 384, 12, 1, Beyond, X::Tiny),
    (9, 640, 50, 2, Zeros, X::Numbers),
    (20, 1024, 3, 2, Of(Scales::Any), X::Any),
    (6, 1024, 17, 2, Cancelling, X::Common),
    (18, 4096, 16, 2, Ordered, X::Common),
    (37, 2176, 31, 4, Ordered, X::Common),
];

/// Rows, columns, tokens, and whether activations start directly after a multiple of 16 bytes.
///
/// The cases cover partial groups and chunks, empty streams, and one and several chunks.
pub(super) const RAGGED: [(usize, usize, usize, bool, Weights, X); 11] = [
    (9, 16, 1, false, Of(Scales::Common), X::Common),
    (3, 48, 2, true, Of(Scales::Numbers), X::Numbers),
    (2, 1040, 3, false, Of(Scales::Common), X::Common),
    (5, 24, 1, true, Of(Scales::Common), X::Tiny),
    (10, 100, 2, false, Zeros, X::Common),
    (1, 2100, 1, true, Of(Scales::Common), X::Common),
    (8, 64, 1, true, Of(Scales::Any), X::Any),
    (3, 1, 2, true, Of(Scales::Numbers), X::Common),
    (4, 1056, 1, true, Edges, X::Numbers),
    (2, 1023, 9, false, Of(Scales::Largest), X::Common),
    (4, 1023, 4, false, Cancelling, X::Common),
];

/// Rows, columns, tokens and slices of K of products with an epilogue.
///
/// They cover one token at a time, several tokens, and ragged rows.
pub(super) const WITH_STEPS: [(usize, usize, usize, u32, Weights, X); 3] = [
    (38, 384, 2, 2, Of(Scales::Common), X::Common),
    (70, 256, 9, 4, Beyond, X::Common),
    (12, 128, 5, 1, Of(Scales::Common), X::Numbers),
];
