//! Errors of tensor operations. Checkpoint files have their own, in the crate `microscale-checkpoint`.

mod operands;

use microscale_formats::nvfp4::Direction;
use microscale_formats::{Format, GlobalScale, Words};

pub use operands::OperandFault;

use crate::report::{Position, Report};
use crate::scheme::Convention;
use crate::shape::{QuantizedShape, Strided};

/// The result of the library's tensor operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a tensor could not be quantized or dequantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The slice is too short for the shape.
    #[error(
        "{what} has {found} elements, but {rows} rows of {cols} with row stride {row_stride} reach over {expected}; \
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
        /// Elements that the shape reaches over.
        expected: usize,
        /// Elements in the slice.
        found: usize,
    },

    /// There is no exact cast from a format to another one.
    #[error("{from} is not cast to {to} exactly; dequantize, and quantize again")]
    NotCast {
        /// The format of the tensor.
        from: Format,
        /// The format asked for.
        to: Format,
    },

    /// Block scales that another format cannot hold over the same codes.
    #[error(
        "the scales of its blocks span {span} powers of two, and NVFP4's have 18; dequantize, and quantize again"
    )]
    NotExact {
        /// The powers of two from the least scale to the largest, both included.
        span: u32,
    },

    /// A block whose values another format cannot hold under any scale.
    #[error(
        "block {block} has values that no scale makes exact in {to} (of {columns} columns, blocks of 32); dequantize, and quantize again"
    )]
    NotExactBlock {
        /// The format asked for.
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
        /// The stride asked for, in elements.
        row_stride: usize,
    },

    /// The shape counts more elements than can be addressed.
    #[error("{rows} rows of {cols} with row stride {row_stride} are more elements than can be addressed")]
    TooLarge {
        /// Rows of the shape.
        rows: usize,
        /// Columns of the shape.
        cols: usize,
        /// Row stride of the shape, in elements.
        row_stride: usize,
    },

    /// No such axis.
    #[error("there is no axis {axis}; the tensor has {rank}, counted from 0")]
    Axis {
        /// The axis asked for.
        axis: usize,
        /// Dimensions of the tensor.
        rank: usize,
    },

    /// Strides that do not describe rows.
    #[error(
        "strides {strides:?} of dimensions {dims:?} do not describe rows along axis {axis}; there must be a stride for each \
         dimension, and the other axes at most two groups that one stride each passes through: quantize slices of the tensor"
    )]
    Strides {
        /// The dimensions.
        dims: Vec<usize>,
        /// The strides, in elements.
        strides: Vec<usize>,
        /// The axis along which blocks run.
        axis: usize,
    },

    /// A stride of 0.
    #[error("{what} is 0, so elements would be the same one; it must be 1 or more")]
    ZeroStride {
        /// The name of the stride.
        what: &'static str,
    },

    /// The slice is too short for the strides.
    #[error(
        "the input has {found} elements, but {} times {} rows of {} with strides {}, {} and {} reach over {expected}; \
         pass a longer slice, fewer rows or smaller strides",
        .strided.outer, .strided.rows, .strided.cols,
        .strided.outer_stride, .strided.row_stride, .strided.col_stride
    )]
    StridedLength {
        /// The matrix that should be there.
        strided: Strided,
        /// Elements that it reaches over.
        expected: usize,
        /// Elements in the slice.
        found: usize,
    },

    /// The strides reach over more elements than can be addressed.
    #[error(
        "{} times {} rows of {} with strides {}, {} and {} are more elements than can be addressed; check dimensions and strides",
        .strided.outer, .strided.rows, .strided.cols,
        .strided.outer_stride, .strided.row_stride, .strided.col_stride
    )]
    StridedTooLarge {
        /// The matrix that was asked for.
        strided: Strided,
    },

    /// Codes or scales of another length than the shape needs.
    #[error(
        "{what} have {found} bytes, but {} rows of {} in {} with {} scales need exactly {expected}",
        .shape.rows, .shape.cols, .shape.format, .shape.scale_layout
    )]
    QuantizedLength {
        /// Codes or scales.
        what: &'static str,
        /// The shape that they should have.
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
        /// The shape that is needed.
        expected: QuantizedShape,
        /// The shape of the tensor.
        found: QuantizedShape,
    },

    /// A convention that a format does not have.
    #[error("{format} has no convention {convention}; it has {}", conventions(*.format))]
    NoConvention {
        /// The format.
        format: Format,
        /// The convention.
        convention: Convention,
    },

    /// A search for the scales of a format that has none.
    #[error(
        "the scales of {format} cannot be searched; those of mxfp4 and nvfp4 can, or quantize without a search"
    )]
    NoSearch {
        /// The format.
        format: Format,
    },

    /// Importance that does not fit the columns.
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
        "block {block} of row {row} has the scale byte {chosen:#04x}, but {better:#04x} errs less: a full search missed it; \
         please report this, or check the result of a full search with the same importance"
    )]
    SkippedScale {
        /// The row.
        row: usize,
        /// The block in its row.
        block: usize,
        /// The scale's byte.
        chosen: u8,
        /// One that errs less.
        better: u8,
    },

    /// A Hessian where scales are not searched.
    #[error(
        "a Hessian weighs the errors that a search for scales compares, and the recipe has none; \
         set its search to four-six, window or full, or quantize without a Hessian"
    )]
    HessianWithoutSearch,

    /// A Hessian for a GPU.
    #[error("GPUs search scales without Hessians; quantize on the CPU, or by importance of columns")]
    HessianOnGpu,

    /// A Hessian with another number of entries than the columns need.
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

    /// A matrix that is no Hessian.
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

    /// A global scale that does not go with a convention.
    #[error(
        "the global scale is a {} but the convention takes a {}; \
         pass its inverse as that, or choose a convention of the other direction",
        .given, .expected
    )]
    GlobalScaleDirection {
        /// The direction of the one that is given.
        given: Direction,
        /// The direction of the convention.
        expected: Direction,
    },

    /// A number that cannot be a global scale.
    #[error(
        "a global scale of {} as a {} is out of range; it must be positive and normal, and the largest block scale, 448, \
         must stay finite under it",
        .given.value(), .given.direction()
    )]
    GlobalScale {
        /// The one that is given.
        given: GlobalScale,
    },

    /// A global scale for a format that has none.
    #[error("{format} has no global scale; only nvfp4 has one")]
    NoGlobalScale {
        /// The format.
        format: Format,
    },

    /// A scale with its sign bit set, of a format whose scales have no sign.
    #[error(
        "scale {index} is {scale:#04x}: its sign bit is set, which {format} does not know; \
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

    /// A format that GPUs do not compute.
    #[error("{format} is a format to compare with, which no GPU computes; use the CPU (`--device cpu`)")]
    NoKernel {
        /// The format.
        format: Format,
    },

    /// The input holds NaN or infinities and the policy is to refuse them.
    #[error(
        "the input holds {} NaN and {} infinite values, the first at row {}, column {}; \
         choose the non-finite policy propagate or saturate to go on",
        .report.nan, .report.infinite, .first.row, .first.col
    )]
    NonFinite {
        /// The first one.
        first: Position,
        /// All counts of the tensor.
        report: Report,
    },

    /// Device memory that does not start where kernels need it to.
    #[error(
        "the address of {what}, {address:#x}, is not a multiple of {needed}, as the GPU's kernels need it; \
         copy to memory that starts so, or allocate it so"
    )]
    Alignment {
        /// The name of what starts there.
        what: &'static str,
        /// The address in device memory.
        address: u64,
        /// The number, in bytes, of which it must be a multiple.
        needed: usize,
    },

    /// Device memory of another context than the stream's.
    #[error(
        "the memory of {what} is of another GPU or CUDA context than the stream; copy it over, or use a stream of its context"
    )]
    OtherContext {
        /// The name of what lies there.
        what: &'static str,
    },

    /// A quantized output without memory for its global scale.
    #[error(
        "an output in {format} needs device memory for its global scale; pass {words} words by `with_global_slot`"
    )]
    NoGlobalSlot {
        /// The format.
        format: Format,
        /// Words of 32 bits that are needed.
        words: usize,
    },

    /// Operands of a product that do not go together.
    #[error(transparent)]
    Operands(OperandFault),

    /// An output differs from the reference's: a defect of this library, or of the machine.
    #[error("the output of {0} differs from the reference implementation's; please report this")]
    Wrong(&'static str),

    /// A measurement that `bench` does not make.
    #[error("{op} is not measured {how}")]
    NotMeasured {
        /// The operation.
        op: &'static str,
        /// The way in which it is not measured, and the alternative.
        how: &'static str,
    },

    /// No GPU can be used.
    #[error("no GPU can be used: {0}")]
    NoGpu(String),

    /// The CUDA driver refused a call. [`Self::is_out_of_memory`] tells want of memory from the rest.
    #[error("the GPU failed while {doing}: {message}")]
    Gpu {
        /// The operation asked for.
        doing: &'static str,
        /// The driver's code, a `CUresult`; `None` if the library itself gave up, not the driver.
        code: Option<i32>,
        /// The driver's word.
        message: String,
    },
}

