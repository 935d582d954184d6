//! Code that all kernels of products share.
//!
//! | file | contents |
//! |---|---|
//! | [`operand`] | addresses of rows of a quantized matrix; loads of their chunks |
//! | [`problem`] | a product: operands, results, shape, routing to experts |
//! | [`product_format`] | the formats as products read them: blocks, scales and terms of a chunk |
//! | [`tensor_cores`] | operands of the tensor cores: decoding weights, scales and their range |
//! | [`lane_sums`] | sums over the lanes of a warp |
//! | [`reference`] | the slow path: a row by the CPU's reference |
//! | [`results`] | global scale, bias, gate, residual, rounding, storing |

pub(crate) mod lane_sums;
pub(crate) mod operand;
pub(crate) mod problem;
pub(crate) mod product_format;
pub(crate) mod reference;
pub(crate) mod results;
pub(crate) mod tensor_cores;
