//! The limit on the size of a plan.

use std::fmt;

/// The largest size that a plan may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Bits per weight, scales included, on average over the tensors that can be quantized.
    Bits(f64),
    /// Bytes of all tensors of the checkpoint, unquantized ones included, without file headers.
    Bytes(u64),
}

/// Shows `4.6 bits per weight` or `1234 bytes`.
impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bits(bits) => write!(f, "{bits} bits per weight"),
            Self::Bytes(bytes) => write!(f, "{bytes} bytes"),
        }
    }
}

impl Budget {
    /// Returns the bytes for the tensors that can be quantized, which have `elements` weights.
    /// `others` are the bytes of all other tensors. `None` if these exceed the budget.
    pub(crate) fn bytes(self, elements: u64, others: u64) -> Option<u64> {
        match self {
            // A product that rounds down to just below a whole number counts as that number.
            // Casting clamps: negative numbers and NaN become 0.
            Self::Bits(bits) => {
                Some((bits * elements as f64 / 8.0 * (1.0 + 4.0 * f64::EPSILON)).floor() as u64)
            }
            Self::Bytes(bytes) => bytes.checked_sub(others),
        }
    }

    /// Returns the smallest budget of the same kind that holds `least` bytes of tensors that can be
    /// quantized.
    pub(crate) fn holding(self, least: u64, elements: u64, others: u64) -> Self {
        match self {
            Self::Bits(_) => {
                // Four decimals, rounded up.
                let bits = 8.0 * least as f64 / elements.max(1) as f64;
                Self::Bits((bits * 1e4).ceil() / 1e4)
            }
            Self::Bytes(_) => Self::Bytes(least + others),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_budget_holds_the_least_bytes() {
        for (least, elements) in [(288, 512), (1, 3), (12_345, 7_777), (1 << 40, (1 << 41) - 1)] {
            let bits = Budget::Bits(0.5).holding(least, elements, 9);
            assert!(bits.bytes(elements, 9) >= Some(least), "{bits}");
            assert_eq!(Budget::Bytes(0).holding(least, elements, 9), Budget::Bytes(least + 9));
        }
        // 4.3 has no exact float.
        assert_eq!(Budget::Bits(4.3).bytes(80, 0), Some(43));
        assert_eq!(Budget::Bytes(8).bytes(1, 9), None);
        assert_eq!(Budget::Bits(f64::NAN).bytes(100, 0), Some(0));
        assert_eq!(Budget::Bits(4.5).to_string(), "4.5 bits per weight");
    }
}
