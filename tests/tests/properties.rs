//! Tests properties of any input against the oracle and against general laws.
//!
//! Inputs are arbitrary bit patterns, shapes, strides and recipes.

mod property_tests {
    mod activation_refusals;
    mod activations;
    mod amax;
    mod dequantize;
    mod device;
    mod empty;
    mod errors;
    mod experts;
    mod fp4;
    mod fp4_experts;
    mod fp8;
    mod gemm;
    mod gemv;
    mod inputs;
    mod int8;
    mod large;
    mod layout;
    mod quality;
    mod quantize;
    mod round_trip;
    mod strided;
}
