//! Properties of any input: arbitrary bit patterns, shapes, strides and recipes, against the oracle and by
//! law.

mod property_tests {
    mod amax;
    mod dequantize;
    mod errors;
    mod experts;
    mod gemm;
    mod gemv;
    mod inputs;
    mod large;
    mod layout;
    mod quality;
    mod quantize;
    mod round_trip;
    mod strided;
}
