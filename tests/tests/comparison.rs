//! The formats to compare with: golden vectors, every 16-bit value, arbitrary input, and the program's
//! `compare`.

mod comparison_tests {
    mod exhaustive;
    mod golden;
    mod oracle;
    mod program;
    mod properties;
}
