//! Shapes of matrices: contiguous rows, quantized matrices, and arbitrary strides.

use microscale_formats::{Format, ScaleLayout};

/// The shape of an unquantized matrix with contiguous rows. Blocks run along rows.
///
/// All counts are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// Elements in a row (K).
    ///
    /// K need not be a multiple of the block. The last block is padded with zeros.
    pub cols: usize,
    /// Distance from one row's start to the next's, at least `cols`.
    pub row_stride: usize,
}

impl Shape {
    /// Returns the shape of rows without gaps.
    pub const fn new(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols }
    }

    /// Sets the distance between rows.
    pub const fn with_row_stride(self, row_stride: usize) -> Self {
        Self { row_stride, ..self }
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }

    /// Returns the number of elements without padding and gaps, at most `usize::MAX`.
    pub const fn elements(&self) -> usize {
        self.rows.saturating_mul(self.cols)
    }
}

/// The shape of an unquantized matrix in memory: contiguous rows, or arbitrary strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixShape {
    /// Rows of contiguous elements.
    Rows(Shape),
    /// Rows with strides, along any axis of a tensor.
    Strided(Strided),
}

impl From<Shape> for MatrixShape {
    fn from(shape: Shape) -> Self {
        Self::Rows(shape)
    }
}

impl From<Strided> for MatrixShape {
    fn from(strided: Strided) -> Self {
        Self::Strided(strided)
    }
}

impl MatrixShape {
    /// Returns the shape of a copy without gaps.
    pub const fn dense(&self) -> Shape {
        match self {
            Self::Rows(shape) => Shape::new(shape.rows, shape.cols),
            Self::Strided(strided) => strided.shape(),
        }
    }

    /// Returns the matrix as strides, even if its rows are contiguous.
    pub(crate) const fn strided(&self) -> Strided {
        match self {
            Self::Rows(shape) => Strided::of_rows(*shape),
            Self::Strided(strided) => *strided,
        }
    }
}

/// The shape of a quantized matrix. It determines the number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizedShape {
    /// The format.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Elements in a row (K), without padding.
    pub cols: usize,
    /// The layout of scale bytes.
    pub scale_layout: ScaleLayout,
}

impl QuantizedShape {
    /// Returns the shape of a matrix in a format, with linear scales.
    pub const fn new(format: Format, rows: usize, cols: usize) -> Self {
        Self { format, rows, cols, scale_layout: ScaleLayout::Linear }
    }

    /// Sets the layout of scales.
    pub const fn with_scale_layout(self, scale_layout: ScaleLayout) -> Self {
        Self { scale_layout, ..self }
    }

    /// Returns the blocks in a row.
    pub const fn blocks_per_row(&self) -> usize {
        self.cols.div_ceil(self.format.block())
    }
}

/// `outer · rows` rows of `cols` elements. Blocks run along the rows.
///
/// The element at column k of row `o · rows + r` is at offset `o · outer_stride + r · row_stride +
/// k · col_stride`. Strides are in elements and at least 1. The stride of a count of 1 or 0 is
/// ignored. Rows may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Groups of rows.
    pub outer: usize,
    /// Distance from one group's first element to the next's.
    pub outer_stride: usize,
    /// Rows in a group.
    pub rows: usize,
    /// Distance from one row's first element to the next's.
    pub row_stride: usize,
    /// Elements in a row (K). It need not be a multiple of the block.
    pub cols: usize,
    /// Distance from one element of a row to the next.
    pub col_stride: usize,
}

impl Strided {
    /// Describes rows of contiguous elements.
    pub(crate) const fn of_rows(shape: Shape) -> Self {
        let Shape { rows, cols, row_stride } = shape;
        Self { outer: 1, outer_stride: 0, rows, row_stride, cols, col_stride: 1 }
    }

    /// Returns the shape of a copy without gaps, which has the same quantized form.
    ///
    /// The number of rows is at most `usize::MAX`.
    pub const fn shape(&self) -> Shape {
        Shape::new(self.outer.saturating_mul(self.rows), self.cols)
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.outer == 0 || self.rows == 0 || self.cols == 0
    }
}
