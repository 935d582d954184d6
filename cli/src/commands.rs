//! The subcommands, one file each: a thin layer over the libraries.

pub(crate) mod bench;
#[cfg(feature = "models")]
pub(crate) mod calibrate;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod dequantize;
pub(crate) mod devices;
pub(crate) mod doctor;
#[cfg(feature = "models")]
pub(crate) mod eval;
pub(crate) mod inspect;
pub(crate) mod man;
pub(crate) mod merge;
pub(crate) mod plan;
pub(crate) mod quantize;
pub(crate) mod recipes;
