//! Weights in four bits times activations in 16, on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use super::gemv_choices::GemvWeightsChoices;
use super::{DeviceTensor, Gpu, doing, launch};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::recipe::Words;
use crate::tensor::{QuantizedShape, QuantizedTensor, Shape};

/// A kernel for weights times activations, and how it is launched. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvWeightsKernel {
    pub(super) kind: Kind,
    /// Tiles of 16 places of rows that a warp has. With fewer than eight tokens, several places are parts of one row.
    pub(super) tiles: u32,
    /// Warps that share rows, each with a part of the columns.
    pub(super) splits: u32,
}

/// What a kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One token at a time, copied ahead.
    One,
    /// Up to eight tokens at a time, copied ahead.
    Lot,
    /// The same by loads: takes rows of any whole chunks.
    Many,
}

/// Kernels by word: kind, tiles and splits.
macro_rules! kernels {
    ($($word:literal $kind:ident { $($tiles:literal: $($splits:literal)+;)+ })+) => {
        &[$($($((
            concat!($word, "-", $tiles, "x", $splits),
            Self { kind: Kind::$kind, tiles: $tiles, splits: $splits },
        ),)+)+)+]
    };
}

impl Words for GemvWeightsKernel {
    const WORDS: &'static [(&'static str, Self)] = kernels! {
        "one" One { 1: 1 2 4 8 16; 2: 1 2 4 8 16; 4: 1 2 4 8 16; }
        "lot" Lot { 1: 1 2 4 8 16; 2: 1 2 4 8 16; }
        "many" Many { 1: 1 2 4 8; 2: 1 2 4 8; }
    };
}

impl GemvWeightsKernel {
    pub(super) const OTHERWISE: Self = Self { kind: Kind::Many, tiles: 1, splits: 8 };

    /// Every one.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::WORDS.iter().map(|(_, kernel)| *kernel)
    }

    /// The one for weights of a shape and so many tokens.
    pub fn choose(shape: QuantizedShape, tokens: usize) -> Self {
        GemvWeightsChoices::built_in().kernel(shape.format, shape.rows, shape.cols, tokens).on(shape)
    }

    /// The one that multiplies weights of a shape, when this one is asked for: those that copy ahead copy whole words of
    /// scales, and count bytes in 32 bits.
    pub(super) fn on(self, shape: QuantizedShape) -> Self {
        if self.kind == Kind::Many || shape.blocks_per_row().is_multiple_of(4) && shape.cols < 1 << 24 {
            return self;
        }
        Self { kind: Kind::Many, tiles: self.tiles.min(2), splits: self.splits.min(8) }
    }

    /// Whether it multiplies with one token at a time where it can.
    pub fn is_for_one_token(self) -> bool {
        self.kind == Kind::One
    }

    /// Whether weights of a shape are multiplied with one token at a time.
    pub fn takes_one_token(self, shape: QuantizedShape) -> bool {
        self.on(shape).kind == Kind::One
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
    /// Which kernel does it is a table by format, size and tokens, measured on an H200; scales whose rows are not a
    /// multiple of four bytes take a slower one. Results have the CPU's bits, more slowly, where rows are not a multiple
    /// of 32 and where activations do not start on 16 bytes; with several tokens, for rows with MXFP4 scales that leave
    /// the activations' dtype no room for its products; and with one, where a sum is infinite or NaN on the way, as from
    /// bf16 activations of 2^24.
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
        let kernel = GemvWeightsKernel::choose(weights.shape(), tokens);
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
