//! The kernels for weights in four bits times activations of many tokens, and the memory that they work in.

use cudarc::driver::CudaSlice;
use microscale_formats::{Words, words};
use microscale_kernels_abi::Target;
use microscale_kernels_abi::gemm::{Edition, TokenTile};

/// A kernel for weights times activations of many tokens. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmWeightsKernel {
    pub(super) edition: Edition,
    pub(super) tile: TokenTile,
}

/// Lists kernels by word, as in `wgmma-n64`.
macro_rules! kernels {
    ($($word:literal $edition:ident $tile:ident;)+) => {
        &[$(($word, Self { edition: Edition::$edition, tile: TokenTile::$tile }),)+]
    };
}

impl Words for GemmWeightsKernel {
    const WHAT: &'static str = "kernel";

    const WORDS: &'static [(&'static str, Self)] = kernels! {
        "mma-n16" Mma N16;
        "mma-n32" Mma N32;
        "mma-n64" Mma N64;
        "wgmma-n16" Wgmma N16;
        "wgmma-n32" Wgmma N32;
        "wgmma-n64" Wgmma N64;
        "wgmma-n128" Wgmma N128;
    };
}

words!(GemmWeightsKernel);

impl GemmWeightsKernel {
    /// The kernels of a target.
    pub(super) fn of(target: &Target) -> impl Iterator<Item = Self> {
        let all = Self::WORDS.iter().map(|(_, kernel)| *kernel);
        all.filter(|kernel| kernel.edition == Edition::Mma || target.wgmma)
    }

    /// The kernel for so many tokens: by warp groups where there are any, with the smallest token tile that holds all tokens, or
    /// the largest.
    pub(super) fn choose(target: &Target, tokens: usize) -> Self {
        let edition = if target.wgmma { Edition::Wgmma } else { Edition::Mma };
        let mut chosen = Self { edition, tile: TokenTile::N16 };
        for tile in TokenTile::ALL.into_iter().filter(|tile| edition.has(*tile)) {
            chosen.tile = tile;
            if tokens <= tile.tokens() as usize {
                break;
            }
        }
        chosen
    }
}

/// Device memory that [`Gpu::gemm_weights_on`](super::Gpu::gemm_weights_on) works in. It serves one product after the other, not two at once.
#[derive(Debug)]
pub struct GemmWorkspace {
    pub(super) counters: CudaSlice<u32>,
    pub(super) memory: CudaSlice<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_kernels_abi::target_for;

    #[test]
    fn the_smallest_tile_that_holds_all_tokens_is_taken() {
        let chosen = |capability, tokens: [usize; 5]| {
            let target = target_for(capability).unwrap();
            tokens.map(|tokens| GemmWeightsKernel::choose(target, tokens).word())
        };
        let tokens = [9, 17, 64, 65, 4096];
        assert_eq!(
            chosen((9, 0), tokens),
            ["wgmma-n16", "wgmma-n32", "wgmma-n64", "wgmma-n128", "wgmma-n128"]
        );
        assert_eq!(chosen((8, 6), tokens), ["mma-n16", "mma-n32", "mma-n64", "mma-n64", "mma-n64"]);
    }
}
