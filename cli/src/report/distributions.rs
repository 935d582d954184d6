//! Distributions of scale bytes and codes, as charts and tables.

use microscale::formats::ScaleType;
use microscale::{Format, Words};
use microscale_checkpoint::Histogram;

use super::figures::percent_text;
use super::rows::table;
use crate::markup::{Markup, Px};
use crate::plot::axis::Axis;
use crate::plot::frame::{WIDTH, framed, label, line};
use crate::text::scale::scale_text;
use crate::text::table::count;

const LEFT: f64 = 48.0;
const RIGHT: f64 = WIDTH - 8.0;
const TOP: f64 = 26.0;
const HEIGHT: f64 = 170.0;
/// Maximum number of columns with their shares above them.
const MOST_LABELLED: usize = 20;
/// Longer runs of empty columns are drawn as a gap.
const LONGEST_RUN: usize = 3;

/// A value and its count.
struct Column {
    /// Its value, as text.
    value: String,
    /// The label under the column, drawn if there is room.
    tick: Option<String>,
    /// Its byte, if it has one.
    byte: Option<u8>,
    n: u64,
}

/// Writes the distributions of each format.
pub(super) fn write(m: &mut Markup, histograms: &[Histogram]) {
    for histogram in histograms {
        of_format(m, histogram, histograms.len() > 1);
    }
}

fn of_format(m: &mut Markup, histogram: &Histogram, several: bool) {
    let of = if several { format!(" of {}", histogram.format.word().to_uppercase()) } else { String::new() };
    let (format, blocks) = (histogram.format, histogram.blocks());
    let under =
        if format.has_global_scale() { " as stored, without each tensor’s global scale" } else { "" };
    let nan = match histogram.nan_scales() {
        0 => String::new(),
        n => format!(" {} blocks have the NaN scale and are not drawn.", count(n)),
    };
    let scales = format!("The scales of {} blocks{under}.{nan}", count(blocks));
    chart(m, &format!("Block scales{of}"), &scales, "blocks", &scale_columns(histogram));
    let elements = histogram.codes.iter().sum();
    let codes = format!("The codes of {} elements, by their values before scaling.", count(elements));
    chart(m, &format!("Codes{of}"), &codes, "elements", &code_columns(histogram));
}

fn scale_columns(histogram: &Histogram) -> Vec<Column> {
    let format = histogram.format;
    let (low, high) = histogram.scale_range().unwrap_or((0, 0));
    let column = |byte: u8| {
        let tick = match format.facts().scale {
            ScaleType::E8m0 => Some(power(i32::from(byte) - 127)),
            _ if byte == 0 => Some("0".into()),
            // Powers of two of E4M3. Seven other numbers lie between two of them.
            _ => byte.is_multiple_of(8).then(|| power(i32::from(byte / 8) - 7)),
        };
        Column { value: scale(format, byte), tick, byte: Some(byte), n: histogram.scales[usize::from(byte)] }
    };
    (low..=high).map(column).collect()
}

/// Returns columns from the most negative to the most positive value.
///
/// Each code of E2M1 has a column. Codes of 8-bit elements between two powers of two share one.
fn code_columns(histogram: &Histogram) -> Vec<Column> {
    let element = histogram.format.facts().element;
    if element.bits() == 4 {
        let column = |code: u8| {
            let value = signed(&element.decode(code).to_string());
            let tick = Some(value.clone());
            Column { value, tick, byte: Some(code), n: histogram.codes[usize::from(code)] }
        };
        return (8..16).rev().chain(0..8).map(column).collect();
    }
    let mut columns: Vec<Column> = Vec::new();
    for code in (0x80..=0xFFu8).rev().chain(0..=0x7F) {
        let number = element.decode(code);
        let n = histogram.codes[usize::from(code)];
        let sign = if code >= 0x80 { "−" } else { "" };
        let exponent = number.abs().log2().floor() as i32;
        let (value, tick) = match number {
            _ if !number.is_finite() => (number.to_string(), "…".into()),
            0.0 => (format!("{sign}0"), format!("{sign}0")),
            _ => {
                let (low, high) = (power(exponent), power(exponent + 1));
                (format!("{sign}{low} to {sign}{high}"), format!("{sign}{low}"))
            }
        };
        match columns.last_mut() {
            Some(column) if column.value == value => column.n += n,
            _ => columns.push(Column { value, tick: Some(tick), byte: None, n }),
        }
    }
    let used = |column: &Column| column.n > 0;
    let (first, last) =
        (columns.iter().position(used).unwrap_or(0), columns.iter().rposition(used).unwrap_or(0));
    columns.truncate(last + 1);
    columns.split_off(first)
}

fn chart(m: &mut Markup, title: &str, sentence: &str, unit: &str, columns: &[Column]) {
    let total: u64 = columns.iter().map(|column| column.n).sum();
    let percent = |n: u64| 100.0 * n as f64 / total.max(1) as f64;
    m.leaf("h3", &[], title);
    m.leaf("p", &[], sentence);
    m.element("div", &[("class", &"scroll")], |m| {
        framed(m, title, sentence, TOP + HEIGHT + 26.0, &[], |m| draw(m, unit, columns, percent));
    });
    m.element("details", &[], |m| {
        m.leaf("summary", &[], format_args!("{title} in numbers"));
        let header = ["value", ">byte", &format!(">{unit}"), ">share"];
        table(m, title, &header, |rows| {
            rows.body(|rows| {
                for column in columns.iter().filter(|column| column.n > 0) {
                    let byte = column.byte.map_or(String::new(), |byte| byte.to_string());
                    let share = format!("{} %", percent_text(percent(column.n)));
                    rows.plain(&column.value, &[&byte, &count(column.n), &share]);
                }
            });
        });
    });
}

