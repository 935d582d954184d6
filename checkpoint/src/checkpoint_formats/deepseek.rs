//! The convention of DeepSeek-V4's files, for experts: MXFP4 beside block FP8, which
//! [`scaled`](crate::checkpoint_formats::scaled) reads.
//!
//! A tensor `X.weight` of sizes [N, K] is codes I8 [N, K/2] under that name, the first of two in the low half of a byte, and
//! block scales F8_E8M0 [N, K/32], `X.scale`.

use microscale::Format;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;

/// The convention.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    written: false,
    is_method: |method| matches!(method, "fp8" | "deepseek_v4_fp8"),
    ..FormatSpec::new(CheckpointFormat::DeepSeek, STORED)
};

const STORED: &[Storage] = &[Storage {
    scales_beside: true,
    ..Storage::plain(
        CheckpointFormat::DeepSeek,
        Format::Mxfp4,
        ("", FileDtype::I8),
        (".scale", FileDtype::U8),
    )
}];
