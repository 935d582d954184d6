//! The checkpoint format of DeepSeek-V4, for its experts. Read-only. Its other layers are block
//! FP8, which [`w8_sources`](crate::checkpoint_formats::w8_sources) reads.
//!
//! | tensor `X.weight` of shape [N, K] | codes | block scales |
//! |---|---|---|
//! | mxfp4 | `X.weight` I8 [N, K/2], low nibble first | `X.scale` F8_E8M0 [N, K/32] |

use microscale::Format;

use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    written: Written::No,
    is_method: |method| matches!(method, "fp8" | "deepseek_v4_fp8"),
    ..FormatSpec::new(CheckpointFormat::DeepSeek, STORED)
};

const STORED: &[Storage] = &[Storage::plain(
    CheckpointFormat::DeepSeek,
    Format::Mxfp4,
    ("", FileDtype::I8),
    (PartName::InPlace(".scale"), FileDtype::U8),
)];
