//! The order of two 4-bit codes in a byte.

/// The half of a byte that holds the first of two codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NibbleOrder {
    /// The low half, as in this library and most files.
    #[default]
    LowFirst,
    /// The high half.
    HighFirst,
}

impl NibbleOrder {
    /// Returns code `index` of packed codes. It must be in range.
    pub(crate) fn code(self, codes: &[u8], index: usize) -> u8 {
        let high = (index % 2 == 1) != (self == Self::HighFirst);
        let byte = codes[index / 2];
        if high { byte >> 4 } else { byte & 0xF }
    }
}

/// Converts packed codes between the two orders.
pub(crate) fn swap_nibbles(codes: &mut [u8]) {
    codes.iter_mut().for_each(|byte| *byte = byte.rotate_right(4));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swapped_codes_read_the_same_in_the_other_order() {
        let codes = [0x21, 0x43];
        let read = |order: NibbleOrder, codes: &[u8]| [0, 1, 2, 3].map(|index| order.code(codes, index));
        assert_eq!(read(NibbleOrder::LowFirst, &codes), [1, 2, 3, 4]);
        let mut swapped = codes;
        swap_nibbles(&mut swapped);
        assert_eq!(read(NibbleOrder::HighFirst, &swapped), [1, 2, 3, 4]);
    }
}
