//! Matrix descriptors: a matrix's layout in shared memory.
//!
//! `wgmma` has one format (ISA 9.7.15.5.1, "Matrix Descriptor Format"), `tcgen05` another
//! (9.7.16.4, "Shared memory descriptor"). The layout is K-major: a row here has 32 bytes and may
//! be a column of B.

/// Bytes of a piece. A row has two.
pub(crate) const PIECE: usize = 16;

/// The address, the two strides and the base offset.
const FIELDS: u64 = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 7 << 49;

/// A matrix whose rows have 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    start: u64,
    /// Distance between the two pieces of a row, without swizzling.
    leading: u64,
    /// Distance between groups of eight rows.
    stride: u64,
    /// Row size of the swizzle pattern in bytes, 16 without swizzling.
    row: u64,
}

impl Descriptor {
    /// Decodes a descriptor of `wgmma` for a matrix of `rows` rows.
    pub(crate) fn new(bits: u64, rows: usize) -> Result<Self, &'static str> {
        if bits & !(FIELDS | 3 << 62) != 0 {
            return Err("bits outside its fields are set");
        }
        let row = match bits >> 62 {
            0 => 16,
            1 => 128,
            2 => 64,
            _ => 32,
        };
        Self::with(bits, rows, row)
    }

    /// Decodes a descriptor of `tcgen05` for a matrix of `rows` rows.
    pub(crate) fn tensor(bits: u64, rows: usize) -> Result<Self, &'static str> {
        if bits & !(FIELDS | 7 << 46 | 7 << 61) != 0 {
            return Err("bits outside its fields are set");
        }
        if bits >> 46 & 7 != 1 {
            return Err("bits 46 to 48 are not 1");
        }
        let row = match bits >> 61 {
            0 => 16,
            2 => 128,
            4 => 64,
            6 => 32,
            _ => return Err("its swizzle mode does not exist, or has atoms of 32 bytes"),
        };
        Self::with(bits, rows, row)
    }

    fn with(bits: u64, rows: usize, row: u64) -> Result<Self, &'static str> {
        let field = |at: u32| (bits >> at & 0x3fff) << 4;
        let descriptor = Self { start: field(0), leading: field(16), stride: field(32), row };
        if row == 16 {
            return Ok(descriptor);
        }
        // A pattern of eight rows starts at a multiple of its size. Only an offset along K may be
        // added.
        if bits >> 49 & 7 != 0 || descriptor.start & (8 * row - 1) & !(row - 1) != 0 {
            return Err("its swizzle pattern does not start at a multiple of the pattern's size");
        }
        if rows > 8 && !descriptor.stride.is_multiple_of(8 * row) {
            return Err("its stride is not a multiple of the size of its swizzle pattern");
        }
        if descriptor.start % row + 2 * PIECE as u64 > row {
            return Err("it extends beyond a row of its swizzle pattern");
        }
        Ok(descriptor)
    }

    /// Returns the address of a row's first or second piece.
    pub(crate) fn piece(&self, row: usize, second: bool) -> u64 {
        let (row, second) = (row as u64, u64::from(second));
        let rows = self.start + row / 8 * self.stride + row % 8 * self.row;
        if self.row == 16 {
            return rows + second * self.leading;
        }
        let plain = rows + second * PIECE as u64;
        // Swizzling XORs the piece index with the row number, counted in lines of 128 bytes.
        plain ^ (plain >> 7 & (self.row / PIECE as u64 - 1)) << 4
    }
}
