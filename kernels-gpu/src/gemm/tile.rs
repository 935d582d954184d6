//! The tiles of the GEMM as types: the configuration of each, and a lane's accumulators.

use microscale_formats::{Dtype, Format};
pub(super) use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::Mainloop;
use microscale_kernels_abi::gemm::stage::{ScalePieces, Stage};
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

#[cfg(any(microscale_tcgen05, microscale_wgmma))]
use crate::hardware::cluster;
use crate::hardware::warp;

/// An array of f32 in a lane's registers. Every index must become a constant.
pub(super) trait Array: Copy {
    /// The number of values.
    const LEN: usize;
    /// Zeros.
    const ZEROS: Self;

    /// Value `i`.
    fn get(&self, i: usize) -> f32;

    /// Value `i`, to be changed.
    fn get_mut(&mut self, i: usize) -> &mut f32;
}

impl<const LEN: usize> Array for [f32; LEN] {
    const LEN: usize = LEN;
    const ZEROS: Self = [0.0; LEN];

    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self[i]
    }

    #[inline(always)]
    fn get_mut(&mut self, i: usize) -> &mut f32 {
        &mut self[i]
    }
}

/// A tile in the list of the ABI ([`gemm_tiles`](microscale_kernels_abi::gemm_tiles)).
pub(super) trait Tile {
    /// The configuration, with NVFP4 weights and f16 activations. Tiles are the same for all
    /// operands.
    const CONFIG: GemmConfig;
    /// A lane's accumulators of 16 rows and all tokens.
    type Accumulators: Array;
    /// Half of them: after the exchange in a cluster, or where warp groups share rows.
    type Half: Array;

    /// Tokens per work tile.
    const N: u32 = Self::CONFIG.tile_n;
    /// Rows per work tile.
    const M: u32 = Self::CONFIG.tile_m;
    /// Rows of a work tile that a thread block has.
    const BLOCK_ROWS: u32 = Self::CONFIG.block_rows();
    /// True if the thread blocks of a cluster share a work tile's rows and activations.
    #[cfg(any(microscale_tcgen05, microscale_wgmma))]
    const SHARES_ROWS: bool = Self::CONFIG.row_sharers() > 1;
    /// True if the kernel packs activations itself.
    #[cfg(microscale_wgmma)]
    const PACKS_ACTIVATIONS: bool = Self::CONFIG.packs_activations();
    /// Packs of activations per K-iteration.
    const PACKS: u32 = Self::CONFIG.packs();
    /// Chunks of a row per K-iteration.
    const CHUNKS: u32 = Self::PACKS * QUAD;
    /// True if a thread's sums need the registers of producer warps. With FP8, it has two of each,
    /// and five with `Fp8Block`, whose tiles are too small to need them.
    #[cfg(microscale_wgmma)]
    const MANY_SUMS: bool = Self::Accumulators::LEN << Self::CONFIG.mainloop.takes_fp8() as usize > 64;
    /// The stage for `N` tokens and one piece of scales per row.
    const STAGE: Stage = Self::CONFIG.stage(ScalePieces::ONE);

    /// The number that the schedule gives work to: of the thread block, or of its cluster.
    #[inline(always)]
    fn worker() -> u32 {
        warp::thread_block() / const { Self::CONFIG.row_sharers() }
    }

    /// The thread block's first row in a work tile.
    #[inline(always)]
    fn first_row() -> u32 {
        #[cfg(any(microscale_tcgen05, microscale_wgmma))]
        if Self::SHARES_ROWS {
            return cluster::rank() * Self::BLOCK_ROWS;
        }
        0
    }

    /// Fails to compile unless the ABI lists the configuration and the accumulators have its size.
    const MATCHES_THE_LIST: () = {
        assert!(Self::CONFIG.id().is_some());
        let per_lane = (TILE_ROWS * Self::N / WARP) as usize;
        assert!(Self::Accumulators::LEN == per_lane);
        assert!(Self::Half::LEN * 2 == per_lane);
    };
}

/// Declares the tile types of a mainloop from the list of the ABI: `<name>` is the tile's name
/// there.
macro_rules! declare_tile {
    ($name:ident $mainloop:ident $m:tt $n:tt $cluster:tt) => {
        /// The tile of this name in the list of the ABI.
        #[allow(non_camel_case_types, reason = "named as in the ABI's list")]
        struct $name;

        impl $crate::gemm::tile::Tile for $name {
            const CONFIG: $crate::gemm::tile::GemmConfig =
                $crate::gemm::tile::config(Mainloop::$mainloop, $m, $n, $cluster);
            type Accumulators = [f32; $n / 2];
            type Half = [f32; $n / 4];
        }
    };
}
pub(super) use declare_tile;

/// A configuration with NVFP4 weights and f16 activations.
pub(super) const fn config(mainloop: Mainloop, tile_m: u32, tile_n: u32, cluster: u32) -> GemmConfig {
    let (weights, activations) = (Format::Nvfp4, Dtype::F16);
    GemmConfig { mainloop, tile_m, tile_n, cluster, slices: 1, weights, activations }
}
