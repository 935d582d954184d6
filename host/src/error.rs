//! Errors of tensor operations. The crate `microscale-checkpoint` has its own errors for files.

mod activations;
mod gptq;
mod operands;

use microscale_formats::nvfp4::Direction;
use microscale_formats::{Format, GlobalScale, Search, Words};

pub use activations::ActivationFault;
pub use gptq::GptqFault;
pub use operands::OperandFault;

use crate::report::{Position, Report};
use crate::scheme::Numerics;
use crate::shape::{QuantizedShape, Strided};

/// The result of the library's tensor operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a tensor failed.
///
/// `Debug` prints the message too, so that `fn main() -> Result<(), microscale::Error>` reports it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The slice is too short for the shape.
    #[error(
        "{what} has {found} elements, but {rows} rows of {cols} with row stride {row_stride} span {expected}; \
         pass a longer slice or a smaller shape"
    )]
    Length {
        /// The name of the slice.
        what: &'static str,
        /// Rows of the shape.
        rows: usize,
        /// Columns of the shape.
        cols: usize,
        /// Row stride of the shape, in elements.
        row_stride: usize,
        /// Elements that the shape spans.
        expected: usize,
        /// Elements in the slice.
        found: usize,
    },

    /// There is no exact cast between the formats.
    #[error("{from} is not cast to {to} exactly; dequantize, and quantize again")]
    NotCast {
        /// The format of the tensor.
        from: Format,
        /// The requested format.
        to: Format,
    },

    /// Another format cannot hold the block scales over the same codes.
    #[error(
        "the scales of its blocks span {span} powers of two, and NVFP4's have 18; dequantize, and quantize again"
    )]
    NotExact {
        /// The powers of two from the smallest to the largest scale, inclusive.
        span: u32,
    },

    /// Another format cannot hold a block's values under any scale.
    #[error(
        "block {block} has values that no scale makes exact in {to} (of {columns} columns, blocks of 32); dequantize, and quantize again"
    )]
    NotExactBlock {
        /// The requested format.
        to: Format,
        /// The block of 32 elements, counted from 0 over all rows.
        block: usize,
        /// Columns of the tensor.
        columns: usize,
    },

    /// Rows would overlap.
    #[error(
        "the row stride {row_stride} is smaller than the {cols} columns, so rows would overlap; raise it to {cols} or more"
    )]
    RowStride {
        /// Columns of the shape.
        cols: usize,
        /// The requested stride, in elements.
        row_stride: usize,
    },

    /// The shape has more elements than can be addressed.
    #[error("{rows} rows of {cols} with row stride {row_stride} are more elements than can be addressed")]
    TooLarge {
        /// Rows of the shape.
        rows: usize,
        /// Columns of the shape.
        cols: usize,
        /// Row stride of the shape, in elements.
        row_stride: usize,
    },

    /// The axis does not exist.
    #[error("there is no axis {axis}; the tensor has {rank}, counted from 0")]
    Axis {
        /// The requested axis.
        axis: usize,
        /// Dimensions of the tensor.
        rank: usize,
    },

    /// The strides do not describe rows.
    #[error(
        "strides {strides:?} of dimensions {dims:?} do not describe rows along axis {axis}; pass a stride for each \
         dimension, and slice the tensor until the other axes merge to at most two with one stride each"
    )]
    Strides {
        /// The dimensions.
        dims: Vec<usize>,
        /// The strides, in elements.
        strides: Vec<usize>,
        /// The axis along which blocks run.
        axis: usize,
    },

    /// A stride is 0.
    #[error("{what} is 0, so all its elements would be the same; it must be 1 or more")]
    ZeroStride {
        /// The name of the stride.
        what: &'static str,
    },

    /// The slice is too short for the strides.
    #[error(
        "the input has {found} elements, but {} times {} rows of {} with strides {}, {} and {} span {expected}; \
         pass a longer slice, fewer rows or smaller strides",
        .strided.outer, .strided.rows, .strided.cols,
        .strided.outer_stride, .strided.row_stride, .strided.col_stride
    )]
    StridedLength {
        /// The expected matrix.
        strided: Strided,
        /// Elements that it spans.
        expected: usize,
        /// Elements in the slice.
        found: usize,
    },

    /// The strides span more elements than can be addressed.
    #[error(
        "{} times {} rows of {} with strides {}, {} and {} are more elements than can be addressed; check dimensions and strides",
        .strided.outer, .strided.rows, .strided.cols,
        .strided.outer_stride, .strided.row_stride, .strided.col_stride
    )]
    StridedTooLarge {
        /// The requested matrix.
        strided: Strided,
    },

    /// Codes or scales do not have the length that the shape needs.
    #[error(
        "{what} have {found} bytes, but {} rows of {} in {} with {} scales need exactly {expected}",
        .shape.rows, .shape.cols, .shape.format, .shape.scale_layout
    )]
    QuantizedLength {
        /// `codes` or `scales`.
        what: &'static str,
        /// The expected shape.
        shape: QuantizedShape,
        /// Bytes needed.
        expected: usize,
        /// Bytes found.
        found: usize,
    },

    /// A tensor to write to has another shape, format or scale layout.
    #[error(
        "the output is {} rows of {} in {} with {} scales, but must be {} rows of {} in {} with {} scales",
        .found.rows, .found.cols, .found.format, .found.scale_layout,
        .expected.rows, .expected.cols, .expected.format, .expected.scale_layout
    )]
    QuantizedShape {
        /// The expected shape.
        expected: QuantizedShape,
        /// The shape of the tensor.
        found: QuantizedShape,
    },

    /// The format is not defined for a library's numerics.
    #[error("{format} has no numerics {numerics}; it has {}", known_numerics(*.format))]
    NoNumerics {
        /// The format.
        format: Format,
        /// The numerics.
        numerics: Numerics,
    },

    /// The format's scales cannot be searched.
    #[error("the scales of {format} cannot be searched; use mxfp4 or nvfp4, or quantize without a search")]
    NoSearch {
        /// The format.
        format: Format,
    },

    /// The importance does not match the columns.
    #[error(
        "importance must have a number for each of {columns} columns, finite and not negative; it has {found}{}",
        .wrong.map_or(String::new(), |column| format!(", and that of column {column} is wrong"))
    )]
    Importance {
        /// Numbers found.
        found: usize,
        /// Columns of the matrix.
        columns: usize,
        /// The first number that is negative or not finite.
        wrong: Option<usize>,
    },

    /// A search for scales missed the best one.
    #[error(
        "block {block} of row {row} has the scale byte {chosen:#04x}, but {better:#04x} has a smaller error: a full search missed it; \
         please report this, or check the result of a full search with the same importance"
    )]
    SkippedScale {
        /// The row.
        row: usize,
        /// The block in its row.
        block: usize,
        /// The scale's byte.
        chosen: u8,
        /// A byte with a smaller error.
        better: u8,
    },

    /// A Hessian was passed without a search for scales.
    #[error(
        "a Hessian weighs the errors that a search for scales compares, and the recipe has none; \
         set its search to {}, or quantize without a Hessian",
        searches()
    )]
    HessianWithoutSearch,

    /// A Hessian was passed to a GPU.
    #[error("GPUs search scales without Hessians; quantize on the CPU, or by importance of columns")]
    HessianOnGpu,

    /// The number of the Hessian's entries does not match the columns.
    #[error(
        "the Hessian has {found} entries, but {columns} columns in blocks of {0} need {1} × {0} × {0} = {expected}; \
         pass a matrix for each block of columns, the last one padded to {0} × {0}",
        .format.block(), .columns.div_ceil(.format.block())
    )]
    HessianLength {
        /// The format.
        format: Format,
        /// Columns of the matrix.
        columns: usize,
        /// Entries needed.
        expected: usize,
        /// Entries found.
        found: usize,
    },

    /// A matrix is not a Hessian.
    #[error(
        "the Hessian of block {block} of columns has {value} in its row {row}, column {col}, which {}", .fault.what()
    )]
    HessianEntry {
        /// The index of the block of columns.
        block: usize,
        /// Row in the block's matrix.
        row: usize,
        /// Column in the block's matrix.
        col: usize,
        /// The entry.
        value: f32,
        /// The fault.
        fault: HessianFault,
    },

    /// GPTQ's operands do not match, or a Hessian cannot be factored.
    #[error(transparent)]
    Gptq(GptqFault),

    /// The global scale has the wrong direction for the numerics.
    #[error(
        "the global scale is a {} but these numerics take a {}; \
         pass its inverse as that, or choose numerics of the other direction",
        .given, .expected
    )]
    GlobalScaleDirection {
        /// The direction of the given scale.
        given: Direction,
        /// The direction of the numerics.
        expected: Direction,
    },

    /// The number cannot be a global scale.
    #[error(
        "a global scale of {} as a {} is out of range; it must be positive and normal, and the largest block scale, 448, \
         must stay finite under it",
        .given.value(), .given.direction()
    )]
    GlobalScale {
        /// The given scale.
        given: GlobalScale,
    },

    /// A global scale was passed for a format without one.
    #[error("{format} has no global scale; only nvfp4 has one")]
    NoGlobalScale {
        /// The format.
        format: Format,
    },

    /// A scale has its sign bit set, in a format whose scales have no sign.
    #[error(
        "scale {index} is {scale:#04x}: its sign bit is set, which {format} does not use; \
         the tensor is in another format (IF4 uses the bit as a flag) or damaged"
    )]
    SignedScale {
        /// The format.
        format: Format,
        /// The index of the scale.
        index: usize,
        /// Its bits.
        scale: u16,
    },

    /// The parts of activations do not match the recipe.
    #[error(transparent)]
    Activations(ActivationFault),

    /// GPUs do not compute the format.
    #[error("GPUs do not compute {format}, which is only for comparison; use the CPU (`--device cpu`)")]
    NoKernel {
        /// The format.
        format: Format,
    },

    /// The input contains NaN or infinities, and the policy refuses them.
    #[error(
        "the input holds {} NaN and {} infinite values, the first at row {}, column {}; \
         choose the non-finite policy propagate or saturate to go on",
        .report.nan, .report.infinite, .first.row, .first.col
    )]
    NonFinite {
        /// The first such element.
        first: Position,
        /// The counts of the whole tensor.
        report: Report,
    },

    /// Device memory is not aligned as kernels require.
    #[error(
        "the address of {what}, {address:#x}, is not a multiple of {needed}, which the GPU's kernels require; \
         copy to aligned memory, or allocate it with this alignment"
    )]
    Alignment {
        /// The name of the buffer.
        what: &'static str,
        /// The address in device memory.
        address: u64,
        /// The required alignment in bytes.
        needed: usize,
    },

    /// Device memory belongs to another context than the stream.
    #[error(
        "the memory of {what} belongs to another GPU or CUDA context than the stream; copy it, or use a stream of its context"
    )]
    OtherContext {
        /// The name of the buffer.
        what: &'static str,
    },

    /// A quantized output lacks memory for its global scale.
    #[error(
        "an output in {format} needs device memory for its global scale; pass {words} words by `with_global_slot`"
    )]
    NoGlobalSlot {
        /// The format.
        format: Format,
        /// Required number of 32-bit words.
        words: usize,
    },

    /// The operands of a product do not match.
    #[error(transparent)]
    Operands(OperandFault),

    /// An output differs from the reference's. This is a defect of the library or of the machine.
    #[error("the output of {0} differs from the reference implementation's; please report this")]
    Wrong(&'static str),

    /// `bench` does not support the measurement.
    #[error("{op} is not measured {how}")]
    NotMeasured {
        /// The operation.
        op: &'static str,
        /// The unsupported variant, and the alternative.
        how: &'static str,
    },

    /// No GPU can be used.
    #[error("no GPU can be used: {0}")]
    NoGpu(String),

    /// The CUDA driver reported an error. [`Self::is_out_of_memory`] identifies lack of memory.
    #[error("the GPU failed while {doing}: {message}")]
    Gpu {
        /// The requested operation.
        doing: &'static str,
        /// The driver's code, a `CUresult`, or `None` if the library itself failed.
        code: Option<i32>,
        /// The driver's message.
        message: String,
    },
}

