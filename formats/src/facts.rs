//! Facts of formats: the descriptor, [`Facts`], and the types that it is made of.

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
    /// The elements that share a block scale.
    pub block: BlockShape,
    /// The elements.
    pub element: ElementType,
    /// The block scales.
    pub scale: ScaleType,
    /// The use of a global scale.
    pub global_scale: GlobalScaleUse,
}

/// The rows and columns of a matrix that a block lies across. Today all lie along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// Rows.
    pub rows: usize,
    /// Elements in each.
    pub cols: usize,
}

impl BlockShape {
    /// A block along a row.
    pub const fn row_of(cols: usize) -> Self {
        Self { rows: 1, cols }
    }

    /// Its elements.
    pub const fn elements(self) -> usize {
        self.rows * self.cols
    }
}

/// The place of a tensor's global scale in the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GlobalScaleUse {
    /// There is none.
    None,
    /// Applies to the block scales: a value is element · block scale · global scale. A tensor may do without.
    UnderBlockScales,
}

/// The type of a format's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// [`E2m1`], which has kernels, vector code, searches for scales and products.
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
    /// Bits of a code: 4 or 8.
    pub const fn bits(self) -> usize {
        match self {
            Self::E2m1 => <E2m1 as Element>::BITS,
            Self::E4m3 => <E4m3 as Element>::BITS,
            Self::E5m2 => <E5m2 as Element>::BITS,
            Self::E3m0 => <E3m0 as Element>::BITS,
            Self::Nf4 => 4,
        }
    }

    /// The largest finite value.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E2m1 => mx::largest::<E2m1>(),
            Self::E4m3 => mx::largest::<E4m3>(),
            Self::E5m2 => mx::largest::<E5m2>(),
            Self::E3m0 => mx::largest::<E3m0>(),
            Self::Nf4 => nf4::value(15),
        }
    }

    /// The value of a code.
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
