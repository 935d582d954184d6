//! Parts that the kernels of products share. A kernel brings a [`Product`](multiply::Product), or its own
//! loop, and reuses the rest.
//!
//! | file | what it holds |
//! |---|---|
//! | [`operand`] | where rows and tokens lie, and loading chunks of rows |
//! | [`mod@format`] | the formats: blocks, scales and terms of a chunk |
//! | [`decode`] | both quantized: codes decoded and multiplied, in integers or pairs of f16 |
//! | [`tensor_cores`] | weights and activations: what goes to the tensor cores, and the scales of weights |
//! | [`scheduler`] | work tiles: which rows a warp group takes next |
//! | [`copies`] | what a lane copies to a stage |
//! | [`pipeline`] | the mainloop: a warp's k-iterations over a ring of stages |
//! | [`multiply`] | what a kernel does in a k-iteration, and products by tensor cores |
//! | [`epilogue`] | sums over lanes, the global scale |
//! | [`results`] | bias, gate, residual, rounding, storing |

pub(crate) mod copies;
pub(crate) mod decode;
pub(crate) mod epilogue;
pub(crate) mod format;
pub(crate) mod multiply;
pub(crate) mod operand;
pub(crate) mod pipeline;
pub(crate) mod results;
pub(crate) mod scheduler;
pub(crate) mod tensor_cores;
