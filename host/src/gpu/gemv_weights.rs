//! Weights in four bits times activations in 16, on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::{WARP, WEIGHTS_THREADS, WeightsGrid};

use super::{DeviceTensor, Gpu, doing, launch};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::recipe::Format;
use crate::tensor::{QuantizedShape, QuantizedTensor, Shape};

/// A kernel for weights times activations, and how it is launched. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvWeightsKernel {
    /// Whether it multiplies with one token at a time, not with up to eight. If rows' scales are not multiples of four
    /// bytes, it does not.
    one: bool,
    /// Tiles of 16 places of rows that a warp has: 1 or 2. With fewer than eight tokens, several places are parts of
    /// one row.
    tiles: u32,
    /// Warps that share rows, each with a part of the columns: 1, 2, 4 or 8.
    splits: u32,
}

impl GemvWeightsKernel {
    /// Warps that keep an H200 busy.
    const WARPS: u64 = 1536;
    /// Steps of a warp with two tiles, at least.
    const STEPS: usize = 4;

    /// Every one.
    pub fn all() -> impl Iterator<Item = Self> {
        let tiles = [true, false].into_iter().flat_map(|one| [(one, 1), (one, 2)]);
        tiles.flat_map(|(one, tiles)| [1, 2, 4, 8].map(|splits| Self { one, tiles, splits }))
    }

    /// The one for so many rows, columns and tokens: one token has its own; two tiles a warp, if that leaves enough
    /// warps with a few steps each.
    pub fn choose(rows: usize, cols: usize, tokens: usize) -> Self {
        let one = tokens == 1;
        let busy = |kernel: &Self| {
            let shape = QuantizedShape::new(Format::Nvfp4, rows, cols);
            kernel.grid(shape, tokens).is_none_or(|(_, grid)| {
                let warps = grid.thread_blocks() * u64::from(WEIGHTS_THREADS / WARP);
                let steps = (cols / (4 * CHUNK)) >> (grid.segment_bits + grid.split_bits);
                warps >= Self::WARPS && (kernel.tiles == 1 || steps >= Self::STEPS)
            })
        };
        let of_tiles =
            |tiles| Self::all().filter(move |kernel| kernel.one == one && kernel.tiles == tiles).find(busy);
        of_tiles(2).or_else(|| of_tiles(1)).unwrap_or(Self { one, tiles: 1, splits: 8 })
    }

    /// The kernel's word in its name, and the grid of a launch.
    pub(super) fn grid(self, shape: QuantizedShape, tokens: usize) -> Option<(&'static str, WeightsGrid)> {
        let blocks = shape.blocks_per_row() as u64;
        let [rows, cols, tokens] = [shape.rows, shape.cols, tokens].map(|count| count as u64);
        let one = self.takes_one_token(shape);
        let word = match (one, self.tiles) {
            (true, 1) => "one_tiles1",
            (true, _) => "one_tiles2",
            (false, 1) => "tiles1",
            (false, _) => "tiles2",
        };
        WeightsGrid::new(rows, cols, blocks, tokens, one, self.tiles, self.splits).map(|grid| (word, grid))
    }

    /// Whether it multiplies weights of a shape with one token at a time: it copies whole words of scales, and counts
    /// bytes in 32 bits.
    pub fn takes_one_token(self, shape: QuantizedShape) -> bool {
        self.one && shape.blocks_per_row().is_multiple_of(4) && shape.cols < 1 << 24
    }
}

impl Gpu {
    /// Multiplies host memory, as [`crate::gemv_weights`] does: copies the operands over, multiplies, copies the
    /// result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`crate::gemv_weights`], and [`crate::Error::Gpu`].
    pub fn gemv_weights<T: Activation>(
        &self,
        weights: &QuantizedTensor,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        let results = Shape::new(tokens, rows).elements();
        if results == 0 {
            return Ok(());
        }
        let weights = DeviceTensor::from_host(&self.stream, weights)?;
        let activations = &activations[..tokens * weights.cols()];
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        self.gemv_weights_on(&self.stream, &weights, &activations, tokens, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }

    /// Multiplies weights with activations in device memory, as [`crate::gemv_weights`] does but for the last bits:
    /// enqueues one kernel and returns. Allocates nothing and does not wait. The same operands give the same bits
    /// each time.
    ///
    /// Tensor cores add the products: [`microscale_formats::weights`] says how far results may be from the exact sum.
    /// Results have the CPU's bits, more slowly, where rows are not a multiple of 32 and where activations do not start
    /// on 16 bytes; with several tokens, for rows with MXFP4 scales that leave the activations' dtype no room for its
    /// products; and with one, where a sum is infinite or NaN on the way, as from bf16 activations of 2^24.
    ///
    /// # Errors
    /// Those of [`crate::gemv_weights`], and [`crate::Error::Gpu`].
    pub fn gemv_weights_on<T: Activation>(
        &self,
        stream: &Arc<CudaStream>,
        weights: &DeviceTensor,
        activations: &impl DevicePtr<T>,
        tokens: usize,
        out: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        let kernel = GemvWeightsKernel::choose(weights.rows(), weights.cols(), tokens);
        self.gemv_weights_with(kernel, stream, weights, activations, tokens, out)
    }

    /// [`Self::gemv_weights_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`].
    pub fn gemv_weights_with<T: Activation>(
        &self,
        kernel: GemvWeightsKernel,
        stream: &Arc<CudaStream>,
        weights: &DeviceTensor,
        activations: &impl DevicePtr<T>,
        tokens: usize,
        out: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        launch::gemv_weights(&self.module, stream, kernel, weights, activations, tokens, out)
    }
}
