//! The subcommands, one file each: a thin layer over the libraries.

pub(crate) mod bench;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod dequantize;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod man;
pub(crate) mod merge;
pub(crate) mod plan;
pub(crate) mod quantize;
pub(crate) mod recipes;