microscale_formats::debug_is_message!(Error);

/// The driver's code for lack of memory.
pub(crate) const OUT_OF_MEMORY: i32 = 2;

impl Error {
    /// Returns the error with the position of a NaN or infinity changed by `map`, for an error of
    /// a part of a tensor.
    #[must_use]
    pub fn map_position(self, map: impl Fn(Position) -> Position) -> Self {
        match self {
            Self::NonFinite { first, report } => {
                Self::NonFinite { first: map(first), report: report.map_position(map) }
            }
            error => error,
        }
    }

    /// Returns whether a GPU ran out of memory. A smaller operation, or the CPU, may then succeed.
    ///
    /// ```
    /// use microscale::{Device, Quantized, Recipe, Result, Shape, quantize};
    ///
    /// fn quantize_any(device: &Device, values: &[f32], shape: Shape) -> Result<Quantized> {
    ///     let recipe = Recipe::default();
    ///     match device.quantize(values, shape, &recipe) {
    ///         Err(error) if error.is_out_of_memory() => quantize(values, shape, &recipe),
    ///         done => done,
    ///     }
    /// }
    /// # assert!(quantize_any(&Device::Cpu, &[1.0; 64], Shape::new(2, 32)).is_ok());
    /// ```
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Gpu { code: Some(OUT_OF_MEMORY), .. })
    }
}

