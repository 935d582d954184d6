//! ggml's tensor types: their names and block sizes.
//!
//! The sizes follow the structures in ggml-common.h. gguf-py 0.19.0 agrees except for Q8_1, which
//! files never contain: it says 40 bytes, from when the scale and the sum were f32. They are f16
//! now.

use std::fmt;

/// The largest number of dimensions.
pub(crate) const MAX_DIMS: usize = 4;

/// The type of a tensor's elements, by ggml's number. Unknown numbers are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GgmlType(u32);

/// The unit of storage: a block of elements, or a single element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Elements per block, adjacent in a row.
    pub(crate) elements: u64,
    /// Bytes per block.
    pub(crate) bytes: u64,
}

/// Number, name as ggml prints it, elements and bytes of a block. ggml has retired the missing
/// numbers.
const KNOWN: &[(u32, &str, u64, u64)] = &[
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_K", 256, 84),
    (11, "q3_K", 256, 110),
    (12, "q4_K", 256, 144),
    (13, "q5_K", 256, 176),
    (14, "q6_K", 256, 210),
    (15, "q8_K", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
];

impl GgmlType {
    /// binary32.
    pub const F32: Self = Self(0);
    /// binary16.
    pub const F16: Self = Self(1);
    /// bfloat16.
    pub const BF16: Self = Self(30);
    /// Q8_0: blocks of 32 elements, an f16 scale and 8-bit codes.
    pub const Q8_0: Self = Self(8);
    /// MXFP4: blocks of 32 elements, one scale byte and 4-bit codes.
    pub const MXFP4: Self = Self(39);
    /// NVFP4: blocks of 64 elements, four scale bytes and 4-bit codes.
    pub const NVFP4: Self = Self(40);

    /// The type with a number.
    pub const fn from_id(id: u32) -> Self {
        Self(id)
    }

    /// All types with known blocks.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        KNOWN.iter().map(|(id, ..)| Self(*id))
    }

    /// ggml's number.
    pub const fn id(self) -> u32 {
        self.0
    }

    fn known(self) -> Option<&'static (u32, &'static str, u64, u64)> {
        KNOWN.iter().find(|(id, ..)| *id == self.0)
    }

    /// The block of a type; `None` if the type is not known.
    pub(crate) fn block(self) -> Option<Block> {
        self.known().map(|&(.., elements, bytes)| Block { elements, bytes })
    }

    /// The size in bytes of a tensor with this shape, slowest dimension first.
    ///
    /// # Errors
    /// A message for shapes that ggml refuses and for unknown types.
    pub(crate) fn bytes_of(self, shape: &[usize]) -> Result<u64, String> {
        let block = self.block().ok_or_else(|| {
            format!("{self} is no type that is known, so its size is unknown; it may be from a newer ggml or another program")
        })?;
        if shape.len() > MAX_DIMS {
            return Err(format!("it has {} dimensions, and ggml has no more than {MAX_DIMS}", shape.len()));
        }
        // Zeros are ignored here: callers that multiply only some of the sizes must not overflow
        // either.
        let countable =
            shape.iter().try_fold(1u64, |product, size| product.checked_mul((*size as u64).max(1)));
        if countable.is_none_or(|countable| countable >= i64::MAX as u64) {
            return Err(format!("the shape {shape:?} has more elements than can be counted"));
        }
        let elements: u64 = shape.iter().map(|size| *size as u64).product();
        let row = shape.last().map_or(1, |size| *size as u64);
        if !row.is_multiple_of(block.elements) {
            return Err(format!(
                "rows of {row} elements are not whole blocks of {}, which {self} has",
                block.elements
            ));
        }
        let bytes = (elements / block.elements).checked_mul(block.bytes);
        bytes.ok_or_else(|| format!("{self} of shape {shape:?} has more bytes than can be counted"))
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some((_, name, ..)) => f.write_str(name),
            None => write!(f, "ggml type {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_types_are_in_order_and_named_once() {
        assert!(KNOWN.windows(2).all(|pair| pair[0].0 < pair[1].0));
        for (i, (_, name, elements, bytes)) in KNOWN.iter().enumerate() {
            assert!(KNOWN[..i].iter().all(|(_, other, ..)| other != name), "{name}");
            assert!(*elements > 0 && *bytes > 0, "{name}");
        }
        for (found, name) in [
            (GgmlType::F32, "f32"),
            (GgmlType::F16, "f16"),
            (GgmlType::BF16, "bf16"),
            (GgmlType::MXFP4, "mxfp4"),
            (GgmlType::NVFP4, "nvfp4"),
            (GgmlType::from_id(12), "q4_K"),
            (GgmlType::from_id(31), "ggml type 31"),
        ] {
            assert_eq!(found.to_string(), name);
        }
    }

    #[test]
    fn sizes_of_tensors() {
        let bytes = |id, shape: &[usize]| GgmlType::from_id(id).bytes_of(shape).ok();
        assert_eq!(bytes(0, &[]), Some(4));
        assert_eq!(bytes(30, &[3, 5]), Some(30));
        assert_eq!(bytes(39, &[2, 3, 64]), Some(2 * 3 * 2 * 17));
        assert_eq!(bytes(40, &[3, 128]), Some(3 * 2 * 36));
        assert_eq!(bytes(14, &[256, 0]), Some(0));
        assert_eq!(bytes(40, &[64, 32]), None, "half a block a row");
        assert_eq!(bytes(39, &[]), None, "one element is no block");
        assert_eq!(bytes(36, &[256]), None, "a type that ggml took back");
        assert_eq!(bytes(0, &[1, 1, 1, 1, 1]), None, "five dimensions");
        let half = 1 << 32;
        assert_eq!(bytes(24, &[half, half]), None, "2^64 elements");
        assert_eq!(bytes(24, &[half, half / 2]), None, "2^63 elements");
        assert_eq!(bytes(0, &[half, half / 4]), None, "2^64 bytes");
        for shape in [[half, half, 0], [0, half, half]] {
            assert_eq!(bytes(0, &shape), None, "a product that overflows on its way to none");
        }
    }
}
