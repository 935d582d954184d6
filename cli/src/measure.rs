//! Measuring the operations against a copy of the same bytes, in the same run; products on a CPU, which hardly write, against
//! reading them too.
//!
//! Input is random, never zeros. Buffers are used in rotation until they are past every cache ([`ROTATION_BYTES`]). After
//! the timing the output is compared with what the CPU's reference gives. A figure is the median of many.

mod cpu;
pub(crate) mod gemv;
#[cfg(feature = "cuda")]
mod gpu;
pub(crate) mod weights;

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

#[cfg(feature = "cuda")]
use microscale::gpu::GemvKernel;
use microscale::{
    Device, Dtype, Element, Error, Global, QuantizedShape, Recipe, Result, Scheme, Shape, Words,
};
use rayon::prelude::*;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Unquantized values to codes and scales; NVFP4's global scale is given.
    Quantize,
    /// Unquantized values to codes and scales, after the pass that NVFP4's global scale is computed from: two reads.
    AmaxQuantize,
    /// The largest magnitude: one read.
    Amax,
    /// Codes and scales to unquantized values.
    Dequantize,
    /// Quantized matrices times quantized vectors; the dtype is the result's.
    Gemv,
    /// Quantized weights times activations that are not quantized; the dtype is that of activations and results.
    GemvWeights,
    /// The same by a kernel whose warps take one row (GPU only).
    GemvRows1,
    /// Two rows.
    GemvRows2,
    /// Four rows.
    GemvRows4,
    /// The ladder's first step (GPU only): a thread handles a block.
    QuantizeThreadABlock,
    /// The ladder's second step (GPU only): a warp handles a block.
    QuantizeWarpABlock,
    /// A kernel that does nothing (GPU only): what a launch costs.
    Empty,
}

impl Words for Op {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("quantize", Self::Quantize),
        ("amax-quantize", Self::AmaxQuantize),
        ("amax", Self::Amax),
        ("dequantize", Self::Dequantize),
        ("gemv", Self::Gemv),
        ("gemv-weights", Self::GemvWeights),
        ("gemv-rows1", Self::GemvRows1),
        ("gemv-rows2", Self::GemvRows2),
        ("gemv-rows4", Self::GemvRows4),
        ("quantize-thread-a-block", Self::QuantizeThreadABlock),
        ("quantize-warp-a-block", Self::QuantizeWarpABlock),
        ("empty", Self::Empty),
    ];
}

impl Op {
    /// The ladder, from the first version that one would write to the product.
    pub(crate) const LADDER: [Self; 3] =
        [Self::QuantizeThreadABlock, Self::QuantizeWarpABlock, Self::Quantize];

    /// The kernels that products are chosen from.
    pub(crate) const GEMV_KERNELS: [Self; 3] = [Self::GemvRows1, Self::GemvRows2, Self::GemvRows4];

    /// Whether it is a product of quantized operands.
    fn is_gemv(self) -> bool {
        self == Self::Gemv || Self::GEMV_KERNELS.contains(&self)
    }

    /// The kernel that it is about; none where the table of choices says which.
    #[cfg(feature = "cuda")]
    fn gemv_kernel(self) -> Option<GemvKernel> {
        match self {
            Self::GemvRows1 => Some(GemvKernel::Rows1),
            Self::GemvRows2 => Some(GemvKernel::Rows2),
            Self::GemvRows4 => Some(GemvKernel::Rows4),
            _ => None,
        }
    }

    /// Whether only GPUs have it.
    pub(crate) fn needs_gpu(self) -> bool {
        let kernels = matches!(self, Self::QuantizeThreadABlock | Self::QuantizeWarpABlock | Self::Empty);
        kernels || Self::GEMV_KERNELS.contains(&self)
    }

    /// Whether it has so many tokens.
    pub(crate) fn has_tokens(self) -> bool {
        self == Self::GemvWeights
    }

    /// Whether it takes values of a dtype.
    pub(crate) fn takes(self, dtype: Dtype) -> bool {
        self != Self::GemvWeights || dtype != Dtype::F32
    }