/// Why an entry of a Hessian is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HessianFault {
    /// The entry is NaN or infinite.
    NotFinite,
    /// A diagonal entry is negative.
    NegativeDiagonal,
    /// The entry differs from its mirror image by more than rounding explains.
    NotSymmetric,
}

impl HessianFault {
    fn what(self) -> &'static str {
        match self {
            Self::NotFinite => {
                "is not finite; look for NaN, infinities and overflow in the inputs that it was made of"
            }
            Self::NegativeDiagonal => {
                "is negative, which a sum of squares cannot be; pass XᵀX of the layer's inputs X"
            }
            Self::NotSymmetric => {
                "differs from its mirror image by more than rounding explains; pass XᵀX, whole blocks row by row, or the \
                 mean of the matrix and its transpose"
            }
        }
    }
}

/// Returns words as a choice: `a, b or c`.
#[doc(hidden)]
pub fn choice(words: impl IntoIterator<Item = &'static str>) -> String {
    let mut words: Vec<_> = words.into_iter().collect();
    match words.pop() {
        Some(last) if !words.is_empty() => format!("{} or {last}", words.join(", ")),
        last => last.unwrap_or_default().into(),
    }
}

/// Returns the names of the searches for block scales: `four-six, window or full`.
#[doc(hidden)]
pub fn searches() -> String {
    choice(Search::values().filter(|search| *search != Search::None).map(Search::word))
}

