//! The types of elements that are read.

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    F32,
    F16,
    Bf16,
    /// Bytes, or floats of one byte.
    Bytes,
    /// Whole numbers of 32 bits, such as the numbers of experts.
    Indices,
    /// Whole numbers of 64 bits, such as slots of a cache.
    Longs,
}

impl Kind {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Longs => 8,
            Self::F32 | Self::Indices => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Bytes => 1,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Bytes => "uint8",
            Self::Indices => "int32",
            Self::Longs => "int64",
        }
    }
}
