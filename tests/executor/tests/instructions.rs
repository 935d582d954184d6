//! Tests each instruction of the embedded PTX against oracles that share no code with the executor.
//!
//! The oracles are `rustc_apfloat` for floating point, `float4` for E2M1, and plain integers
//! written from the PTX ISA. Small input spaces are tested exhaustively, others with edge cases and
//! many random inputs.

mod instructions {
    mod blocks;
    mod convert;
    mod copies;
    mod double;
    mod float;
    mod groups;
    mod integer;
    mod kernel;
    mod matrix;
    mod mbarriers;
    mod packed;
    mod pipelines;
    mod probe;
    mod scaled;
    mod tensor;
    mod together;
}