    /// Checks that there is such a thing to measure.
    ///
    /// # Errors
    /// [`Error::NotMeasured`].
    pub(crate) fn check(self, dtype: Dtype, size: Size) -> Result<()> {
        if !self.takes(dtype) {
            return Err(self.not_measured(NO_F32));
        }
        if self.has_tokens() && size.batches > 1 {
            return Err(self.not_measured("with several matrices; write the shape as ROWSxCOLS"));
        }
        if !self.has_tokens() && size.tokens.is_some() {
            return Err(self.not_measured("by tokens; leave them out, or measure gemv-weights by itself"));
        }
        Ok(())
    }

    fn not_measured(self, how: &'static str) -> Error {
        Error::NotMeasured { op: self.word(), how }
    }
}

const NO_F32: &str = "with activations in f32; choose the dtype f16 or bf16";

/// The rows and columns of a matrix, written `ROWSxCOLS`, or of several, written `ROWSxCOLSxCOUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Matrices; 1 but for products.
    pub batches: usize,
    /// Rows of activations that weights are multiplied with; none is one, and what other operations have.
    pub tokens: Option<NonZeroUsize>,
}

impl Size {
    /// Rows of all matrices, and columns.
    fn all_rows(&self) -> Shape {
        // Where that is too many, so is the next thing that is asked of it.
        Shape::new(self.rows.saturating_mul(self.batches), self.cols)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cols, batches, tokens } = self;
        write!(f, "{rows}x{cols}")?;
        if *batches != 1 {
            write!(f, "x{batches}")?;
        }
        match tokens.map(NonZeroUsize::get) {
            None => Ok(()),
            Some(1) => write!(f, ", 1 token"),
            Some(tokens) => write!(f, ", {tokens} tokens"),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts: Option<Vec<usize>> =
            text.split(['x', 'X']).map(|part| part.parse().ok().filter(|count| *count > 0)).collect();
        match parts.as_deref() {
            Some(&[rows, cols]) => Ok(Self { rows, cols, batches: 1, tokens: None }),
            Some(&[rows, cols, batches]) => Ok(Self { rows, cols, batches, tokens: None }),
            _ => Err(format!(
                "{text} is not a shape; write rows and columns as 8192x4096, several matrices as 8192x4096x2"
            )),
        }
    }
}

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Measurement {
    /// What was measured.
    pub op: Op,
    /// The recipe: its format is reported.
    pub recipe: Recipe,
    /// The dtype of the unquantized values.
    pub dtype: Dtype,
    /// The matrix.
    pub size: Size,
    /// Where, in words.
    pub device: String,
    /// CPU threads; 0 on a GPU.
    pub threads: usize,
    /// Bytes that the operation must move: values, codes and scales, each once; of a product, the matrices' codes and scales.
    pub bytes: u64,
    /// The median time of one operation.
    pub median_seconds: f64,
    /// The median time of reading `bytes`; products on a CPU have one.
    pub read_seconds: Option<f64>,
    /// The median time of a copy that reads and writes `bytes` together; the empty kernel has none.
    pub copy_seconds: Option<f64>,
}

impl Measurement {
    /// Bytes moved a second.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.median_seconds
    }

    /// Bytes that the copy of the same run moved a second, read and written ones together.
    pub(crate) fn copy_bytes_per_second(&self) -> Option<f64> {
        self.copy_seconds.map(|seconds| self.bytes as f64 / seconds)
    }

    /// Bytes that were read a second, in the same run.
    pub(crate) fn read_bytes_per_second(&self) -> Option<f64> {
        self.read_seconds.map(|seconds| self.bytes as f64 / seconds)
    }

    /// The time of reading over the operation's.
    pub(crate) fn read_ratio(&self) -> Option<f64> {
        self.read_seconds.map(|seconds| seconds / self.median_seconds)
    }

    /// The copy's time over the operation's.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.copy_seconds.map(|seconds| seconds / self.median_seconds)
    }
}

