//! `microscale compare`.

use std::path::PathBuf;

use anyhow::Result;

use super::progress::Bar;
use super::table::{count, decibels, figure, natural_order, table};
use super::{device, print};
use crate::checkpoint::{self, Checkpoint, Difference};
use crate::{DeviceChoice, ErrorStats};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The original: a .safetensors or .gguf file, or a checkpoint directory, quantized or not
    a: PathBuf,
    /// What is measured against it
    b: PathBuf,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

pub(super) fn run(args: Args) -> Result<()> {
    let (a, b) = (Checkpoint::open(&args.a)?, Checkpoint::open(&args.b)?);
    let device = device(args.device)?;
    let mut bar = Bar::new("comparing");
    let mut comparison = checkpoint::compare(&a, &b, &device, &mut |progress| bar.update(progress))?;
    drop(bar);

    comparison.tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
    let mut rows = table(&["tensor", ">rel. sq. error", ">SQNR", ">max abs error", ">cosine"]);
    for tensor in &comparison.tensors {
        match &tensor.difference {
            Difference::Values(errors) => rows.add_row(row(&tensor.name, errors)),
            Difference::Bytes { same: true } => rows.add_row([&tensor.name, "same bytes"]),
            Difference::Bytes { same: false } => rows.add_row([&tensor.name, "other bytes"]),
        };
    }
    rows.add_row(row("total", &comparison.total));
    let mut text = rows.trim_fmt();
    if comparison.total.non_finite() > 0 {
        text += &format!("\n\nleft out: {} values that are not finite", count(comparison.total.non_finite()));
    }
    for (path, names) in [(&args.a, &comparison.only_first), (&args.b, &comparison.only_second)] {
        if !names.is_empty() {
            text += &format!("\n\nonly in {}:\n  {}", path.display(), names.join("\n  "));
        }
    }
    print(text)
}

fn row(name: &str, errors: &ErrorStats) -> [String; 5] {
    [
        name.into(),
        figure(errors.relative_squared_error()),
        decibels(errors.sqnr_db()),
        figure(errors.max_abs_error()),
        format!("{:.6}", errors.cosine()),
    ]
}
