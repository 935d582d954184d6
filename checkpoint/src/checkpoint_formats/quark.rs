//! The checkpoint format of AMD Quark (0.13), used for MXFP4 of Kimi-K2 and DeepSeek-R1. Read-only.
//!
//! | tensor `X` of shape [N, K] | codes | block scales |
//! |---|---|---|
//! | mxfp4 | `X` U8 [N, K/2], low nibble first | `X_scale` U8 [N, K/32] |

use microscale::Format;

use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    written: Written::No,
    is_method: |method| method == "quark",
    ..FormatSpec::new(CheckpointFormat::Quark, STORED)
};

const STORED: &[Storage] = &[Storage::plain(
    CheckpointFormat::Quark,
    Format::Mxfp4,
    ("", FileDtype::U8),
    (PartName::After("_scale"), FileDtype::U8),
)];
