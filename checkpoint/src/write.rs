//! Output: tensor by tensor, complete or not at all.
//!
//! | file | what it knows |
//! |---|---|
//! | `rewrite` | writing a checkpoint anew |
//! | `work` | the work on each tensor: a trait that each operation implements |
//! | `workers`, `busy` | several workers that share the work; the time that they take |
//! | `begin`, `gguf`, `writer` | a shard's new file, in either container |
//! | `outline` | the outline of a tensor of the output |
//! | `output`, `others` | the place of the output; the files that are not weights |
//! | `progress` | reports of the progress of an operation |

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
