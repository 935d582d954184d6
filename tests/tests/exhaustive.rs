//! Every bit pattern there is, through every scalar conversion, and every 16-bit one through quantization on
//! every instruction set.

mod exhaustive_tests {
    mod backends;
    mod conversions;
    mod fp8;
    mod nvfp4;
    mod quantize;
    mod walk;
}
