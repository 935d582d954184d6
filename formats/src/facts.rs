//! Facts of formats: the descriptor [`Facts`] and the types of its fields.

use crate::mx::{self, Element};
use crate::nf4;
use crate::scale::ScaleType;
use crate::{E2m1, E3m0, E4m3, E5m2};

/// The facts of a format.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Facts {
    /// The format's name on command lines, in files and in messages.
    pub word: &'static str,
    /// Shape of the elements that share a block scale.
    pub block: BlockShape,
    /// Type of the elements.
    pub element: ElementType,
    /// Type of the block scales.
    pub scale: ScaleType,
    /// How a global scale is used.
    pub global_scale: GlobalScaleUse,
}

/// The shape of a block within a matrix. Today every block lies along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl BlockShape {
    /// Returns the shape of a block of `cols` elements along a row.
    pub const fn row_of(cols: usize) -> Self {
        Self { rows: 1, cols }
    }

    /// Returns the number of elements.
    pub const fn elements(self) -> usize {
        self.rows * self.cols
    }
}

/// How a tensor's global scale enters the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GlobalScaleUse {
    /// The format has no global scale.
    None,
    /// The global scale multiplies the block scales: a value is element · block scale · global
    /// scale.
    ///
    /// It is optional.
    UnderBlockScales,
}

/// The type of a format's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// [`E2m1`]. It has kernels, vector code, scale searches and products.
    E2m1,
    /// [`E4m3`].
    E4m3,
    /// [`E5m2`].
    E5m2,
    /// [`E3m0`].
    E3m0,
    /// The codebook of [`nf4`].
    Nf4,
}

impl ElementType {
    /// Returns the bits of a code, 4 or 8.
    pub const fn bits(self) -> usize {
        match self {
            Self::E2m1 => <E2m1 as Element>::BITS,
            Self::E4m3 => <E4m3 as Element>::BITS,
            Self::E5m2 => <E5m2 as Element>::BITS,
            Self::E3m0 => <E3m0 as Element>::BITS,
            Self::Nf4 => 4,
        }
    }

    /// Returns the largest finite value.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E2m1 => mx::largest::<E2m1>(),
            Self::E4m3 => mx::largest::<E4m3>(),
            Self::E5m2 => mx::largest::<E5m2>(),
            Self::E3m0 => mx::largest::<E3m0>(),
            Self::Nf4 => nf4::value(15),
        }
    }

    /// Returns the value of a code.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Self::E2m1 => <E2m1 as Element>::decode(code),
            Self::E4m3 => <E4m3 as Element>::decode(code),
            Self::E5m2 => <E5m2 as Element>::decode(code),
            Self::E3m0 => <E3m0 as Element>::decode(code),
            Self::Nf4 => nf4::value(code),
        }
    }
}
