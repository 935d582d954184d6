//! Tests every bit pattern through every scalar conversion.
//!
//! Also tests every 16-bit pattern through quantization.
//!
//! Quantization runs on every instruction set.

mod exhaustive_tests {
    mod backends;
    mod conversions;
    mod fp8;
    mod gates;
    mod nvfp4;
    mod quantize;
    mod walk;
}
