//! Each instruction that the embedded PTX uses, against oracles that share nothing with the executor:
//! `rustc_apfloat` for floating point, `float4` for E2M1, and plain integers written down from the PTX ISA.
//! All inputs where there are few, edge cases and very many random ones where there are not.

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
    mod together;
}
