//! Quantizing, dequantizing, amax and products on the CPU.
//!
//! The files stand on floors. Each imports what is on floors below it, and on its own where an arrow says so.
//! Values go down from the first to the vectors, and come back as codes and scales.
//!
//! ```text
//! quantize   dequantize   gemv   gemm_experts → gemm_weights → gemv_weights    operations: checks, threads
//! contiguous   strided → amax                                     a matrix, by where it lies: pieces, threads
//! importance                                                      what weighs errors, for pieces
//! isa → reference                                                 the instances; the definition
//! plain   hessian → search, decode   errors   dot   terms, tiles → panels, weigh_pairs → weigh    a piece, a row, several rows
//! rule   decoder   arranged                                       a recipe, a tensor, activations: as loops need them
//! groups   search_lanes   lanes   widen                           sixteen blocks at once; one block
//! piece → policy → blocks                                         output, counts, the definition of blocks
//! thresholds   values                                             codes and values of 16 bits, looked up
//! products → vector → halfwords → machines                        vectors, a file for each instruction set
//! tables                                                          weights of four bits, looked up
//! pieces   rows   prefetch   stream                               memory
//! ```
//!
//! `reference` applies the block definition of `microscale_formats` element by element. `groups` is the same
//! arithmetic over the vectors of `vector`, sixteen blocks at a time. `lanes` is the same over whole blocks
//! so that the compiler vectorises it, for blocks that groups cannot take. All instances are tested bit for
//! bit against the reference. `by_definition` is all there is of formats for comparison, and imports none of
//! these files.

mod amax;
mod arranged;
mod blocks;
mod by_definition;
mod contiguous;
mod decode;
mod decoder;
mod dequantize;
mod dot;
mod errors;
pub(crate) mod exact;
mod gemm_experts;
mod gemm_weights;
mod gemv;
mod gemv_weights;
mod groups;
mod halfwords;
mod hessian;
mod importance;
mod isa;
mod lanes;
mod machines;
mod panels;
mod piece;
mod pieces;
mod plain;
mod policy;
mod prefetch;
mod products;
mod quantize;
mod reference;
mod rows;
mod rule;
mod search;
mod search_lanes;
mod stream;
mod strided;
mod tables;
mod terms;
mod thresholds;
mod tiles;
mod values;
mod vector;
mod weigh;
#[cfg(target_arch = "x86_64")]
mod weigh_pairs;
mod widen;

pub use amax::amax;
#[doc(hidden)]
pub use amax::amax_with;
pub(crate) use decoder::Decoder;
#[doc(hidden)]
pub use dequantize::dequantize_with;
pub use dequantize::{dequantize, dequantize_into};
pub use gemm_experts::gemm_experts;
#[doc(hidden)]
pub use gemm_experts::gemm_experts_with;
pub use gemm_weights::gemm_weights;
#[doc(hidden)]
pub use gemm_weights::gemm_weights_with;
pub use gemv::gemv;
#[doc(hidden)]
pub use gemv::gemv_with;
pub use gemv_weights::gemv_weights;
#[doc(hidden)]
pub use gemv_weights::gemv_weights_with;
pub use isa::Isa;
pub use quantize::{quantize, quantize_into, quantize_into_parts, quantize_with};
pub(crate) use vector::Scalars;
