//! Blocks: one at a time, by the reference or by loops that the compiler vectorizes; matrices cut into runs
//! of them; and their output.

pub(super) mod output;
pub(super) mod partition;
pub(super) mod reference;
pub(super) mod slow_path;
pub(super) mod tally;
pub(super) mod vectorized;
