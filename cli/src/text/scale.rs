//! Block scales as text.

use microscale::Format;
use microscale::formats::E4m3;

/// The scale of a byte: a power of two, or NVFP4's number.
pub(crate) fn scale_text(format: Format, byte: u8) -> String {
    match format {
        _ if !format.is_scale(byte) => "signed".into(),
        _ if format.is_nan_scale(byte) => "NaN".into(),
        Format::Nvfp4 => E4m3::from_bits(byte).to_f32().to_string(),
        Format::Mxfp4 | Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => format!("2^{}", i32::from(byte) - 127),
    }
}
