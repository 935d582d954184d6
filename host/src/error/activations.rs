//! Faults of activations to quantize.

/// Why activations do not match the recipe.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ActivationFault {
    /// A gate needs pairs.
    #[error("a gate combines pairs of values, and the activations have {columns} columns; pass 2·K columns")]
    OddColumns {
        /// Columns of the input.
        columns: usize,
    },
    /// RMSNorm's ε must be positive.
    #[error("RMSNorm's epsilon is {epsilon}; pass a positive normal number")]
    Epsilon {
        /// The given ε.
        epsilon: f32,
    },
    /// A residual or weights without RMSNorm.
    #[error("a residual and weights belong to RMSNorm; choose that operation or leave them out")]
    NotNormalized,
    /// A part has another length.
    #[error("there are {found} {what}, and the recipe and shape need {expected}")]
    Count {
        /// The name of the part.
        what: &'static str,
        /// The number needed.
        expected: usize,
        /// The number found.
        found: usize,
    },
    /// A given scale is out of range.
    #[error("given scale {index} is {scale}; scales must be positive, normal and in the format's range")]
    Scale {
        /// Its index.
        index: usize,
        /// The scale.
        scale: f32,
    },
    /// The rows by expert do not match.
    #[error("rows by expert need {what}")]
    Experts {
        /// The required property.
        what: &'static str,
    },
    /// A KV cache does not have a supported shape.
    #[error("a KV cache needs {what}")]
    Cache {
        /// The required property.
        what: &'static str,
    },
    /// A slot is not in the cache.
    #[error("row {row} has slot {slot}, and the cache has {slots}; pass a negative slot to skip a row")]
    Slot {
        /// The row.
        row: usize,
        /// Its slot.
        slot: i64,
        /// Slots of the cache.
        slots: u64,
    },
    /// GPUs quantize 16-bit activations.
    #[error("GPUs quantize activations in f16 or bf16; convert them, or use the CPU")]
    Dtype,
    /// The matrix exceeds a limit of GPUs.
    #[error("{found} {what} are more than a GPU quantizes at once; pass fewer than {limit}")]
    Limit {
        /// Rows or columns.
        what: &'static str,
        /// The number found.
        found: usize,
        /// The smallest number that is too large.
        limit: u64,
    },
}

microscale_formats::debug_is_message!(ActivationFault);
