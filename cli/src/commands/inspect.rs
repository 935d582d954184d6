//! `microscale inspect`: lists tensors, and the distributions of their scales and codes.

use std::error::Error;
use std::path::PathBuf;

use anyhow::Result;
use microscale::GlobalScale;
use microscale_checkpoint::{self as checkpoint, Histogram, Inspected, Logical};
use serde_json::Value;

use crate::options::output::JsonArgs;
use crate::outputs::{Files, open};
use crate::streams::print;
use crate::text::names::shown;
use crate::text::scale::scale_text;
use crate::text::table::{bytes, count, natural_order, shape, table};

/// Characters of the longest bar.
const BAR: usize = 40;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Checkpoint directory, or .safetensors or .gguf file
    input: PathBuf,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let checkpoint = open(&args.input)?;
    Files { checkpoints: &[&checkpoint], written: &[args.json.file()], ..Files::default() }.check()?;
    let json = args.json.start()?;
    let mut inspected = checkpoint::inspect(&checkpoint);
    inspected.sort_by(|a, b| natural_order(a.tensor.name(), b.tensor.name()));
    let mut rows = table(&["tensor", "format, shape", ">bytes", "scales", ">NaN scales", ">global scale"]);
    let (mut sums, mut quantized, mut total) = (Vec::<Histogram>::new(), 0u64, 0u64);
    let mut complaints = String::new();
    for entry in &inspected {
        let (row, bytes) = row(entry);
        rows.add_row(row);
        total += bytes;
        quantized += u64::from(entry.histogram.is_some() || entry.tensor.stored().scaling.is_some());
        if let Some(histogram) = &entry.histogram {
            match sums.iter_mut().find(|sum| sum.format == histogram.format) {
                Some(sum) => sum.add(histogram),
                None => sums.push((**histogram).clone()),
            }
        }
        complaints += &complaint(entry);
    }
    let (tensors, files) = (count(inspected.len() as u64), checkpoint.files());
    let plural = if files == 1 { "file" } else { "files" };
    let mut text = format!(
        "{}\n\n{tensors} tensors in {files} {plural}, {} of them quantized, {}",
        rows.trim_fmt(),
        count(quantized),
        bytes(total)
    );
    if !complaints.is_empty() {
        text += &format!("\n\n{}", complaints.trim_end());
    }
    for sum in &sums {
        let title = if sums.len() > 1 { format!("{}\n", sum.format) } else { String::new() };
        text += &format!("\n\n{title}{}\n\n{}", scales_text(sum), codes_text(sum));
    }
    let facts = inspected.iter().map(Inspected::to_json).collect::<Value>();
    json.finish(facts, || print(text))
}

/// A tensor's line and its bytes.
fn row(entry: &Inspected<'_>) -> ([String; 6], u64) {
    let (format, size, global_scale) = match &entry.tensor {
        Logical::Plain(tensor) => (tensor.dtype.to_string(), tensor.bytes(), None),
        Logical::Packed(packed) => {
            let hadamard = packed.hadamard.map_or(String::new(), |width| format!(", Hadamard {width},"));
            (format!("{}{hadamard}", packed.format), packed.bytes(), packed.global_scale)
        }
    };
    let (mut scales, mut nan) = (String::new(), String::new());
    if let Some(histogram) = &entry.histogram {
        let value = |byte| scale_text(histogram.format, byte);
        scales = histogram
            .scale_range()
            .map_or("none".into(), |(low, high)| format!("{} … {}", value(low), value(high)));
        nan = count(histogram.nan_scales());
    }
    if let Some(scaling) = entry.tensor.stored().scaling {
        let [rows, cols] = scaling.block;
        scales = format!("{} for {rows}×{cols}", scaling.dtype);
    }
    let global_scale = global_scale.map_or(String::new(), |(_, scale)| match scale {
        GlobalScale::Divisor(divisor) => format!("1 / {divisor}"),
        GlobalScale::Multiplier(multiplier) => multiplier.to_string(),
    });
    let stored = format!("{format} {}", shape(entry.tensor.shape()));
    let bytes = bytes(size as u64);
    ([shown(entry.tensor.name()), stored, bytes, scales, nan, global_scale], size as u64)
}

