//! `microscale convert`: rewrites a quantized checkpoint in another checkpoint format.

use anyhow::Result;
use microscale::{Format, GlobalScale, Report, Words};
use microscale_checkpoint::{self as checkpoint, CheckpointFormat, Convert, Requantized, Rounding, Written};

use crate::options::rewrite::{Rewrite, RewriteArgs};
use crate::options::words::{converted_formats, stored_formats};
use crate::outputs::after;
use crate::progress::Bar;
use crate::streams::warn;
use crate::text::names::shown;
use crate::text::table::{bytes, count, figure, natural_order, seconds, skipped_text, table};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    files: RewriteArgs,
    /// Checkpoint format to write
    ///
    /// fp8-block is FP8 with a scale per 128×128 block; weights are cast to it exactly.
    #[arg(long, value_name = "FORMAT", value_parser = converted_formats(), help_heading = "Output")]
    to: CheckpointFormat,
    /// Format to cast to, exactly [default: each tensor's own]
    ///
    /// nvfp4 from mxfp4; mxfp8-e4m3 from mxfp4, and from nvfp4 where that is exact.
    #[arg(short, long, value_parser = stored_formats(), help_heading = "Quality")]
    format: Option<Format>,
    /// Quantize values again that cannot be cast exactly, instead of refusing
    #[arg(long, help_heading = "Quality")]
    requantize: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Rewrite { checkpoint, out, device, json } = args.files.start("convert")?;
    let mut bar = Bar::new("converting");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let convert = Convert { to: args.to, format: args.format, requantize: args.requantize };
    let mut done = convert.run(&checkpoint, out, &device, &mut update)?;
    drop(bar);
    for warning in &done.misread_by {
        warn(warning);
    }
    if let Some(first) = done.unscaled_inputs.first() {
        let layers = count(done.unscaled_inputs.len() as u64);
        warn(format_args!(
            "the config says that inputs are quantized, but {layers} layers have no scale of their inputs, \
             as {} has none: vLLM computes with whatever memory holds",
            shown(first)
        ));
    }

    let mut rows = table(&["", ">tensors", ">elements", ">before", ">after"]);
    let kinds = [("converted", done.converted), ("in bf16", done.in_bf16), ("copied", done.copied)];
    for (what, sums) in kinds.into_iter().filter(|(what, sums)| *what != "in bf16" || sums.tensors > 0) {
        let (before, after) = (bytes(sums.bytes_before), bytes(sums.bytes_after));
        rows.add_row([what, &count(sums.tensors), &count(sums.elements), &before, &after]);
    }
    let mut text = format!("{}\n", rows.trim_fmt());
    done.rounded.sort_by(|a, b| natural_order(&a.tensor, &b.tensor));
    text += &roundings(&done.rounded);
    done.requantized.sort_by(|a, b| natural_order(&a.tensor, &b.tensor));
    text += &requantizings(&done.requantized);
    let differing = done.requantized.iter().filter(|tensor| tensor.to != "bf16").count();
    let same = done.converted.tensors - (done.rounded.len() + differing) as u64;
    text += &format!("\n{} tensors have the same values to the bit\n", count(same));
    let fp8 = (args.to.written() == Written::ByConvert).then(|| args.to.to_string());
    if let Some(format) = args.format.map(|format| format.to_string()).or(fp8).filter(|_| done.cast > 0) {
        text += &format!("{} of them were cast to {format}\n", count(done.cast));
    }
    if !done.rounded_inputs.is_empty() {
        let layers = count(done.rounded_inputs.len() as u64);
        text +=
            &format!("\nthe global scales of {layers} layers' inputs were inverted, which rounded them\n");
    }
    if let Some(first) = done.dropped_inputs.first() {
        let (layers, to, first) = (count(done.dropped_inputs.len() as u64), args.to, shown(first));
        text += &format!(
            "\nthe scales of {layers} layers' inputs were left out, as {to} has no place for them: of {first}{}\n",
            if done.dropped_inputs.len() > 1 { " and others" } else { "" }
        );
    }
    if let Some(inputs) = &done.dropped_activations {
        text += &format!("\nthe config no longer says that inputs are quantized: {inputs}\n");
    }
    if let Some(cache) = &done.dropped_cache {
        text +=
            &format!("\nthe config no longer says how the cache of keys and values is quantized: {cache}\n");
    }
    text += &skipped_text(&done.skipped);
    let (to, whole, out) = (args.to.word(), seconds(done.seconds), out.display());
    text += &format!("\nfiles   {to}\ndevice  {device}\ntime    {whole}\noutput  {out}");
    after(out, json.finish_summary(done.to_json(), text))
}

/// The tensors that were quantized again, and what that lost.
fn requantizings(requantized: &[Requantized]) -> String {
    if requantized.is_empty() {
        return String::new();
    }
    let mut rows = table(&["quantized again", "from", "to", ">values differ", ">relative error", ">SQNR"]);
    let mut report = Report::default();
    for tensor in requantized {
        report += tensor.report;
        let differ = format!("{} of {}", count(tensor.differing), count(tensor.values));
        let error = figure(tensor.errors.relative_squared_error().sqrt());
        let sqnr = format!("{:.1} dB", tensor.errors.sqnr_db());
        rows.add_row([&shown(&tensor.tensor), &tensor.from, &tensor.to, &differ, &error, &sqnr]);
    }
    let counts = [
        (report.clipped_blocks, "blocks clipped"),
        (report.flushed_blocks, "blocks flushed to zero"),
        (report.saturated_scales, "scales out of range"),
    ];
    let counts = counts.iter().filter(|(blocks, _)| *blocks > 0);
    let counts = counts.map(|(blocks, what)| format!("{} {what}\n", count(*blocks)));
    format!("\n{}\n{}", rows.trim_fmt(), counts.collect::<String>())
}

/// The tensors that another direction of the global scale has changed.
fn roundings(rounded: &[Rounding]) -> String {
    if rounded.is_empty() {
        return String::new();
    }
    let mut rows = table(&[
        "global scale inverted and rounded",
        ">before",
        ">after",
        ">values differ",
        ">relative error",
    ]);
    for rounding in rounded {
        let scale = |scale| match scale {
            GlobalScale::Divisor(divisor) => format!("1 / {divisor}"),
            GlobalScale::Multiplier(multiplier) => multiplier.to_string(),
        };
        let differ = format!("{} of {}", count(rounding.differing), count(rounding.values));
        let error = figure(rounding.errors.relative_squared_error().sqrt());
        let (before, after) = (scale(rounding.before), scale(rounding.after));
        rows.add_row([&shown(&rounding.tensor), &before, &after, &differ, &error]);
    }
    format!("\n{}\n", rows.trim_fmt())
}
