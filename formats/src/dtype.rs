//! The dtypes of unquantized values.

use crate::words;

/// The dtype of unquantized values. Kernels take it by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

words!(Dtype, "dtype" { Self::F32 = "f32", Self::F16 = "f16", Self::Bf16 = "bf16" });

impl Dtype {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}
