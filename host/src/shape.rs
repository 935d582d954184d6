//! The shapes of matrices: in memory, quantized, and with elements that lie anywhere.

use microscale_formats::{Format, ScaleLayout};

/// The shape of an unquantized matrix in memory. Blocks run along rows; counts are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows.
    pub rows: usize,
    /// Elements in a row (K). It need not be a multiple of the block: the last block is padded with zeros.
    pub cols: usize,
    /// Elements from one row's start to the next's, at least `cols`.
    pub row_stride: usize,
}

impl Shape {
    /// Rows that follow each other without gaps.
    pub const fn new(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols }
    }

    /// The same rows, `row_stride` elements apart.
    pub const fn with_row_stride(self, row_stride: usize) -> Self {
        Self { row_stride, ..self }
    }

    /// Returns whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }

    /// Elements, padding and gaps not counted; at most `usize::MAX`.
    pub const fn elements(&self) -> usize {
        self.rows.saturating_mul(self.cols)
    }
}

/// The shape of an unquantized matrix in memory: rows of contiguous elements, or elements that lie anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixShape {
    /// Rows whose elements follow each other.
    Rows(Shape),
    /// Rows with strides of their own, along any axis of a tensor.
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
    /// The shape of a copy without gaps.
    pub const fn dense(&self) -> Shape {
        match self {
            Self::Rows(shape) => Shape::new(shape.rows, shape.cols),
            Self::Strided(strided) => strided.shape(),
        }
    }

    /// The strides, also of rows.
    pub(crate) const fn strided(&self) -> Strided {
        match self {
            Self::Rows(shape) => Strided::of_rows(*shape),
            Self::Strided(strided) => *strided,
        }
    }
}

/// The shape of a quantized matrix, from which its bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizedShape {
    /// The format.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Elements in a row (K), padding not counted.
    pub cols: usize,
    /// The layout of scale bytes.
    pub scale_layout: ScaleLayout,
}

impl QuantizedShape {
    /// The shape of a matrix in a format, with linear scales.
    pub const fn new(format: Format, rows: usize, cols: usize) -> Self {
        Self { format, rows, cols, scale_layout: ScaleLayout::Linear }
    }

    /// The same matrix with its scales in another layout.
    pub const fn with_scale_layout(self, scale_layout: ScaleLayout) -> Self {
        Self { scale_layout, ..self }
    }

    /// Blocks in a row.
    pub const fn blocks_per_row(&self) -> usize {
        self.cols.div_ceil(self.format.block())
    }
}

/// `outer · rows` rows of `cols` elements, along which blocks run. The element at column k of row `o · rows +
/// r` is `o · outer_stride + r · row_stride + k · col_stride` elements behind the first.
///
/// Strides are at least 1, in elements; that of a count of 1 or 0 means nothing. Rows may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Groups of rows.
    pub outer: usize,
    /// The distance from one group's first element to the next's.
    pub outer_stride: usize,
    /// Rows in a group.
    pub rows: usize,
    /// The distance from one row's first element to the next's.
    pub row_stride: usize,
    /// Elements in a row (K). It need not be a multiple of the block.
    pub cols: usize,
    /// The distance from one element of a row to the next.
    pub col_stride: usize,
}

impl Strided {
    /// Rows of contiguous elements.
    pub(crate) const fn of_rows(shape: Shape) -> Self {
        let Shape { rows, cols, row_stride } = shape;
        Self { outer: 1, outer_stride: 0, rows, row_stride, cols, col_stride: 1 }
    }

    /// The shape of a copy without gaps, which has the same quantized form. Rows are at most `usize::MAX`.
    pub const fn shape(&self) -> Shape {
        Shape::new(self.outer.saturating_mul(self.rows), self.cols)
    }

    /// Returns whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.outer == 0 || self.rows == 0 || self.cols == 0
    }
}
