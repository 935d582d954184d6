//! Tests the formats for comparison with golden vectors, every 16-bit value, and arbitrary input.

mod comparison_tests {
    mod exhaustive;
    mod golden;
    mod oracle;
    mod properties;
}
