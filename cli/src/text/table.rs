//! Tables and figures as text: counts, bytes, shapes, decibels and times.

use std::cmp::Ordering;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use indicatif::HumanCount;
use microscale::ErrorStats;
use microscale_checkpoint::Skipped;

/// A line under the header only, so that output can be cut, pasted and searched.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Returns a table with a header. Columns whose names start with `>` are aligned to the right,
/// without the `>`.
///
/// Cells never wrap, so that each tensor is one line at any terminal width. Print it with
/// `trim_fmt`.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|name| name.trim_start_matches('>')));
    for (column, name) in table.column_iter_mut().zip(header) {
        column.set_padding((0, 1));
        if name.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Orders names by the numbers in them: layer 2 before layer 10.
pub(crate) fn natural_order(a: &str, b: &str) -> Ordering {
    parts(a).cmp(parts(b))
}

/// Splits a name into runs of digits and other runs, each with its number.
fn parts(name: &str) -> impl Iterator<Item = (u64, &str)> {
    let chunks = name.as_bytes().chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
    // ASCII digits are single bytes in UTF-8, so splitting at them keeps other characters intact.
    let text = chunks.map(|chunk| str::from_utf8(chunk).unwrap_or_default());
    text.map(|text| (text.parse().unwrap_or(u64::MAX), text))
}

/// `1,234,567`.
pub(crate) fn count(n: u64) -> String {
    HumanCount(n).to_string()
}

/// `1.50 MiB`: three digits.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    let mut scaled = n as f64;
    // 999.5 would round to four digits.
    while scaled >= 999.5 && unit + 1 < units.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    let decimals = match scaled {
        _ if unit == 0 => 0,
        99.95.. => 0,
        9.995.. => 1,
        _ => 2,
    };
    format!("{scaled:.decimals$} {}", units[unit])
}

/// `[4096, 128]`, as `4096×128`; `scalar` without dimensions.
pub(crate) fn shape(shape: &[usize]) -> String {
    if shape.is_empty() {
        return "scalar".into();
    }
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("×")
}

/// Returns the files that were not copied, one per line, after an empty line.
pub(crate) fn skipped_text(skipped: &[Skipped]) -> String {
    let line = |skipped: &Skipped| format!("left out {}: {}\n", skipped.path.display(), skipped.why);
    if skipped.is_empty() {
        String::new()
    } else {
        format!("\n{}", skipped.iter().map(line).collect::<String>())
    }
}

/// Printed in place of a figure without values.
const NONE: &str = "–";

/// Four significant digits, small figures with an exponent.
pub(crate) fn figure(x: f64) -> String {
    if x.is_nan() {
        NONE.into()
    } else if x == 0.0 {
        "0".into()
    } else if x.abs() < 1e-3 || x.abs() >= 1e5 {
        format!("{x:.3e}")
    } else {
        let decimals = (3 - x.abs().log10().floor() as i32).max(0) as usize;
        format!("{x:.decimals$}")
    }
}

/// `18.77 dB`; `∞` without any error.
pub(crate) fn decibels(x: f64) -> String {
    match x {
        _ if x.is_nan() => NONE.into(),
        f64::INFINITY => "∞".into(),
        _ => format!("{x:.2} dB"),
    }
}

/// Six digits after the point.
pub(crate) fn cosine(x: f64) -> String {
    if x.is_nan() { NONE.into() } else { format!("{x:.6}") }
}

/// The number of values that loss figures exclude: `64 of 2,048 values, not finite`. `None` for
/// none.
pub(crate) fn left_out(errors: &ErrorStats) -> Option<String> {
    let (left_out, all) = (errors.non_finite(), errors.non_finite() + errors.elements());
    (left_out > 0).then(|| format!("{} of {} values, not finite", count(left_out), count(all)))
}

/// `1.234 s`, `12.3 ms`.
pub(crate) fn seconds(s: f64) -> String {
    if s < 1.0 { format!("{:.1} ms", s * 1e3) } else { format!("{s:.2} s") }
}

/// `12.3 GB/s`: 10⁹ bytes.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    format!("{:.2} GB/s", bytes_per_second / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ordered_by_their_numbers() {
        let mut names = ["layers.10.a", "layers.2.b", "embed", "layers.2.a", "norm"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, ["embed", "layers.2.a", "layers.2.b", "layers.10.a", "norm"]);
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0, 999, 1000, 1536, 102_400, 1 << 20].map(bytes),
            ["0 B", "999 B", "0.98 KiB", "1.50 KiB", "100 KiB", "1.00 MiB"]
        );
        assert_eq!(
            [0.0, 0.0132901, 1.5, 123.456, 1e-7].map(figure),
            ["0", "0.01329", "1.500", "123.5", "1.000e-7"]
        );
        assert_eq!((decibels(18.774), decibels(f64::INFINITY)), ("18.77 dB".into(), "∞".into()));
        assert_eq!([figure(f64::NAN), decibels(f64::NAN), cosine(f64::NAN)], ["–"; 3]);
        assert_eq!((shape(&[]), shape(&[4, 32])), ("scalar".into(), "4×32".into()));
    }
}
