//! Executes every kernel of the embedded PTX on the CPU and compares with the library, bit for bit.
//!
//! A case is a launch with its arguments, as the library launches, and the expected memory. The
//! same cases must also detect kernels that were changed on purpose.

mod executor_tests {
    mod activation_loader;
    pub(crate) mod activations;
    pub(crate) mod case;
    pub(crate) mod cases;
    mod changes;
    pub(crate) mod everything;
    pub(crate) mod expert_parts;
    pub(crate) mod experts;
    pub(crate) mod fp4;
    pub(crate) mod fp8;
    mod fp8_changes;
    pub(crate) mod fp8_experts;
    pub(crate) mod gemm;
    mod gemm_sizes;
    pub(crate) mod gptq;
    mod group_results;
    pub(crate) mod kv;
    pub(crate) mod mutations;
    pub(crate) mod operations;
    mod pairs;
    pub(crate) mod products;
    pub(crate) mod quantizing;
    mod signed_scales;
    pub(crate) mod steps;
    pub(crate) mod weights;
    mod weights_sizes;
}
