//! The parts that products share. A kernel brings a [`Product`](multiply::Product), or its own loop, and reuses the rest.
//!
//! | file | what it holds |
//! |---|---|
//! | [`operand`] | where rows and tokens lie, and loading chunks of rows |
//! | [`mod@format`] | the formats: blocks, scales and terms of a chunk |
//! | [`decode`] | both quantized: codes decoded and multiplied, in integers or pairs of f16 |
//! | [`tensor_cores`] | weights and activations: what goes to the tensor cores, and the scales of weights |
//! | [`scheduler`] | which rows a team of warps takes next |
//! | [`copies`] | what a lane copies ahead for a step |
//! | [`pipeline`] | the ring of copies ahead, and the loop over a warp's steps |
//! | [`multiply`] | what a kernel does with a step, and products by tensor cores |
//! | [`epilogue`] | sums over lanes, the global scale, rounding, storing |

pub(crate) mod copies;
pub(crate) mod decode;
pub(crate) mod epilogue;
pub(crate) mod format;
pub(crate) mod multiply;
pub(crate) mod operand;
pub(crate) mod pipeline;
pub(crate) mod scheduler;
pub(crate) mod tensor_cores;
