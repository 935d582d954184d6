//! Block scales as text.

use microscale::Format;
use microscale::formats::ScaleType;

/// The scale of a byte: a power of two, or NVFP4's number.
pub(crate) fn scale_text(format: Format, byte: u8) -> String {
    match format.facts().scale {
        _ if !format.is_scale(byte) => "signed".into(),
        _ if format.is_nan_scale(byte) => "NaN".into(),
        ScaleType::E8m0 => format!("2^{}", i32::from(byte) - 127),
        scale_type => scale_type.value(byte.into()).to_string(),
    }
}
