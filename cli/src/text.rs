//! Text output: tables and figures, estimates, names of tensors, block scales.

#[cfg(feature = "models")]
pub(crate) mod estimates;
pub(crate) mod names;
pub(crate) mod scale;
pub(crate) mod table;
