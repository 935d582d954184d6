//! Float tensors of a file as typed slices.

use std::borrow::Cow;

use bytemuck::Pod;
use half::{bf16, f16};
use microscale::{Dtype, Element, ErrorStats};

use crate::dtype::FileDtype;

/// The dtype of the values of a file dtype; `None` if they cannot be quantized.
pub fn float_dtype(dtype: FileDtype) -> Option<Dtype> {
    match dtype {
        FileDtype::F32 => Some(Dtype::F32),
        FileDtype::F16 => Some(Dtype::F16),
        FileDtype::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}

/// The file dtype of a dtype.
pub fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::F16 => FileDtype::F16,
        Dtype::Bf16 => FileDtype::BF16,
    }
}

/// The values of a tensor: a view of the mapped file if it is aligned, otherwise a copy.
#[derive(Clone, Debug)]
pub enum Values<'a> {
    /// Values of dtype F32.
    F32(Cow<'a, [f32]>),
    /// Values of dtype F16.
    F16(Cow<'a, [f16]>),
    /// Values of dtype BF16.
    Bf16(Cow<'a, [bf16]>),
}

/// Evaluates an expression with the typed slice of a [`Values`] of any dtype.
macro_rules! with_values {
    ($values:expr, $slice:ident => $body:expr) => {
        match $values {
            $crate::Values::F32($slice) => $body,
            $crate::Values::F16($slice) => $body,
            $crate::Values::Bf16($slice) => $body,
        }
    };
}
pub(crate) use with_values;

impl<'a> Values<'a> {
    /// The values in a tensor's bytes; `None` for a dtype that cannot be quantized.
    pub fn new(dtype: FileDtype, bytes: &'a [u8]) -> Option<Self> {
        Some(match float_dtype(dtype)? {
            Dtype::F32 => Self::F32(typed(bytes)),
            Dtype::F16 => Self::F16(typed(bytes)),
            Dtype::Bf16 => Self::Bf16(typed(bytes)),
        })
    }

    /// The index of the first value with other bits; `None` for other dtypes.
    pub(crate) fn first_difference(&self, other: &Values<'_>) -> Option<usize> {
        fn first<T: Pod>(a: &[T], b: &[T]) -> Option<usize> {
            let bits = |values| bytemuck::cast_slice::<T, u8>(values);
            if bits(a) == bits(b) {
                return None;
            }
            a.iter().zip(b).position(|(a, b)| bytemuck::bytes_of(a) != bytemuck::bytes_of(b))
        }
        match (self, other) {
            (Self::F32(a), Values::F32(b)) => first(a, b),
            (Self::F16(a), Values::F16(b)) => first(a, b),
            (Self::Bf16(a), Values::Bf16(b)) => first(a, b),
            _ => None,
        }
    }

    /// The partial sums of the errors of `other` against these values, which must have the same
    /// length, as [`ErrorStats::parts_between`] returns them.
    pub(crate) fn error_parts(&self, other: &Values<'_>) -> Vec<ErrorStats> {
        with_values!(self, a => with_values!(other, b => ErrorStats::parts_between(a, b)))
    }
}

/// Files guarantee no alignment: a header of odd length misaligns everything after it.
pub(crate) fn typed<T: Element + Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(values) => Cow::Borrowed(values),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_bytes_are_copied_and_aligned_ones_are_not() {
        let aligned = [1.0f32, -2.5, f32::MAX, 0.0];
        let bytes: &[u8] = bytemuck::cast_slice(&aligned);
        let mut moved = vec![0u8; bytes.len() + 8];
        let start = 1 + moved.as_ptr().align_offset(4);
        moved[start..start + bytes.len()].copy_from_slice(bytes);
        let (here, there) = (typed::<f32>(bytes), typed::<f32>(&moved[start..start + bytes.len()]));
        assert_eq!((&here[..], &there[..]), (&aligned[..], &aligned[..]));
        assert!(matches!((here, there), (Cow::Borrowed(_), Cow::Owned(_))));
    }
}
