//! Quantizing, dequantizing, amax and products on the CPU.
//!
//! A row of this table imports what stands in rows below it, and nothing above; the data go down from the top and their blocks come
//! back from `words` and `vector` as bytes.
//!
//! ```text
//! what is asked for        strided   gemv_weights   gemv
//! checked, cut, threads    quantize → amax          dequantize
//! chosen at run time       isa: an instance of what is below for each instruction set; reference, the definition, for all
//! a piece                  plain   search, hessian   decode   errors   dot   weigh
//! sixteen blocks at once   groups: amax and scales, then codes         search_lanes
//! a block                  lanes: scale → encode → pack                widen: dtype decode
//! what loops need          rule, decoder, piece, policy (what is counted, NaN and infinities), blocks (the definition)
//! tables of 16-bit values  thresholds (encode)       values (decode)
//! vectors                  products → vector → words, a thin file for each instruction set in each
//! memory                   pieces   rows   prefetch   stream
//! ```
//!
//! `reference` applies the block definition of `microscale_formats` element by element. `groups` is the same arithmetic over the
//! vectors of `vector`, sixteen blocks at a time, and `lanes` over whole blocks so that the compiler vectorises it: what groups are not
//! for. All instances are tested bit for bit against the reference.

mod amax;
mod blocks;
mod decode;
mod decoder;
mod dequantize;
mod dot;
mod errors;
mod gemv;
mod gemv_weights;
mod groups;
mod hessian;
mod isa;
mod lanes;
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
mod thresholds;
mod values;
mod vector;
mod weigh;
mod widen;
mod words;

pub use amax::{amax, amax_with};
pub(crate) use decoder::Decoder;
pub use dequantize::{dequantize, dequantize_into, dequantize_with};
pub use gemv::{gemv, gemv_with};
pub use gemv_weights::{gemv_weights, gemv_weights_with};
pub use isa::Isa;
pub use quantize::{
    quantize, quantize_hessian, quantize_hessian_with, quantize_into, quantize_weighted,
    quantize_weighted_with, quantize_with,
};
pub use strided::{quantize_strided, quantize_strided_with};
pub(crate) use vector::Scalars;
