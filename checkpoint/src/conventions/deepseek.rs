//! The convention of DeepSeek-V4's files, for experts: MXFP4 beside block FP8, which
//! [`scaled`](crate::conventions::scaled) reads.
//!
//! A tensor `X.weight` of sizes [N, K] is codes I8 [N, K/2] under that name, the first of two in the low half of a byte, and
//! block scales F8_E8M0 [N, K/32], `X.scale`.

use microscale::Format;

use crate::conventions::convention::Convention;
use crate::conventions::storage::Storage;
use crate::dtype::FileDtype;
use crate::file_convention::FileConvention;

/// The convention.
pub(crate) const CONVENTION: Convention = Convention {
    written: false,
    is_method: |method| matches!(method, "fp8" | "deepseek_v4_fp8"),
    ..Convention::new(FileConvention::DeepSeek, STORED)
};

const STORED: &[Storage] = &[Storage {
    scales_beside: true,
    ..Storage::plain(FileConvention::DeepSeek, Format::Mxfp4, ("", FileDtype::I8), (".scale", FileDtype::U8))
}];
