//! The loops of matrix products: quantized vectors, few tokens, and panels for many tokens.

pub(super) mod activations;
pub(super) mod by_panel;
pub(super) mod dot;
pub(super) mod few_tokens;
#[cfg(target_arch = "x86_64")]
pub(super) mod few_tokens_bf16;
pub(super) mod fp8;
pub(super) mod int8;
pub(super) mod microkernel;
pub(super) mod panels;
pub(super) mod rows;
pub(super) mod tiles;
pub(super) mod weight_tables;
