//! `microscale merge`: makes a checkpoint of the parts that `quantize --part` made.

use std::path::PathBuf;

use anyhow::Result;
use microscale_checkpoint::{self as checkpoint, OpenOptions, Quantize};
use serde_json::json;

use crate::outputs::{Files, OtherFilesArgs, after, tell_of_left, warn_of};
use crate::pending::Pending;
use crate::progress::Bar;
use crate::streams::print;
use crate::text::table::{bytes, count, seconds, skipped_text};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checkpoint that the parts were made from
    input: PathBuf,
    /// The output that the parts were given: OUT.parts becomes OUT
    #[arg(long)]
    out: PathBuf,
    /// Take experts of a layer that lie in one tensor one by one, as the parts did
    #[arg(long)]
    split_experts: bool,
    /// Also write what became of each tensor as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    others: OtherFilesArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let options = OpenOptions { split_experts: args.split_experts, ..args.others.options() };
    let checkpoint = Quantize { open: options, ..Quantize::default() }.open(&args.input)?;
    warn_of(&checkpoint);
    let parts = checkpoint::parts_directory(&args.out)?;
    Files {
        checkpoints: &[&checkpoint],
        outputs: &[&args.out, &parts],
        written: &[args.json.as_deref()],
        ..Files::default()
    }
    .check()?;
    tell_of_left(&checkpoint::remove_unfinished_output(&args.out));
    args.others.tell(&checkpoint)?;
    let json = args.json.as_deref().map(Pending::create).transpose()?;
    let mut bar = Bar::new("merging");
    let merged = checkpoint::merge(&checkpoint, &args.out, &mut |progress| bar.update(progress))?;
    drop(bar);
    let complete = args.out.display();
    if let Some(json) = json {
        after(&complete, json.finish(format_args!("{:#}", json!({ "tensors": merged.tensors }))))?;
    }
    let (shards, tensors) = (count(merged.shards as u64), count(merged.tensors.len() as u64));
    let mut text =
        format!("{shards} shards, all with their checksums; {tensors} tensors, {}\n", bytes(merged.bytes));
    text += &skipped_text(&merged.skipped);
    if let Some(left) = &merged.left {
        text += &format!("\nleft {}: it has files that are not of this merge\n", left.display());
    }
    let text = text + &format!("\ntime    {}\noutput  {}", seconds(merged.seconds), args.out.display());
    after(complete, print(text))
}
