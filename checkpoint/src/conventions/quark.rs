//! The convention of AMD Quark's exports (0.13), as MXFP4 of Kimi-K2 and DeepSeek-R1 is published.
//!
//! A tensor X of sizes [N, K] is codes U8 [N, K/2] under that name, the first of two in the low half of a byte, and block
//! scales U8 [N, K/32], `X_scale`.

use microscale::Format;

use crate::conventions::convention::Convention;
use crate::conventions::storage::Storage;
use crate::dtype::FileDtype;
use crate::file_convention::FileConvention;

/// The convention.
pub(crate) const CONVENTION: Convention = Convention {
    written: false,
    is_method: |method| method == "quark",
    ..Convention::new(FileConvention::Quark, STORED)
};

const STORED: &[Storage] =
    &[Storage::plain(FileConvention::Quark, Format::Mxfp4, ("", FileDtype::U8), ("_scale", FileDtype::U8))];