/// The driver's code for want of memory.
pub(crate) const OUT_OF_MEMORY: i32 = 2;

impl Error {
    /// Returns whether a GPU ran out of memory, so that the same on less, or on the CPU, may do.
    ///
    /// ```
    /// use microscale::{Device, Quantized, Recipe, Result, Shape, quantize};
    ///
    /// fn quantize_somewhere(device: &Device, values: &[f32], shape: Shape) -> Result<Quantized> {
    ///     match device.quantize(values, shape, &Recipe::default()) {
    ///         Err(error) if error.is_out_of_memory() => quantize(values, shape, &Recipe::default()),
    ///         done => done,
    ///     }
    /// }
    /// # assert!(quantize_somewhere(&Device::Cpu, &[1.0; 64], Shape::new(2, 32)).is_ok());
    /// ```
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Gpu { code: Some(OUT_OF_MEMORY), .. })
    }
}

/// The fault of an entry of a Hessian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HessianFault {
    /// The entry is NaN or infinite.
    NotFinite,
    /// The entry is on the diagonal, and negative.
    NegativeDiagonal,
    /// The entry differs from the one that mirrors it by more than rounding explains.
    NotSymmetric,
}

impl HessianFault {
    fn what(self) -> &'static str {
        match self {
            Self::NotFinite => {
                "is not finite; look for NaN, infinities and overflow in the inputs that it was made of"
            }
            Self::NegativeDiagonal => {
                "is negative, as no sum of squares is; pass XᵀX of the layer's inputs X"
            }
            Self::NotSymmetric => {
                "differs from its mirror image by more than rounding explains; pass XᵀX, whole blocks row by row, or the \
                 mean of the matrix and its transpose"
            }
        }
    }
}

/// The conventions that a format has, by name.
fn conventions(format: Format) -> String {
    let all = Convention::WORDS.iter();
    let words: Vec<_> =
        all.filter(|(_, convention)| convention.scheme(format).is_some()).map(|(word, _)| *word).collect();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_memory_is_told_from_the_rest() {
        let gpu = |code| Error::Gpu { doing: "allocating", code, message: "no".into() };
        assert!(gpu(Some(OUT_OF_MEMORY)).is_out_of_memory());
        assert_eq!(gpu(Some(OUT_OF_MEMORY)).to_string(), "the GPU failed while allocating: no");
        for other in [gpu(None), gpu(Some(1)), gpu(Some(700)), Error::NoGpu("out of memory".into())] {
            assert!(!other.is_out_of_memory(), "{other:?}");
        }
    }
}
