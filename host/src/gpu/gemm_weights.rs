//! Products of weights in four bits and activations in 16 of many tokens, on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use microscale_formats::{Words, words};
use microscale_kernels_abi::Target;
use microscale_kernels_abi::gemm::{COUNTERS, Edition, TokenTile};

use super::driver::doing;
use super::handle::Gpu;
use super::launch;
use super::tensor::DeviceTensor;
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

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

/// Device memory that [`Gpu::gemm_weights_on`] works in. It serves one product after the other, not two at once.
#[derive(Debug)]
pub struct GemmWorkspace {
    pub(super) counters: CudaSlice<u32>,
    pub(super) memory: CudaSlice<u8>,
}

impl Gpu {
    /// Makes a workspace for products of weights of a shape with as many tokens as given, and with fewer.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] when memory is short.
    pub fn gemm_workspace(
        &self,
        stream: &Arc<CudaStream>,
        weights: QuantizedShape,
        tokens: usize,
    ) -> Result<GemmWorkspace> {
        let bytes = launch::gemm_workspace(&self.kernels, weights, tokens)?;
        let allocating = doing("allocating a workspace");
        Ok(GemmWorkspace {
            counters: stream.alloc_zeros(COUNTERS as usize).map_err(&allocating)?,
            memory: stream.alloc_zeros(bytes.max(1)).map_err(&allocating)?,
        })
    }

    /// Multiplies host memory, as [`crate::gemv_weights`] does but for the last bits: copies the operands over, multiplies,
    /// copies the result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_on`].
    pub fn gemm_weights<'a, T: Activation>(
        &self,
        weights: impl Into<QuantizedView<'a>>,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let weights = weights.into();
        let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        let results = Shape::new(tokens, rows).elements();
        if results == 0 {
            return Ok(());
        }
        let mut workspace = self.gemm_workspace(&self.stream, weights.shape(), tokens)?;
        let weights = DeviceTensor::from_host(&self.stream, weights)?;
        // There are no empty buffers.
        let nothing = [T::default()];
        let activations =
            if weights.cols() == 0 { &nothing } else { &activations[..tokens * weights.cols()] };
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        self.gemm_weights_on(&self.stream, &weights, &activations, tokens, &mut workspace, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }

    /// Multiplies weights with activations of any number of tokens in device memory: `out[n, m] = Σₖ weights[m, k] ·
    /// activations[n, k]`. Enqueues one kernel that arranges the activations and one that multiplies, and returns. Allocates
    /// nothing and does not wait. The same operands give the same bits each time, on the same GPU.
    ///
    /// `weights` is `[M, K]`, with linear scales; `activations` is `[N, K]` and `out` `[N, M]`, without gaps. Tensor cores
    /// add the products: [`microscale_formats::weights`] says how far results may be from the exact sum.
    ///
    /// Up to eight tokens are [`Self::gemv_weights_on`]'s; so are NVFP4 weights whose rows have a number of scales that is not
    /// a multiple of four, eight tokens at a time. Rows with MXFP4 scales that leave the activations' dtype no room for its
    /// products have the CPU's bits, more slowly, together with rows beside them.
    ///
    /// These kernels were executed instruction by instruction on a CPU, and not yet run on a GPU.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`], and [`crate::OperandFault::Workspace`].
    pub fn gemm_weights_on<T: Activation>(
        &self,
        stream: &Arc<CudaStream>,
        weights: &DeviceTensor,
        activations: &impl DevicePtr<T>,
        tokens: usize,
        workspace: &mut GemmWorkspace,
        out: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        if tokens <= FEW || !launch::takes(weights.shape()) {
            return self.gemv_weights_on(stream, weights, activations, tokens, out);
        }
        let kernel = GemmWeightsKernel::choose(self.kernels.target(), tokens);
        self.gemm_weights_with(kernel, stream, weights, activations, tokens, workspace, out)
    }

    /// [`Self::gemm_weights_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_on`].
    #[doc(hidden)]
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
    pub fn gemm_weights_with<T: Activation>(
        &self,
        kernel: GemmWeightsKernel,
        stream: &Arc<CudaStream>,
        weights: &DeviceTensor,
        activations: &impl DevicePtr<T>,
        tokens: usize,
        workspace: &mut GemmWorkspace,
        out: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        launch::gemm_weights(&self.kernels, stream, kernel, weights, activations, tokens, workspace, out)
    }

    /// The kernels for products of many tokens that this GPU has.
    #[doc(hidden)]
    pub fn gemm_kernels(&self) -> impl Iterator<Item = GemmWeightsKernel> {
        GemmWeightsKernel::of(self.kernels.target())
    }
}

/// The most tokens for which kernels of fewer are faster.
const FEW: usize = 8;

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