/// Measures an operation.
///
/// # Errors
/// Those of the operation and of [`Op::check`]; [`Error::NoGpu`] if the operation needs a GPU and `device` is none;
/// [`Error::Wrong`] if the output differs from the reference's.
pub(crate) fn measure(
    op: Op,
    recipe: &Recipe,
    dtype: Dtype,
    size: Size,
    device: &Device,
) -> Result<Measurement> {
    op.check(dtype, size)?;
    if op.needs_gpu() && matches!(device, Device::Cpu) {
        return Err(Error::NoGpu(format!("{} is measured on GPUs only", op.word())));
    }
    let (bytes, times) = match (op, dtype) {
        (Op::GemvWeights, Dtype::F32) => return Err(op.not_measured(NO_F32)),
        (Op::GemvWeights, Dtype::F16) => weights::measure::<half::f16>(recipe, size, device)?,
        (Op::GemvWeights, Dtype::Bf16) => weights::measure::<half::bf16>(recipe, size, device)?,
        (_, Dtype::F32) => measure_as::<f32>(op, recipe, size, device)?,
        (_, Dtype::F16) => measure_as::<half::f16>(op, recipe, size, device)?,
        (_, Dtype::Bf16) => measure_as::<half::bf16>(op, recipe, size, device)?,
    };
    Ok(Measurement {
        op,
        recipe: *recipe,
        dtype,
        size,
        device: device.to_string(),
        threads: if matches!(device, Device::Cpu) { rayon::current_num_threads() } else { 0 },
        bytes,
        median_seconds: times.operation,
        read_seconds: times.read,
        copy_seconds: times.copy,
    })
}

/// Median times, in seconds.
struct Times {
    operation: f64,
    read: Option<f64>,
    copy: Option<f64>,
}

/// The bytes that an operation moves, and times.
fn measure_as<T: Element>(op: Op, recipe: &Recipe, size: Size, device: &Device) -> Result<(u64, Times)> {
    if op.is_gemv() {
        return gemv::measure::<T>(op, recipe, size, device);
    }
    let shape = size.all_rows();
    let (codes, scales) = QuantizedShape::of(recipe, shape).bytes()?;
    let [values, quantized] = [shape.elements() * T::DTYPE.bytes(), codes + scales].map(|bytes| bytes as u64);
    let bytes = match op {
        Op::Amax => values,
        Op::AmaxQuantize => (2 * values).saturating_add(quantized),
        _ => values.saturating_add(quantized),
    };
    let job = Job { op, recipe: *recipe, shape, bytes };
    let times = match device {
        Device::Cpu => cpu::measure::<T>(&job)?,
        #[cfg(feature = "cuda")]
        Device::Gpus(gpus) => gpu::measure::<T>(&job, gpus.first())?,
    };
    Ok((if op == Op::Empty { 0 } else { job.bytes }, times))
}

/// What to measure, with its sizes worked out.
struct Job {
    op: Op,
    recipe: Recipe,
    shape: Shape,
    bytes: u64,
}

impl Job {
    /// The recipe for these values: unless its computation is part of the operation, the global scale is given.
    fn recipe<T: Element>(&self, values: &[T]) -> Result<Recipe> {
        let Scheme::Nvfp4(arithmetic, Global::FromAmax) = self.recipe.scheme else { return Ok(self.recipe) };
        if self.op == Op::AmaxQuantize {
            return Ok(self.recipe);
        }
        let amax = microscale::cpu::amax(values, self.shape)?;
        let given = amax.global_scale::<T>(&arithmetic, self.recipe.non_finite);
        Ok(self.recipe.with_global(Global::Given(given)))
    }
}

/// Buffers are rotated until the bytes between two uses of one exceed this: several times any cache, an H200's second
/// level (60 MB) or a server CPU's third (up to 480 MB) included.
pub(crate) const ROTATION_BYTES: u64 = 1 << 30;

/// Sets of buffers to rotate among.
fn sets(bytes: u64) -> usize {
    ROTATION_BYTES.div_ceil(bytes).clamp(2, 256) as usize
}

/// Random values: about normal, with a block's largest magnitude spread over a few powers of two.
fn random<T: Element>(elements: usize, seed: u64) -> Vec<T> {
    let mut values = vec![T::default(); elements];
    values.par_chunks_mut(1 << 16).enumerate().for_each(|(i, chunk)| {
        let mut rng = fastrand::Rng::with_seed(seed << 32 | i as u64);
        for value in chunk {
            let sum: f32 = (0..4).map(|_| rng.f32() - 0.5).sum();
            *value = T::from_f32(sum * 1.7);
        }
    });
    values
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// [`Error::Wrong`] unless the bytes are equal.
fn require_equal<V: PartialEq>(what: &'static str, found: &[V], expected: &[V]) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Wrong(what)) }
}
