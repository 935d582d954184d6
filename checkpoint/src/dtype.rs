//! Dtypes of stored tensors: safetensors dtypes and ggml types in one type.

pub(crate) mod ggml;

use std::fmt;

use safetensors::Dtype as Plain;

use crate::dtype::ggml::GgmlType;

/// The dtype of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileDtype {
    /// One element at a time, as in safetensors files. GGUF's plain types map to these too.
    Plain(Plain),
    /// ggml's blocks of elements with scales, which only GGUF files have.
    Ggml(GgmlType),
}

/// Plain types that the code names. As constants they also work in patterns.
impl FileDtype {
    /// 8-bit unsigned integers.
    pub const U8: Self = Self::Plain(Plain::U8);
    /// 8-bit signed integers.
    pub const I8: Self = Self::Plain(Plain::I8);
    /// 32-bit signed integers.
    pub const I32: Self = Self::Plain(Plain::I32);
    /// 64-bit signed integers.
    pub const I64: Self = Self::Plain(Plain::I64);
    /// OCP E4M3, one byte, without infinities.
    pub const F8_E4M3: Self = Self::Plain(Plain::F8_E4M3);
    /// OCP E5M2, one byte, with infinities.
    pub const F8_E5M2: Self = Self::Plain(Plain::F8_E5M2);
    /// E8M0, powers of two, one byte.
    pub const F8_E8M0: Self = Self::Plain(Plain::F8_E8M0);
    /// binary16.
    pub const F16: Self = Self::Plain(Plain::F16);
    /// bfloat16.
    pub const BF16: Self = Self::Plain(Plain::BF16);
    /// binary32.
    pub const F32: Self = Self::Plain(Plain::F32);
    /// binary64.
    pub const F64: Self = Self::Plain(Plain::F64);

    /// Whether it is an 8-bit float with a mantissa.
    pub(crate) fn is_fp8(self) -> bool {
        use Plain::{F8_E4M3, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ};
        matches!(self, Self::Plain(F8_E4M3 | F8_E4M3FNUZ | F8_E5M2 | F8_E5M2FNUZ))
    }

    /// The plain type, if it is one.
    pub fn plain(self) -> Option<Plain> {
        match self {
            Self::Plain(plain) => Some(plain),
            Self::Ggml(_) => None,
        }
    }

    /// The ggml type with the same elements, if there is one.
    pub(crate) fn ggml(self) -> Option<GgmlType> {
        match self {
            Self::Ggml(kind) => Some(kind),
            plain => GgmlType::all().find(|kind| Self::from(*kind) == plain),
        }
    }

    /// The size of `elements` elements in bytes.
    pub(crate) fn bytes_of(self, elements: u64) -> u64 {
        match self {
            Self::Plain(plain) => elements * plain.bitsize() as u64 / 8,
            Self::Ggml(kind) => kind.block().map_or(0, |block| elements / block.elements * block.bytes),
        }
    }
}

impl From<Plain> for FileDtype {
    fn from(plain: Plain) -> Self {
        Self::Plain(plain)
    }
}

impl From<GgmlType> for FileDtype {
    fn from(kind: GgmlType) -> Self {
        let plain = match kind.id() {
            0 => Plain::F32,
            1 => Plain::F16,
            24 => Plain::I8,
            25 => Plain::I16,
            26 => Plain::I32,
            27 => Plain::I64,
            28 => Plain::F64,
            30 => Plain::BF16,
            _ => return Self::Ggml(kind),
        };
        Self::Plain(plain)
    }
}

impl fmt::Display for FileDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(plain) => plain.fmt(f),
            Self::Ggml(kind) => kind.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ggml type with single elements has the name of the safetensors dtype in lower case, and
    /// its size.
    #[test]
    fn plain_types_are_the_same_in_both_containers() {
        let mut plain = 0;
        for kind in (0..64).map(GgmlType::from_id) {
            let Some(block) = kind.block() else { continue };
            let dtype = FileDtype::from(kind);
            assert_eq!(dtype.plain().is_some(), block.elements == 1, "{kind}");
            assert_eq!(dtype.bytes_of(block.elements * 3), block.bytes * 3, "{kind}");
            assert_eq!(dtype.to_string().to_lowercase(), kind.to_string().to_lowercase());
            plain += usize::from(dtype.plain().is_some());
        }
        assert_eq!(plain, 8);
    }
}
