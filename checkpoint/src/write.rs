//! Output: tensor by tensor, complete or not at all.
//!
//! | file | what it knows |
//! |---|---|
//! | `rewrite` | writing a checkpoint anew |
//! | `work` | what is done to each tensor: a trait that each operation implements |
//! | `workers`, `busy` | who does it: several workers; and for how long |
//! | `begin`, `gguf`, `writer` | a shard's new file: its header, in either container, and the tensors at their places |
//! | `outline` | what a tensor of the output is |
//! | `output`, `others` | where output is written; the files that are not weights |
//! | `progress` | telling how far an operation is |

pub(crate) mod begin;
pub(crate) mod busy;
pub(crate) mod gguf;
pub(crate) mod others;
pub(crate) mod outline;
pub(crate) mod output;
pub(crate) mod progress;
pub(crate) mod rewrite;
pub(crate) mod work;
pub(crate) mod workers;
pub(crate) mod writer;
