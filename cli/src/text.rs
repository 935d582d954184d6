//! Text output: tables and figures, names of tensors, block scales.

pub(crate) mod names;
pub(crate) mod scale;
pub(crate) mod table;
