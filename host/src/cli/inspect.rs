//! `microscale inspect`.

use std::path::PathBuf;

use anyhow::Result;

use super::print;
use super::table::{bytes, count, natural_order, shape, table};
use crate::checkpoint::compressed_tensors::Logical;
use crate::checkpoint::{self, Checkpoint, Histogram};
use crate::formats::E2m1;

/// Characters of the longest bar.
const BAR: usize = 40;

#[derive(clap::Args)]
pub(super) struct Args {
    /// A .safetensors file or a checkpoint directory
    path: PathBuf,
}

pub(super) fn run(args: Args) -> Result<()> {
    let checkpoint = Checkpoint::open(&args.path)?;
    let mut rows = table(&["tensor", "format, shape", ">bytes", "scales", ">NaN scales"]);
    let (mut sum, mut quantized, mut total) = (Histogram::default(), 0u64, 0u64);
    let mut inspected = checkpoint::inspect(&checkpoint);
    inspected.sort_by(|a, b| natural_order(a.tensor.name(), b.tensor.name()));
    for entry in &inspected {
        let (format, size) = match &entry.tensor {
            Logical::Plain(tensor) => (tensor.dtype.to_string(), tensor.data.len()),
            Logical::Mxfp4(packed) => ("mxfp4".into(), packed.codes.data.len() + packed.scales.data.len()),
        };
        total += size as u64;
        let (mut scales, mut nan) = (String::new(), String::new());
        if let Some(histogram) = &entry.histogram {
            sum.add(histogram);
            quantized += 1;
            scales = histogram
                .scale_range()
                .map_or("none".into(), |(low, high)| format!("{} … {}", power(low), power(high)));
            nan = count(histogram.nan_scales());
        }
        let stored = format!("{format} {}", shape(entry.tensor.shape()));
        rows.add_row([entry.tensor.name(), &stored, &bytes(size as u64), &scales, &nan]);
    }
    let (tensors, files) = (count(inspected.len() as u64), checkpoint.files());
    let plural = if files == 1 { "file" } else { "files" };
    let rows = rows.trim_fmt();
    let mut text = format!(
        "{rows}\n\n{tensors} tensors in {files} {plural}, {} of them quantized, {}",
        count(quantized),
        bytes(total)
    );
    if quantized > 0 {
        text += &format!("\n\n{}\n\n{}", scales_text(&sum), codes_text(&sum));
    }
    print(text)
}

/// The scale of a byte, as a power of two.
fn power(byte: u8) -> String {
    format!("2^{}", i32::from(byte) - 127)
}

fn scales_text(histogram: &Histogram) -> String {
    let mut rows = table(&["scale", ">byte", ">blocks", ""]);
    let most = histogram.scales.iter().copied().max().unwrap_or(0);
    let mut gap = false;
    let (low, high) = histogram.scale_range().unwrap_or((255, 255));
    let bytes = (low..=high).chain((high < 255 && histogram.nan_scales() > 0).then_some(255));
    for byte in bytes {
        let blocks = histogram.scales[byte as usize];
        if blocks == 0 {
            gap = true;
            continue;
        }
        if std::mem::take(&mut gap) {
            rows.add_row(["…"]);
        }
        let scale = if byte == 255 { "NaN".into() } else { power(byte) };
        rows.add_row([&scale, &byte.to_string(), &count(blocks), &bar(blocks, most)]);
    }
    rows.trim_fmt()
}

fn codes_text(histogram: &Histogram) -> String {
    let mut rows = table(&["value", ">code", ">elements", ""]);
    let most = histogram.codes.iter().copied().max().unwrap_or(0);
    // From the most negative to the most positive.
    for code in (8..16).rev().chain(0..8) {
        let elements = histogram.codes[code as usize];
        let value = E2m1::from_bits(code).to_f32();
        rows.add_row([&format!("{value:?}"), &code.to_string(), &count(elements), &bar(elements, most)]);
    }
    rows.trim_fmt()
}

/// A bar as long as its share of the longest; what is there at all is visible.
fn bar(n: u64, most: u64) -> String {
    let length = if most == 0 { 0.0 } else { n as f64 / most as f64 * BAR as f64 };
    if n > 0 && length < 0.5 { "▏".into() } else { "█".repeat(length.round() as usize) }
}
