//! `microscale merge`: makes a checkpoint of the parts that `quantize --part` made.

use std::path::PathBuf;

use anyhow::Result;
use microscale_checkpoint::{self as checkpoint, OpenOptions, Quantize};

use crate::options::output::{JsonArgs, OutputArgs};
use crate::outputs::{Files, OtherFilesArgs, after, opened, tell_of_left};
use crate::progress::Bar;
use crate::text::table::{bytes, count, seconds, skipped_text};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint that the parts were made from
    input: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    json: JsonArgs,
    #[command(flatten)]
    others: OtherFilesArgs,
    /// The parts were made with --split-experts
    #[arg(long, help_heading = "Compatibility")]
    split_experts: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let options = OpenOptions { split_experts: args.split_experts, ..args.others.options() };
    let out = args.output.required("merge")?;
    let quantize = Quantize { open: options, ..Quantize::default() };
    let checkpoint = opened(&args.input, quantize.open(&args.input).map_err(Into::into))?;
    let parts = checkpoint::parts_directory(out)?;
    Files {
        checkpoints: &[&checkpoint],
        outputs: &[out, &parts],
        written: &[args.json.file()],
        ..Files::default()
    }
    .check()?;
    tell_of_left(&checkpoint::remove_unfinished_output(out));
    args.others.tell(&checkpoint)?;
    let json = args.json.start()?;
    let mut bar = Bar::new("merging");
    let merged = checkpoint::merge(&checkpoint, out, &mut |progress| bar.update(progress))?;
    drop(bar);
    let (shards, tensors) = (count(merged.shards as u64), count(merged.tensors.len() as u64));
    let mut text =
        format!("{shards} shards, all with their checksums; {tensors} tensors, {}\n", bytes(merged.bytes));
    text += &skipped_text(&merged.skipped);
    if let Some(left) = &merged.left {
        text += &format!("\nleft {}: it has files that are not of this merge\n", left.display());
    }
    let text = text + &format!("\ntime    {}\noutput  {}", seconds(merged.seconds), out.display());
    after(out.display(), json.finish_summary(merged.to_json(), text))
}
