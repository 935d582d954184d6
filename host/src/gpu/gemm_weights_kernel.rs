//! The kernels for weights in four bits times activations of many tokens, and the memory that they work in.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use microscale_formats::{Words, words};
use microscale_kernels_abi::Target;
use microscale_kernels_abi::gemm::{COUNTERS, Edition, TokenTile};
use microscale_kernels_abi::gemm_grids::GemmGrid;

use super::driver::doing;
use super::gemv_weights_kernel::GemvWeightsKernel;
use crate::error::Result;

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
        "wgmma-n256" Wgmma N256;
    };
}

words!(GemmWeightsKernel);

impl GemmWeightsKernel {
    /// The kernels of a target.
    pub(super) fn of(target: &Target) -> impl Iterator<Item = Self> {
        let all = Self::WORDS.iter().map(|(_, kernel)| *kernel);
        all.filter(|kernel| kernel.edition == Edition::Mma || target.wgmma)
    }

    /// The kernel of a target that should take the shortest for a product, given its grid with each kernel before thread blocks are
    /// [in pairs](Self::in_pairs_if_faster); none if no kernel has one, or if a kernel for few tokens at a time should take fewer microseconds,
    /// where one is given with them.
    pub(super) fn choose(
        (target, multiprocessors): (&Target, u32),
        grid: impl Fn(Self) -> Option<GemmGrid>,
        few: Option<(GemvWeightsKernel, f64)>,
    ) -> Option<Self> {
        let edition = if target.wgmma { Edition::Wgmma } else { Edition::Mma };
        let kernels = Self::of(target).filter(|kernel| kernel.edition == edition);
        let microseconds = |kernel: Self| {
            let grid = kernel.in_pairs_if_faster(grid(kernel)?, multiprocessors);
            Some((kernel, kernel.microseconds(&grid)))
        };
        let with_times = kernels.filter_map(microseconds);
        let (kernel, microseconds) = with_times.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        few.is_none_or(|(_, of_few)| microseconds <= of_few).then_some(kernel)
    }

    /// The grid, or the one in pairs where that should take less, on a GPU with so many multiprocessors.
    pub(super) fn in_pairs_if_faster(self, grid: GemmGrid, multiprocessors: u32) -> GemmGrid {
        let Some(paired) = grid.in_pairs((self.edition, self.tile), multiprocessors / 2) else { return grid };
        let more = paired.most_k_iterations() as f64 - grid.most_k_iterations() as f64;
        let images = f64::from(self.edition.images(self.tile));
        let more = more * images * self.image_microseconds(grid.tokens.min(self.tile.tokens()));
        if more < self.pairs_save(paired.most_sharers()) { paired } else { grid }
    }

    /// About how many microseconds an H200 takes less for the sums if thread blocks are in pairs, so many for each work tile.
    fn pairs_save(self, sharers: u64) -> f64 {
        match (self.tile, sharers) {
            (TokenTile::N32, 2) => 2.0,
            (TokenTile::N32, 5..) => 0.2,
            (TokenTile::N64, 2) => 4.5,
            (TokenTile::N64, 5..) => 1.5,
            (TokenTile::N128, 3 | 4) => 0.8,
            (TokenTile::N128, _) => 2.1,
            _ => 0.0,
        }
    }

    /// About how long an H200 takes. Other GPUs take longer, for each part about as much. All figures are fitted to the times of
    /// [`GemmTimes`](super::GemmTimes).
    fn microseconds(self, grid: &GemmGrid) -> f64 {
        let of_tile = self.tile.tokens();
        let [whole, rest] = [grid.tokens / of_tile, grid.tokens % of_tile].map(f64::from);
        // The last token tile may have fewer tokens; a thread block has some of all.
        let of_rest = if rest == 0.0 { 0.0 } else { self.image_microseconds(rest as u32) };
        let image =
            (whole * self.image_microseconds(of_tile) + of_rest) / f64::from(grid.tokens.div_ceil(of_tile));
        let images = f64::from(self.edition.images(self.tile));
        let sharers = grid.most_sharers();
        let (results, sharer) = self.epilogue_microseconds();
        let shared = if sharers > 1 { sharers as f64 * sharer } else { 0.0 };
        // The smallest product takes as long.
        let launches = match self.edition {
            Edition::Mma => 7.0,
            Edition::Wgmma => 4.9,
        };
        let k_iterations = grid.most_k_iterations() as f64 * images * image;
        let saved = if grid.schedule.paired == 0 { 0.0 } else { self.pairs_save(sharers) };
        launches + k_iterations + grid.most_work_tiles() as f64 * results + shared - saved
    }

