//! Times and shares as text.

use std::time::SystemTime;

/// `2026-11-21 18:30:05 UTC`.
pub(super) fn date(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string().replace('T', " ").replace('Z', " UTC")
}

/// `12.3 % of something`.
pub(super) fn share(part: u64, all: u64, of: &str) -> String {
    let percent = if all == 0 { 0.0 } else { 100.0 * part as f64 / all as f64 };
    format!("{} % {of}", percent_text(percent))
}

/// About three digits. A share above zero never prints as `0`.
pub(super) fn percent_text(percent: f64) -> String {
    match percent {
        0.0 => "0".into(),
        _ if percent < 0.01 => "< 0.01".into(),
        _ if percent < 1.0 => format!("{percent:.2}"),
        _ => format!("{percent:.1}"),
    }
}
