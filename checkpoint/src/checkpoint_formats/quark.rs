//! The convention of AMD Quark's exports (0.13), as MXFP4 of Kimi-K2 and DeepSeek-R1 is published.
//!
//! A tensor X of sizes [N, K] is codes U8 [N, K/2] under that name, the first of two in the low half of a byte, and block
//! scales U8 [N, K/32], `X_scale`.

use microscale::Format;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;

/// The convention.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    written: false,
    is_method: |method| method == "quark",
    ..FormatSpec::new(CheckpointFormat::Quark, STORED)
};

const STORED: &[Storage] =
    &[Storage::plain(CheckpointFormat::Quark, Format::Mxfp4, ("", FileDtype::U8), ("_scale", FileDtype::U8))];
