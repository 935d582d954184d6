//! The kernels for experts' weights, and their choice.

use microscale_formats::{Words, words};
use microscale_kernels_abi::Target;
use microscale_kernels_abi::gemm::{COLUMNS, Edition, TokenTile};

use super::gemm_weights_kernel::GemmWeightsKernel;
use super::gemv_weights_kernel::{GemvWeightsKernel, Kind};
use crate::shape::QuantizedShape;

/// A kernel for experts' weights times rows of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsKernel {
    /// For up to so many rows of an expert at a time.
    Few(Few),
    /// For many.
    Many(GemmWeightsKernel),
}

/// The most rows of an expert at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Few {
    /// One.
    M1,
    /// Two.
    M2,
    /// Four.
    M4,
    /// Eight.
    M8,
}

impl Few {
    /// The exponent of the number of rows.
    pub(super) fn bits(self) -> u32 {
        self as u32
    }

    /// The kernel that does so.
    pub(super) fn kernel(self) -> GemvWeightsKernel {
        match self {
            Self::M1 => GemvWeightsKernel { kind: Kind::M1, tiles: 2, slices: 8 },
            _ => GemvWeightsKernel { kind: Kind::M8, tiles: 1, slices: 8 },
        }
    }
}

/// The kernels for few rows by word.
const FEW: [(&str, ExpertsKernel); 4] = [
    ("m1", ExpertsKernel::Few(Few::M1)),
    ("m2", ExpertsKernel::Few(Few::M2)),
    ("m4", ExpertsKernel::Few(Few::M4)),
    ("m8", ExpertsKernel::Few(Few::M8)),
];

/// These, and behind them those for many by theirs.
const WORDS: [(&str, ExpertsKernel); FEW.len() + GemmWeightsKernel::WORDS.len()] = {
    let mut all = [FEW[0]; FEW.len() + GemmWeightsKernel::WORDS.len()];
    let mut i = 0;
    while i < all.len() {
        all[i] = if i < FEW.len() {
            FEW[i]
        } else {
            let (word, kernel) = GemmWeightsKernel::WORDS[i - FEW.len()];
            (word, ExpertsKernel::Many(kernel))
        };
        i += 1;
    }
    all
};

impl Words for ExpertsKernel {
    const WHAT: &'static str = "kernel";

    const WORDS: &'static [(&'static str, Self)] = &WORDS;
}

words!(ExpertsKernel);

impl ExpertsKernel {
    /// The kernels of a target.
    pub(super) fn of(target: &Target) -> impl Iterator<Item = Self> {
        let all = Self::WORDS.iter().map(|(_, kernel)| *kernel);
        all.filter(|kernel| match kernel {
            Self::Few(_) => true,
            Self::Many(kernel) => kernel.edition == Edition::Mma || target.wgmma,
        })
    }

    /// The exponent of the rows of a token tile.
    pub(super) fn tile_bits(self) -> u32 {
        match self {
            Self::Few(few) => few.bits(),
            Self::Many(kernel) => kernel.tile.tokens().ilog2(),
        }
    }

    /// The kernel that should take the shortest for so many pairs of a token and one of so many experts, which have about as many each, and
    /// so many rows for each pair. `takes_many` says whether kernels for many rows take the weights.
    pub(super) fn choose(
        target: &Target,
        takes_many: bool,
        weights: QuantizedShape,
        [experts, pairs, of_pair]: [usize; 3],
    ) -> Self {
        let of_expert = of_pair * pairs.div_ceil(experts.min(pairs).max(1));
        // Measured on an H200, for experts of 2880 and 5760 rows: up to 16 pairs go faster one by one, each with its expert's weights, if a
        // pipelined kernel takes these; up to four, if none does.
        let pipelined = Few::M1.kernel().on(weights).kind == Kind::M1;
        if !takes_many || pairs <= if pipelined { 16 } else { 4 } {
            let few = if pipelined { &[Few::M1, Few::M2, Few::M4][..] } else { &[Few::M4] };
            return Self::Few(
                few.iter().copied().find(|few| of_expert <= 1 << few.bits()).unwrap_or(Few::M8),
            );
        }
        let edition = if target.wgmma { Edition::Wgmma } else { Edition::Mma };
        let images = weights.cols.div_ceil(COLUMNS as usize) as f64;
        let microseconds = |tile: TokenTile| {
            let kernel = GemmWeightsKernel { edition, tile };
            // Experts have a few rows more or less.
            let of_expert = of_expert + (of_expert as f64).sqrt() as usize;
            let [whole, rest] = [of_expert / tile.tokens() as usize, of_expert % tile.tokens() as usize];
            let rest = if rest == 0 { 0.0 } else { kernel.image_microseconds(rest as u32) };
            let of_expert = whole as f64 * kernel.image_microseconds(tile.tokens()) + rest;
            let row_tiles = weights.rows.div_ceil(tile.rows() as usize);
            experts.min(pairs) as f64 * of_expert * row_tiles as f64 * images
        };
        let tiles = TokenTile::ALL.into_iter().filter(|tile| edition.has(*tile));
        let fastest = tiles.min_by(|a, b| microseconds(*a).total_cmp(&microseconds(*b)));
        Self::Many(GemmWeightsKernel { edition, tile: fastest.unwrap_or(TokenTile::N16) })
    }
}
