//! Rewriting a checkpoint tensor by tensor, which quantizing, dequantizing and converting share.
//! The workers that do it are in `workers`.

use std::path::Path;

use microscale::Device;

use crate::error::Result;
use crate::progress::{Meter, OnProgress};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::json;
use crate::write::job::{Job, of_shard};
use crate::write::others;
use crate::write::others::Skipped;
use crate::write::output::Output;
use crate::write::work::{Renamed, Rewrite};
use crate::write::workers::{ShardOutput, write_shards};

/// Writes the whole checkpoint to `out`, or nothing. Returns the outcomes of its tensors in order,
/// and the skipped files.
pub(crate) fn rewrite<R: Rewrite>(
    checkpoint: &Checkpoint,
    out: &Path,
    work: &R,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<(Vec<R::Outcome>, Vec<Skipped>)> {
    let mut output = Output::create(checkpoint, out)?;
    let mut meter = Meter::new(work.jobs().iter().map(Job::bytes_before).sum(), progress);
    // A shard may hold only scales, which are written with their codes into other shards. No index
    // names such a shard any more.
    let is_left = |number: usize| checkpoint.index.is_none() || !of_shard(work.jobs(), number).is_empty();
    let left = checkpoint.shards.iter().enumerate().filter(|(number, _)| is_left(*number));
    let outputs = left
        .map(|(number, shard)| Ok(ShardOutput { shard, number, path: output.place(&shard.written_name())? }));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let mut renamed = Renamed::default();
    let done = write_shards(&outputs, work, device, &mut meter, |shard, names, bytes, _| {
        renamed.extend(names);
        output.wrote(shard.path.clone(), bytes);
        Ok(())
    })?;
    meter.before("")?;
    let mut description = Description::of(checkpoint);
    work.describe(&mut description);
    let skipped = write_rest(checkpoint, &mut output, &renamed, &description, &mut meter)?;
    output.commit()?;
    Ok((done, skipped))
}

/// Writes everything but the shards, and returns the skipped files.
pub(crate) fn write_rest(
    checkpoint: &Checkpoint,
    output: &mut Output,
    renamed: &Renamed,
    description: &Description,
    meter: &mut Meter<'_, '_>,
) -> Result<Vec<Skipped>> {
    if let Some(index) = &checkpoint.index {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let shards = checkpoint.shards.iter().map(|shard| (text(&shard.name), text(&shard.written_name())));
        let json = index.rewritten(&renamed.names, &shards.collect(), renamed.bytes);
        let path = output.place(index.written_name().as_ref())?;
        let bytes = json::write_object(&path, &json, None)?;
        output.wrote(path, bytes);
    }
    if !checkpoint.directory {
        return Ok(Vec::new());
    }
    for (name, json) in description.files() {
        let configs = [&checkpoint.config, &checkpoint.hf_quant_config];
        let original = configs.into_iter().flatten().find(|config| config.file.ends_with(name));
        let original = original.map(|config| &config.object);
        let path = output.place(name.as_ref())?;
        let bytes = json::write_object(&path, json, original)?;
        output.wrote(path, bytes);
    }
    let (files, skipped) = others::to_copy(checkpoint)?;
    for file in files {
        let path = output.place(&file)?;
        let bytes = others::copy(&checkpoint.path.join(&file), &path)?;
        output.wrote(path, bytes);
        meter.before("")?;
    }
    Ok(skipped)
}