fn draw(m: &mut Markup, unit: &str, columns: &[Column], percent: impl Fn(u64) -> f64) {
    let slots = slots(columns);
    let width = (RIGHT - LEFT) / slots.len().max(1) as f64;
    let axis = Axis::holding(columns.iter().map(|column| percent(column.n)).chain([0.0]), 4.0);
    let y = |percent: f64| TOP + (1.0 - axis.place(percent)) * HEIGHT;
    for (tick, text) in axis.ticks() {
        line(m, "grid", [LEFT, y(tick)], [RIGHT, y(tick)]);
        label(m, "muted", "end", [LEFT - 8.0, y(tick) + 4.0], format_args!("{text} %"));
    }
    let labelled = slots.len() <= MOST_LABELLED;
    let (step, mut free, mut ticks) = (tick_step(&slots, width), 0.0, 0);
    for (i, slot) in slots.iter().enumerate() {
        let x = LEFT + width * (i as f64 + 0.5);
        let Some(column) = slot else {
            label(m, "muted", "middle", [x, TOP + HEIGHT + 18.0], "⋯");
            free = x + 8.0;
            continue;
        };
        if column.n > 0 {
            bar(m, column, unit, [x, y(percent(column.n))], width.min(64.0) * 0.82);
            if labelled {
                let above = y(percent(column.n)).min(TOP + HEIGHT - 1.0) - 5.0;
                label(m, "muted", "middle", [x, above], percent_text(percent(column.n)));
            }
        }
        let Some(tick) = &column.tick else { continue };
        if usize::is_multiple_of(ticks, step) && x - half_width(tick) >= free {
            label(m, "", "middle", [x, TOP + HEIGHT + 18.0], tick);
            free = x + half_width(tick);
        }
        ticks += 1;
    }
    line(m, "axis", [LEFT, TOP + HEIGHT], [RIGHT, TOP + HEIGHT]);
}

/// Returns the distance between drawn ticks, in ticks, so that labels do not overlap.
fn tick_step(slots: &[Option<&Column>], width: f64) -> usize {
    let ticks = || slots.iter().enumerate().filter_map(|(i, slot)| Some((i, slot.as_ref()?.tick.as_ref()?)));
    let widest = ticks().map(|(_, tick)| 2.0 * half_width(tick)).fold(0.0, f64::max);
    let apart = ticks().zip(ticks().skip(1)).map(|((a, _), (b, _))| b - a).min().unwrap_or(1);
    (widest / (apart as f64 * width)).ceil().max(1.0) as usize
}

/// Half the width of a tick's label. Superscripts are narrow.
fn half_width(tick: &str) -> f64 {
    tick.chars().count() as f64 * 3.0 + 3.0
}

/// Returns the columns, with `None` for long runs of empty ones.
fn slots(columns: &[Column]) -> Vec<Option<&Column>> {
    let runs = columns.chunk_by(|a, b| (a.n == 0) == (b.n == 0));
    let mut slots = Vec::new();
    for run in runs {
        if run[0].n == 0 && run.len() > LONGEST_RUN {
            slots.push(None);
        } else {
            slots.extend(run.iter().map(Some));
        }
    }
    slots
}

fn bar(m: &mut Markup, column: &Column, unit: &str, [x, y]: [f64; 2], width: f64) {
    // Every count above zero is visible.
    let top = y.min(TOP + HEIGHT - 1.0);
    let size = [Px(x - width / 2.0), Px(top), Px(width), Px(TOP + HEIGHT - top)];
    let rect: [(&str, &dyn std::fmt::Display); 5] =
        [("class", &"bar"), ("x", &size[0]), ("y", &size[1]), ("width", &size[2]), ("height", &size[3])];
    let byte = column.byte.map_or(String::new(), |byte| format!(" (byte {byte})"));
    m.element("rect", &rect, |m| {
        m.leaf("title", &[], format_args!("{}{byte}: {} {unit}", column.value, count(column.n)));
    });
}

/// Returns the value of a stored scale: a power of two, or a number in NVFP4.
pub(super) fn scale(format: Format, byte: u8) -> String {
    if format.facts().scale != ScaleType::E8m0 || format.is_nan_scale(byte) {
        return scale_text(format, byte);
    }
    power(i32::from(byte) - 127)
}

/// `2⁻⁷`.
fn power(exponent: i32) -> String {
    const RAISED: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let digits = exponent.to_string();
    let raised = digits.chars().map(|c| c.to_digit(10).map_or('⁻', |digit| RAISED[digit as usize]));
    format!("2{}", raised.collect::<String>())
}

/// Replaces a hyphen with a minus sign.
fn signed(number: &str) -> String {
    number.replace('-', "−")
}
