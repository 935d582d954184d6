//! Quantized matrices that keep their memory alive.

use std::fmt;
use std::sync::Arc;

use candle_core::{Error, Layout, Result, bail};
use microscale::formats::ScaleLayout;
use microscale::{HadamardWidth, OperandFault, QuantizedShape, QuantizedTensor, QuantizedView};
use yoke::erased::ErasedArcCart;
use yoke::{Yoke, Yokeable};

use crate::rounded::RoundedInputs;

/// A quantized matrix `[M, K]` for products. Cheap to clone.
///
/// It keeps its memory alive: a mapped checkpoint, a [`QuantizedTensor`], or another owner
/// ([`Self::of`]).
#[derive(Clone)]
pub struct QMatrix {
    view: Yoke<View<'static>, ErasedArcCart>,
    hadamard: Option<HadamardWidth>,
}

#[derive(Clone, Copy, Yokeable)]
struct View<'a>(QuantizedView<'a>);

/// Shows the shape and the global scale.
impl fmt::Debug for QMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QMatrix").field(&self.view()).finish()
    }
}

impl QMatrix {
    /// The matrix that `find` returns from the owner's memory.
    ///
    /// The matrix keeps the owner alive. No byte is copied.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use candle_core::Error;
    /// use microscale::{Format, QuantizedShape, QuantizedView};
    /// use microscale_candle::QMatrix;
    ///
    /// let file = Arc::new(vec![0x22u8; 16 * 8 + 16]); // 16 rows of one NVFP4 block: codes, scales
    /// let matrix = QMatrix::of(file, |file| {
    ///     let (codes, scales) = file.split_at(16 * 8);
    ///     let shape = QuantizedShape::new(Format::Nvfp4, 16, 16);
    ///     QuantizedView::from_parts(shape, codes, scales).map_err(Error::wrap)
    /// })?;
    /// assert_eq!(matrix.view().rows(), 16);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// `find` can only return memory of the owner:
    ///
    /// ```compile_fail,E0597
    /// # use std::sync::Arc;
    /// # use candle_core::Error;
    /// # use microscale::{Format, QuantizedShape, QuantizedView};
    /// # use microscale_candle::QMatrix;
    /// let file = vec![0x22u8; 16 * 8 + 16];
    /// let matrix = QMatrix::of(Arc::new(()), |()| {
    ///     let (codes, scales) = file.split_at(16 * 8);
    ///     let shape = QuantizedShape::new(Format::Nvfp4, 16, 16);
    ///     QuantizedView::from_parts(shape, codes, scales).map_err(Error::wrap)
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of `find`, and an error for formats without products (MXFP8) and for swizzled
    /// scales.
    pub fn of<Owner: Send + Sync + 'static>(
        owner: Arc<Owner>,
        find: impl for<'a> FnOnce(&'a Owner) -> Result<QuantizedView<'a>>,
    ) -> Result<Self> {
        let found = Yoke::try_attach_to_cart(owner, |owner| find(owner).map(View))?;
        let matrix = Self { view: found.erase_arc_cart(), hadamard: None };
        let QuantizedShape { format, scale_layout, .. } = matrix.view().shape();
        if !format.is_multiplied() {
            bail!("weights in {format} are not multiplied; dequantize them, or quantize to MXFP4 or NVFP4");
        }
        if scale_layout != ScaleLayout::Linear {
            bail!("weights with swizzled scales are not multiplied; convert them by `convert_layout`");
        }
        Ok(matrix)
    }

    /// The matrix of a tensor, which it keeps.
    ///
    /// # Errors
    /// As for [`Self::of`].
    pub fn new(tensor: QuantizedTensor) -> Result<Self> {
        Self::of(Arc::new(tensor), |tensor| Ok(tensor.view()))
    }

    /// Sets the transform of inputs that the matrix is stored under, see [`Self::hadamard`].
    ///
    /// # Errors
    /// If the width does not divide K.
    pub fn with_hadamard(self, hadamard: Option<HadamardWidth>) -> Result<Self> {
        let columns = self.view().cols();
        if let Some(width) = hadamard.filter(|width| !columns.is_multiple_of(width.columns())) {
            bail!("a Hadamard transform of {width} columns does not fit weights of {columns} columns");
        }
        Ok(Self { hadamard, ..self })
    }

    /// The block Hadamard transform of inputs. The matrix is W·H, and a
    /// [`QLinear`](crate::QLinear) multiplies inputs by H.
    pub fn hadamard(&self) -> Option<HadamardWidth> {
        self.hadamard
    }

    /// The matrix' codes, scales and global scale.
    pub fn view(&self) -> QuantizedView<'_> {
        self.view.get().0
    }

    /// Splits the matrix by rows into `count` matrices of the same size.
    ///
    /// # Errors
    /// If `count` does not divide the rows.
    pub fn split(&self, count: usize) -> Result<Vec<Self>> {
        let shape = self.view().shape();
        if count == 0 || !shape.rows.is_multiple_of(count) {
            bail!("{} rows are not {count} matrices of as many rows each", shape.rows);
        }
        let part = QuantizedShape::new(shape.format, shape.rows / count, shape.cols);
        let parts = (0..count).map(|i| {
            let found = self.view.try_map_project_cloned(|View(whole), _| {
                let (codes, scales) = (whole.codes().len() / count, whole.scales().len() / count);
                let (codes, scales) =
                    (&whole.codes()[i * codes..][..codes], &whole.scales()[i * scales..][..scales]);
                let view = QuantizedView::from_parts(part, codes, scales)?;
                whole.global_scale().map_or(Ok(view), |scale| view.with_global_scale(scale)).map(View)
            });
            let found = found.map(|view| Self { view, hadamard: self.hadamard });
            found.map_err(|error: microscale::Error| Error::wrap(error))
        });
        parts.collect()
    }
}

/// Checks that a device rounds activations like this.
pub(crate) fn check_device(rounded: Option<RoundedInputs>, is_cpu: bool) -> Result<()> {
    if !is_cpu && rounded == Some(RoundedInputs::Int8) {
        bail!("GPUs do not round activations to int8; round them to FP8 or FP4, or not at all, or use a CPU");
    }
    Ok(())
}

/// Checks that weights of a shape are multiplied with `rounded` activations.
pub(crate) fn check_rounded(rounded: RoundedInputs, shape: QuantizedShape) -> Result<()> {
    let checked = match rounded {
        RoundedInputs::Int8 => Ok(()),
        RoundedInputs::Fp8(options) => options.check_weights(shape),
        RoundedInputs::Fp4(recipe) | RoundedInputs::Fp4Fast(recipe) if recipe.format() == shape.format => {
            recipe.check()
        }
        RoundedInputs::Fp4(recipe) | RoundedInputs::Fp4Fast(recipe) => {
            let fault = OperandFault::Formats { matrix: shape.format, vector: recipe.format() };
            Err(microscale::Error::Operands(fault))
        }
    };
    checked.map_err(Error::wrap)
}

/// The elements of a tensor without gaps.
pub(crate) fn part<'a, T>(storage: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((begin, end)) => Ok(&storage[begin..end]),
        None => bail!("a tensor with gaps; make it contiguous"),
    }
}
