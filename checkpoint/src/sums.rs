//! Sums over tensors: their number, their elements, and their bytes in input and output.

use serde_json::{Value, json};

/// Sums over tensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// The number of tensors.
    pub tensors: u64,
    /// The number of elements.
    pub elements: u64,
    /// Bytes in the input.
    pub bytes_before: u64,
    /// Bytes in the output.
    pub bytes_after: u64,
}

impl Sums {
    /// Adds a tensor.
    pub fn add(&mut self, elements: u64, bytes_before: u64, bytes_after: u64) {
        self.tensors += 1;
        self.elements += elements;
        self.bytes_before += bytes_before;
        self.bytes_after += bytes_after;
    }

    /// The sum of both.
    pub fn with(self, other: Self) -> Self {
        Self {
            tensors: self.tensors + other.tensors,
            elements: self.elements + other.elements,
            bytes_before: self.bytes_before + other.bytes_before,
            bytes_after: self.bytes_after + other.bytes_after,
        }
    }

    /// Input bytes per output byte; 1 if there is no output.
    pub fn ratio(&self) -> f64 {
        if self.bytes_after == 0 { 1.0 } else { self.bytes_before as f64 / self.bytes_after as f64 }
    }

    pub(crate) fn to_json(self) -> Value {
        json!({
            "tensors": self.tensors,
            "elements": self.elements,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "ratio": self.ratio(),
        })
    }
}
