//! Layouts of tensor memory, and instruction descriptors of `tcgen05.mma` (ISA 9.7.16).

use microscale_formats::Format;

/// The part of a warp's lanes of tensor memory that `tcgen05.ld` and `tcgen05.st` access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// 32 lanes of 32 bits.
    Lanes32,
    /// 16 lanes of 64 bits.
    Bits64,
    /// 16 lanes of 128 bits.
    Bits128,
    /// 16 lanes of 256 bits.
    Bits256,
}

impl Fragment {
    /// Returns the fragment of a shape such as `32x32b`.
    pub(crate) fn new(shape: &str) -> Option<Self> {
        Some(match shape {
            "32x32b" => Self::Lanes32,
            "16x64b" => Self::Bits64,
            "16x128b" => Self::Bits128,
            "16x256b" => Self::Bits256,
            _ => return None,
        })
    }

    /// Number of registers per thread of one repetition.
    pub(crate) fn registers(self) -> usize {
        match self {
            Self::Lanes32 | Self::Bits64 => 1,
            Self::Bits128 => 2,
            Self::Bits256 => 4,
        }
    }

    /// Number of lanes of tensor memory.
    pub(crate) fn lanes(self) -> u32 {
        if self == Self::Lanes32 { 32 } else { 16 }
    }

    /// Returns the lane and the column of a thread's register, from the start of the fragment.
    pub(crate) fn place(self, register: u32, thread: u32) -> (u32, u32) {
        let (group, within) = (thread / 4, thread % 4);
        match self {
            Self::Lanes32 => (thread, register),
            Self::Bits64 => (group + within % 2 * 8, register * 2 + within / 2),
            Self::Bits128 => (group + register % 2 * 8, register / 2 * 4 + within),
            Self::Bits256 => (group + register / 2 % 2 * 8, register / 4 * 8 + within * 2 + register % 2),
        }
    }
}

/// A product with block scales, from its instruction descriptor (ISA table "Instruction descriptor
/// format for .kind::mxf4 and .kind::mxf4nvf4").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorProduct {
    /// Rows of A and columns of B, of both blocks of a pair.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Whether A and B are negated.
    pub(crate) negated: [bool; 2],
    /// The first byte to use of a word of scales, of A and B.
    pub(crate) first: [usize; 2],
}

impl TensorProduct {
    /// Decodes a descriptor.
    pub(crate) fn new(bits: u32, format: Format, pair: bool) -> Result<Self, &'static str> {
        const FIELDS: u32 =
            3 << 4 | 7 << 7 | 3 << 10 | 0xf << 13 | 0x3f << 17 | 1 << 23 | 3 << 27 | 3 << 29 | 1 << 31;
        let field = |at: u32, width: u32| bits >> at & ((1 << width) - 1);
        if bits & !FIELDS != 0 {
            return Err("bits outside its fields are set");
        }
        if (field(7, 3), field(10, 2)) != (1, 1) {
            return Err("the matrices are not E2M1");
        }
        if field(15, 2) != 0 {
            return Err("FP4 has no transposed matrices");
        }
        if field(23, 1) != u32::from(format != Format::Nvfp4) {
            return Err("the type of the scales differs from the instruction's");
        }
        if field(31, 1) != 0 {
            return Err("K is not 64");
        }
        let (rows, columns) = (field(27, 2) as usize * 128, field(17, 6) as usize * 8);
        let multiple = if pair { 16 } else { 8 };
        if !(multiple..=256).contains(&columns) || !columns.is_multiple_of(multiple) {
            return Err("this number of columns does not exist");
        }
        if rows != if pair { 256 } else { 128 } {
            return Err("this number of rows does not exist, or is not supported");
        }
        let first = [field(29, 2), field(4, 2)];
        if first.iter().any(|&first| first != 0 && (format == Format::Nvfp4 || first != 2)) {
            return Err("these scales do not exist");
        }
        Ok(Self {
            rows,
            columns,
            negated: [field(13, 1) == 1, field(14, 1) == 1],
            first: first.map(|first| first as usize),
        })
    }
}
