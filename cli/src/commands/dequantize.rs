//! `microscale dequantize`: makes an ordinary checkpoint of a quantized one.

use anyhow::Result;
use microscale::{Dtype, NonFinite, Words};
use microscale_checkpoint::{self as checkpoint, Dequantize, Dequantized};

use crate::options::rewrite::{Rewrite, RewriteArgs};
use crate::options::words::words;
use crate::outputs::after;
use crate::progress::Bar;
use crate::text::table::{bytes, count, seconds, skipped_text, table};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    files: RewriteArgs,
    /// Dtype of the values [default: config.json's, or bf16]
    #[arg(long, value_parser = words::<Dtype>(), help_heading = "Quality")]
    dtype: Option<Dtype>,
    /// What to do with values beyond the dtype's largest number [default: error]
    ///
    /// error refuses them, propagate writes infinities, and saturate writes the largest number, and 0
    /// for NaN.
    #[arg(long, default_value = "error", hide_default_value = true, value_name = "POLICY")]
    #[arg(value_parser = words::<NonFinite>(), help_heading = "Quality")]
    non_finite: NonFinite,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Rewrite { checkpoint, out, device, json } = args.files.start("dequantize")?;
    let mut bar = Bar::new("dequantizing");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let dequantize = Dequantize { dtype: args.dtype, non_finite: args.non_finite };
    let done = dequantize.run(&checkpoint, out, &device, &mut update)?;
    drop(bar);

    let mut rows = table(&["", ">tensors", ">elements", ">before", ">after"]);
    for (what, sums) in [("dequantized", done.dequantized), ("copied", done.copied)] {
        let (before, after) = (bytes(sums.bytes_before), bytes(sums.bytes_after));
        rows.add_row([what, &count(sums.tensors), &count(sums.elements), &before, &after]);
    }
    let mut text = format!("{}\n", rows.trim_fmt());
    if done.nan_scales > 0 {
        text += &format!("\n{} blocks have a NaN scale: all their values are NaN\n", count(done.nan_scales));
    }
    text += &non_finite_text(&done, args.non_finite);
    text += &skipped_text(&done.skipped);
    let (compute, whole) = (seconds(done.compute_seconds), seconds(done.seconds));
    text += &format!("\ndtype   {}\ndevice  {}\n", done.dtype.word(), done.device);
    text += &format!("time    {compute} dequantizing, {whole} in all\noutput  {}", out.display());
    after(out.display(), json.finish_summary(done.to_json(), text))
}

/// The counts of values that are not finite, and the values written in their place.
fn non_finite_text(done: &Dequantized, policy: NonFinite) -> String {
    let saturated = policy == NonFinite::Saturate;
    let (dtype, infinite) = (done.dtype.word(), if saturated { "the largest number" } else { "infinite" });
    let counts = [
        (
            done.report.infinite,
            format!("values are beyond {dtype}'s largest number, and were written as {infinite}"),
        ),
        (
            done.report.nan,
            format!("values are NaN, and were written as {}", if saturated { "0" } else { "NaN" }),
        ),
    ];
    let counts = counts.iter().filter(|(values, _)| *values > 0);
    counts.map(|(values, what)| format!("\n{} {what}\n", count(*values))).collect()
}