/// Returns the names of the numerics that a format has.
fn known_numerics(format: Format) -> String {
    let all = Numerics::WORDS.iter();
    let words: Vec<_> =
        all.filter(|(_, numerics)| numerics.scheme(format).is_some()).map(|(word, _)| *word).collect();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `main` that returns an error prints its `Debug` form.
    #[test]
    fn debug_prints_the_message() {
        let error = Error::Axis { axis: 3, rank: 2 };
        assert_eq!(format!("{error:?}"), "there is no axis 3; the tensor has 2, counted from 0");
        let fault = OperandFault::Activations { weights: 64, activations: 63 };
        let message =
            "the activations have 63 columns and the weights 64; pass activations of shape [tokens, 64]";
        assert_eq!(format!("{:?}", Error::Operands(fault)), message);
    }

    #[test]
    fn out_of_memory_differs_from_other_driver_errors() {
        let gpu = |code| Error::Gpu { doing: "allocating", code, message: "no".into() };
        assert!(gpu(Some(OUT_OF_MEMORY)).is_out_of_memory());
        assert_eq!(gpu(Some(OUT_OF_MEMORY)).to_string(), "the GPU failed while allocating: no");
        for other in [gpu(None), gpu(Some(1)), gpu(Some(700)), Error::NoGpu("out of memory".into())] {
            assert!(!other.is_out_of_memory(), "{other:?}");
        }
    }
}
