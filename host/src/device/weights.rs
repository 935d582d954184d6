//! Quantized weights that a device can multiply, for products with any number of tokens.

use std::borrow::Cow;
use std::fmt;

use crate::cpu::{gemm_weights, gemm_weights_int8};
use crate::gemv::check_weights_shape;
#[cfg(feature = "cuda")]
use crate::gpu::{DeviceTensor, Gpu};
use crate::{
    Activation, ActivationRounding, Error, OperandFault, QuantizedShape, QuantizedView, Result, Shape,
};

/// Quantized weights that a device can multiply: in host memory, or copied to a GPU once.
///
/// [`crate::Device::load_weights`] makes it.
pub struct LoadedWeights<'a>(WeightsOn<'a>);

enum WeightsOn<'a> {
    Cpu(QuantizedView<'a>, ActivationRounding),
    #[cfg(feature = "cuda")]
    Gpu(&'a Gpu, Box<DeviceTensor>),
}

/// Shows the shape and the device, but not the codes.
impl fmt::Debug for LoadedWeights<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match &self.0 {
            WeightsOn::Cpu(..) => "WeightsOnCpu",
            #[cfg(feature = "cuda")]
            WeightsOn::Gpu(..) => "WeightsOnGpu",
        };
        f.debug_struct(name).field("shape", &self.shape()).finish_non_exhaustive()
    }
}

impl<'a> LoadedWeights<'a> {
    /// Borrows weights in host memory.
    pub(super) fn on_cpu(weights: QuantizedView<'a>) -> Result<Self> {
        check_weights_shape(weights.shape())?;
        Ok(Self(WeightsOn::Cpu(weights, ActivationRounding::Exact)))
    }

    /// Copies weights to a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(gpu: &'a Gpu, weights: QuantizedView<'_>) -> Result<Self> {
        check_weights_shape(weights.shape())?;
        let tensor = DeviceTensor::from_host(gpu.stream(), weights)?;
        Ok(Self(WeightsOn::Gpu(gpu, Box::new(tensor))))
    }

    /// Sets how products round activations. They are exact unless you call this.
    ///
    /// ```
    /// use microscale::{ActivationRounding, Device, Recipe, Shape};
    ///
    /// let device = Device::Cpu;
    /// let values = [1f32; 4 * 32];
    /// let quantized = device.quantize(&values, Shape::new(4, 32), &Recipe::default())?.tensor;
    /// let weights = device.load_weights(&quantized)?.with_activations(ActivationRounding::Int8)?;
    /// assert_eq!(weights.linear(&[3f32; 32], Shape::new(1, 32))?, [96.0; 4]);
    /// # Ok::<(), microscale::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Operands`] for [`ActivationRounding::Int8`] on a GPU.
    pub fn with_activations(self, rounding: ActivationRounding) -> Result<Self> {
        match self.0 {
            WeightsOn::Cpu(weights, _) => Ok(Self(WeightsOn::Cpu(weights, rounding))),
            #[cfg(feature = "cuda")]
            WeightsOn::Gpu(..) if rounding != ActivationRounding::Exact => {
                Err(Error::Operands(OperandFault::Rounding { rounding }))
            }
            #[cfg(feature = "cuda")]
            WeightsOn::Gpu(..) => Ok(self),
        }
    }

    /// Returns format, rows (M) and columns (K).
    pub fn shape(&self) -> QuantizedShape {
        match &self.0 {
            WeightsOn::Cpu(weights, _) => weights.shape(),
            #[cfg(feature = "cuda")]
            WeightsOn::Gpu(_, weights) => weights.shape(),
        }
    }

    /// Multiplies activations `[N, K]` by the weights `[M, K]`. Returns y = x·Wᵀ, `[N, M]`.
    ///
    /// See [`crate::Device::linear`].
    ///
    /// # Errors
    /// The errors of [`crate::Device::linear`], except for errors about the weights.
    pub fn linear<T: Activation>(&self, activations: &[T], shape: Shape) -> Result<Vec<T>> {
        self.check(activations, shape)?;
        let results = Shape::new(shape.rows, self.shape().rows);
        results.span()?;
        let mut out = vec![T::default(); results.elements()];
        self.multiply(activations, shape, &mut out)?;
        Ok(out)
    }

    /// [`Self::linear`] into `out`. It overwrites the first `N * M` elements.
    ///
    /// # Errors
    /// The errors of [`Self::linear`], and [`Error::Length`] if `out` has too few elements.
    pub fn linear_into<T: Activation>(&self, activations: &[T], shape: Shape, out: &mut [T]) -> Result<()> {
        self.check(activations, shape)?;
        self.multiply(activations, shape, out)
    }

    /// [`Self::linear_into`] with activations that were checked.
    fn multiply<T: Activation>(&self, activations: &[T], shape: Shape, out: &mut [T]) -> Result<()> {
        let activations = without_gaps(activations, shape);
        match &self.0 {
            WeightsOn::Cpu(weights, ActivationRounding::Exact) => {
                gemm_weights(*weights, &activations, shape.rows, out)
            }
            WeightsOn::Cpu(weights, ActivationRounding::Int8) => {
                gemm_weights_int8(*weights, &activations, shape.rows, out)
            }
            #[cfg(feature = "cuda")]
            WeightsOn::Gpu(gpu, weights) => gpu.gemm_on_host(weights, &activations, shape.rows, out),
        }
    }

    /// Checks that the shape of activations fits the slice and the weights.
    fn check<T>(&self, activations: &[T], shape: Shape) -> Result<()> {
        let weights = self.shape().cols;
        if shape.cols != weights {
            return Err(Error::Operands(OperandFault::Activations { weights, activations: shape.cols }));
        }
        shape.check("the activations", activations.len())
    }
}

/// Returns the elements of a checked shape without gaps between rows, copied if there are gaps.
fn without_gaps<T: Activation>(values: &[T], shape: Shape) -> Cow<'_, [T]> {
    let Shape { rows, cols, row_stride } = shape;
    if row_stride == cols || rows < 2 || cols == 0 {
        return Cow::Borrowed(&values[..shape.elements()]);
    }
    Cow::Owned(values.chunks(row_stride).take(rows).flat_map(|row| &row[..cols]).copied().collect())
}
