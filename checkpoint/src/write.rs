//! Output: tensor by tensor, complete or not at all.
//!
//! | file | contents |
//! |---|---|
//! | `rewrite` | writing a checkpoint anew |
//! | `work` | the work on each tensor: a trait that each operation implements |
//! | `workers`, `busy` | which jobs are next, and who writes the files; the time that threads are busy |
//! | `begin`, `gguf`, `writer` | a shard's new file, in either container |
//! | `sink`, `copy` | a tensor's way into the file; a tensor that goes there unchanged |
//! | `job` | the work on one tensor |
//! | `outline` | the outline of a tensor of the output |
//! | `file_name`, `temporary` | names derived from names; temporary directories, and finding abandoned ones |
//! | `machine` | the machine that a lock belongs to |
//! | `values`, `narrowed` | a tensor's values in another dtype; values that the dtype has no finite number for |
//! | `others` | the files that are not weights |
//! | `place`, `output` | the target of a path, and whether it is writable; the unfinished output |
//! | `replacement` | replacing a single file, by one that is complete |

pub(crate) mod begin;
pub(crate) mod busy;
pub(crate) mod copy;
pub(crate) mod file_name;
pub(crate) mod gguf;
pub(crate) mod job;
pub(crate) mod machine;
pub(crate) mod narrowed;
pub(crate) mod others;
pub(crate) mod outline;
pub(crate) mod output;
pub(crate) mod place;
pub(crate) mod replacement;
pub(crate) mod rewrite;
pub(crate) mod sink;
pub(crate) mod temporary;
pub(crate) mod values;
pub(crate) mod work;
pub(crate) mod workers;
pub(crate) mod writer;