/// The reason why a tensor cannot be dequantized, in a line.
fn complaint(entry: &Inspected<'_>) -> String {
    if let Some(error) = entry.unreadable.as_ref() {
        let mut text = error.to_string();
        if let Some(source) = error.source() {
            text += &format!(": {source}");
        }
        return format!("cannot be read: {text}\n");
    }
    let foreign = entry.histogram.as_ref().filter(|histogram| histogram.foreign_scales() > 0);
    foreign.map_or(String::new(), |histogram| {
        let (bytes, blocks) = (count(histogram.foreign_scales()), count(histogram.blocks()));
        let (name, format) = (shown(entry.tensor.name()), histogram.format);
        format!(
            "cannot be read: tensor {name}: {bytes} of {blocks} scale bytes have the sign bit set, which {format} does \
             not know\n"
        )
    })
}

fn scales_text(histogram: &Histogram) -> String {
    let lines = (0..=255u8).map(|byte| {
        let blocks = histogram.scales[usize::from(byte)];
        (vec![scale_text(histogram.format, byte), byte.to_string()], blocks)
    });
    distribution(&["scale", ">byte", ">blocks", ""], lines.collect())
}

/// Codes from the most negative to the most positive: 4-bit codes one by one, 8-bit codes by powers
/// of two.
fn codes_text(histogram: &Histogram) -> String {
    if histogram.format.bits() == 8 {
        return distribution(&["value", ">elements", ""], binades(histogram));
    }
    let most = histogram.codes.iter().copied().max().unwrap_or(0);
    let mut rows = table(&["value", ">code", ">elements", ""]);
    for code in (8..16u8).rev().chain(0..8) {
        let elements = histogram.codes[usize::from(code)];
        let value = histogram.format.facts().element.decode(code);
        rows.add_row([&format!("{value:?}"), &code.to_string(), &count(elements), &bar(elements, most)]);
    }
    rows.trim_fmt()
}

/// Counts of the 8-bit elements between each power of two and the next.
fn binades(histogram: &Histogram) -> Vec<(Vec<String>, u64)> {
    let mut lines: Vec<(Vec<String>, u64)> = Vec::new();
    for code in (0x80..=0xFFu8).rev().chain(0..=0x7F) {
        let value = histogram.format.facts().element.decode(code);
        let sign = if code >= 0x80 { "-" } else { "" };
        let exponent = value.abs().log2().floor();
        let label = match value {
            _ if value.is_nan() => "NaN".into(),
            0.0 => format!("{sign}0"),
            _ => format!("{sign}2^{exponent} … {sign}2^{}", exponent + 1.0),
        };
        let elements = histogram.codes[usize::from(code)];
        match lines.last_mut() {
            Some((cells, sum)) if cells[0] == label => *sum += elements,
            _ => lines.push((vec![label], elements)),
        }
    }
    lines
}

/// A table of counts. Runs of zeros become an ellipsis, and are left out at both ends.
fn distribution(header: &[&str], lines: Vec<(Vec<String>, u64)>) -> String {
    let mut rows = table(header);
    let most = lines.iter().map(|(_, n)| *n).max().unwrap_or(0);
    let (mut any, mut gap) = (false, false);
    for (cells, n) in lines {
        if n == 0 {
            gap = any;
            continue;
        }
        if std::mem::take(&mut gap) {
            rows.add_row(["…"]);
        }
        any = true;
        rows.add_row(cells.into_iter().chain([count(n), bar(n, most)]));
    }
    rows.trim_fmt()
}

/// A bar as long as its share of the longest. Counts above zero are visible.
fn bar(n: u64, most: u64) -> String {
    let length = if most == 0 { 0.0 } else { n as f64 / most as f64 * BAR as f64 };
    if n > 0 && length < 0.5 { "▏".into() } else { "█".repeat(length.round() as usize) }
}
