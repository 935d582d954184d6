//! Values with a run-time dtype.
//!
//! With a type parameter, every program would compile the instances of all instruction sets again.

use half::{bf16, f16};

use crate::element::{Dtype, Element};

/// Values of a dtype.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// Mutable values of a dtype.
pub(crate) enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

/// Evaluates the same expression for values of each dtype.
macro_rules! by_dtype {
    ($Elements:ident, $values:ident => $expr:expr) => {
        match $values {
            $Elements::F32($values) => $expr,
            $Elements::F16($values) => $expr,
            $Elements::Bf16($values) => $expr,
        }
    };
}
pub(crate) use by_dtype;

impl<'a> Elements<'a> {
    pub(crate) fn of<T: Element>(values: &'a [T]) -> Self {
        match T::DTYPE {
            Dtype::F32 => Self::F32(bytemuck::cast_slice(values)),
            Dtype::F16 => Self::F16(bytemuck::cast_slice(values)),
            Dtype::Bf16 => Self::Bf16(bytemuck::cast_slice(values)),
        }
    }

    pub(crate) fn dtype(self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Returns `len` values from `start` on.
    pub(crate) fn part(self, start: usize, len: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[start..][..len]),
            Self::F16(values) => Self::F16(&values[start..][..len]),
            Self::Bf16(values) => Self::Bf16(&values[start..][..len]),
        }
    }
}

impl<'a> ElementsMut<'a> {
    pub(crate) fn of<T: Element>(values: &'a mut [T]) -> Self {
        match T::DTYPE {
            Dtype::F32 => Self::F32(bytemuck::cast_slice_mut(values)),
            Dtype::F16 => Self::F16(bytemuck::cast_slice_mut(values)),
            Dtype::Bf16 => Self::Bf16(bytemuck::cast_slice_mut(values)),
        }
    }

    /// Splits off the first `len` values, or all if there are fewer.
    pub(crate) fn split_off(&mut self, len: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(split_first(values, len)),
            Self::F16(values) => Self::F16(split_first(values, len)),
            Self::Bf16(values) => Self::Bf16(split_first(values, len)),
        }
    }
}

/// Splits off the first `len` elements of a slice, or all if there are fewer.
pub(crate) fn split_first<'a, T>(all: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let len = len.min(all.len());
    all.split_off_mut(..len).unwrap_or_default()
}