    /// About how many microseconds an H200 takes for an image of so many tokens' activations.
    pub(super) fn image_microseconds(self, tokens: u32) -> f64 {
        match (self.edition, self.tile, self.tile.multiplied(tokens)) {
            (Edition::Wgmma, TokenTile::N16, _) => 0.74,
            (Edition::Wgmma, TokenTile::N32, _) => 0.8,
            (Edition::Wgmma, TokenTile::N64, _) => 0.99,
            (Edition::Wgmma, TokenTile::N128, _) => 0.78,
            (Edition::Wgmma, TokenTile::N256, ..=96) => 0.7,
            (Edition::Wgmma, TokenTile::N256, ..=128) => 0.84,
            (Edition::Wgmma, TokenTile::N256, ..=160) => 1.0,
            (Edition::Wgmma, TokenTile::N256, ..=192) => 1.16,
            (Edition::Wgmma, TokenTile::N256, _) => 1.49,
            (Edition::Mma, TokenTile::N16, _) => 1.13,
            (Edition::Mma, TokenTile::N32, _) => 1.38,
            (Edition::Mma, ..) => 1.86,
        }
    }

    /// About how many microseconds an H200 takes for a work tile's results, more than the smallest kernel, and for adding up what one of
    /// several thread blocks has of it.
    fn epilogue_microseconds(self) -> (f64, f64) {
        match (self.edition, self.tile) {
            (Edition::Wgmma, TokenTile::N16) => (2.4, 0.16),
            (Edition::Wgmma, TokenTile::N32) => (3.4, 0.12),
            (Edition::Wgmma, TokenTile::N64) => (4.2, 0.42),
            (Edition::Wgmma, TokenTile::N128) => (2.9, 0.5),
            (Edition::Wgmma, TokenTile::N256) => (6.2, 1.1),
            (Edition::Mma, TokenTile::N16) => (0.0, 0.21),
            (Edition::Mma, TokenTile::N32) => (1.2, 0.5),
            (Edition::Mma, _) => (2.2, 0.42),
        }
    }
}

/// Device memory that [`Gpu::gemm_weights_on`](super::Gpu::gemm_weights_on) works in. It serves one product after the other, not two at once.
/// Memory that is somebody else's does as well: [`GemmWorkspaceMut`](super::GemmWorkspaceMut).
#[derive(Debug)]
pub struct GemmWorkspace {
    pub(super) counters: CudaSlice<u32>,
    pub(super) memory: CudaSlice<u8>,
}

impl GemmWorkspace {
    /// Room for so many bytes.
    pub(super) fn new(stream: &Arc<CudaStream>, bytes: usize) -> Result<Self> {
        let allocating = doing("allocating a workspace");
        Ok(Self {
            counters: stream.alloc_zeros(COUNTERS as usize).map_err(&allocating)?,
            memory: stream.alloc_zeros(bytes.max(1)).map_err(&allocating)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_kernels_abi::target_for;
    use microscale_kernels_abi::weights::WeightsShape;

    fn chosen(capability: (u32, u32), rows: u64, cols: u64, tokens: u64) -> Option<&'static str> {
        let target = target_for(capability).unwrap();
        let shape = WeightsShape { rows, cols, blocks: cols.div_ceil(16) };
        let grid = |kernel: GemmWeightsKernel| {
            let GemmWeightsKernel { edition, tile } = kernel;
            GemmGrid::new((edition, tile), shape, tokens, 132, edition.shared_bytes(tile, 227 << 10))
        };
        GemmWeightsKernel::choose((target, 132), grid, None).map(|kernel| kernel.word())
    }

    #[test]
    fn kernels_are_of_the_target() {
        assert_eq!(chosen((9, 0), 8192, 28672, 16), Some("wgmma-n16"));
        assert_eq!(chosen((8, 0), 8192, 28672, 16), Some("mma-n16"));
        assert_eq!(chosen((9, 0), 8192, 28672, 0), None);
    }
}
