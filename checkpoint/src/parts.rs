//! Quantizes a checkpoint in parts, by independent processes or machines, and merges the results.
//!
//! A part is a subset of the shards. Finished shards are in the directory `OUT.parts` next to OUT.
//! Each one has a note with a fingerprint of input and options, checksums of the shard and of the
//! note, and the results of the tensors. A shard gets its name when it is complete, and its note
//! after that. So a part that was killed can be run again: it keeps the shards whose notes match.
//! Merging accepts a shard only if its note matches.
//!
//! | file | contents |
//! |---|---|
//! | `note` | the note next to a shard |
//! | `directory` | the directory `OUT.parts` |
//! | `merge` | merging |

pub(crate) mod directory;
pub(crate) mod merge;
pub(crate) mod note;

use std::fs;
use std::path::Path;
use std::time::{Instant, UNIX_EPOCH};

use microscale::Device;
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::parts::directory::Directory;
use crate::parts::note::{Note, checksum};
use crate::plan::Plan;
use crate::plan::part::Part;
use crate::progress::{Meter, OnProgress};
use crate::quantize::Quantizer;
use crate::quantize::summary::{PartSummary, Summary};
use crate::read::description::Description;
use crate::read::shard::Shard;
use crate::write::job::{Job, of_shard};
use crate::write::output::create_directories;
use crate::write::place::refuse_long_name;
use crate::write::work::Rewrite;
use crate::write::workers::{ShardOutput, write_shards};

/// Executes one part of a plan: makes its missing shards in `OUT.parts`.
///
/// All runs of all parts must have the same input and options. The bytes are the same as from
/// [`Plan::run`] without a part. Shards are assigned by size: the largest first, each to the part
/// with the fewest bytes so far. A part may get no shard.
///
/// # Errors
/// The errors of [`Plan::run`], and [`OutputError::NotParts`](crate::OutputError::NotParts) if
/// `OUT.parts` is another directory.
pub(crate) fn quantize_part(
    plan: &Plan<'_>,
    part: Part,
    out: &Path,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Summary> {
    let start = Instant::now();
    let checkpoint = plan.checkpoint();
    let directory = Directory::create(checkpoint, out)?;
    let fingerprint = fingerprint(plan);
    let work = Quantizer::new(plan)?;
    let mut description = Description::of(checkpoint);
    work.describe(&mut description);

    let shards = assigned(&checkpoint.shards, part);
    let bytes_of = |number: usize| of_shard(&plan.jobs, number).iter().map(Job::bytes_before).sum::<u64>();
    let mut meter = Meter::new(shards.iter().map(|(number, _)| bytes_of(*number)).sum(), progress);
    let (mut missing, mut kept) = (Vec::new(), 0);
    for (number, shard) in shards {
        meter.before(&shard.name.to_string_lossy())?;
        let path = directory.shard(shard);
        if let Some(note) = Note::read(&path)?
            && note.fingerprint == fingerprint
            && note.fits(&path)
        {
            meter.done += bytes_of(number);
            kept += 1;
        } else {
            refuse_long_name(&path)?;
            create_directories(&directory.path, shard.written_name().parent().unwrap_or(Path::new("")))?;
            missing.push((number, shard));
        }
    }
    let making = directory.temporary(part)?;
    let unfinished = (0..).map(|number: usize| making.path().join(number.to_string()));
    let outputs: Vec<_> = missing
        .into_iter()
        .zip(unfinished)
        .map(|((number, shard), path)| ShardOutput { shard, number, path })
        .collect();
    let tensors = write_shards(&outputs, &work, device, &mut meter, |output, renamed, expected, done| {
        let path = directory.shard(output.shard);
        let (bytes, checksum) = checksum(&output.path).map_err(Error::io("read", &output.path))?;
        if bytes != expected {
            let (file, out) = (output.path.clone(), path);
            return Err(Error::Output(OutputError::Lost { file, expected, found: Some(bytes), out }));
        }
        fs::rename(&output.path, &path).map_err(Error::io("rename the finished shard to", &path))?;
        let note = Note {
            fingerprint: fingerprint.clone(),
            bytes,
            checksum,
            names: renamed.names.into_iter().collect(),
            tensor_bytes: renamed.bytes,
            experts_split: checkpoint.options.split_experts,
            tensors: done.iter().map(|done| done.summary.to_json()).collect(),
            config: description.config.clone(),
            hf_quant_config: description.hf_quant_config.clone(),
        };
        note.write(&path, making.path())
    })?;
    meter.before("")?;
    let summary = work.summary(device, tensors, Vec::new(), start);
    let (made, of, directory) = (outputs.len(), checkpoint.shards.len(), directory.path);
    Ok(Summary { part: Some(PartSummary { made, kept, of, directory }), ..summary })
}

/// The shards of a part with their numbers, in the checkpoint's order.
fn assigned(shards: &[Shard], part: Part) -> Vec<(usize, &Shard)> {
    let sizes: Vec<u64> = shards.iter().map(Shard::bytes).collect();
    let mine = parts_of(&sizes, part.of);
    shards
        .iter()
        .enumerate()
        .zip(mine)
        .filter(|(_, index)| *index == part.index)
        .map(|(shard, _)| shard)
        .collect()
}

/// The part of each shard, counted from 1.
fn parts_of(sizes: &[u64], parts: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|shard| (std::cmp::Reverse(sizes[*shard]), *shard));
    // There is no need for more parts than shards.
    let (mut loads, mut parts_of) = (vec![0u64; parts.min(sizes.len())], vec![0; sizes.len()]);
    for shard in order {
        let (part, load) = loads
            .iter_mut()
            .enumerate()
            .min_by_key(|(part, load)| (**load, *part))
            .unwrap_or_else(|| unreachable!("there is a part"));
        *load += sizes[shard];
        parts_of[shard] = part + 1;
    }
    parts_of
}

/// Hashes everything that determines the output's bytes. Sizes and modification times stand in for
/// the data of the input files.
fn fingerprint(plan: &Plan<'_>) -> String {
    let mut hash = Xxh3::new();
    let mut add = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(env!("CARGO_PKG_VERSION"));
    add(&without_paths(plan.to_json()).to_string());
    for shard in &plan.checkpoint().shards {
        add(&shard.name.to_string_lossy());
        add(&shard.stored.len().to_string());
        let changed = fs::metadata(&shard.path).and_then(|file| file.modified()).ok();
        let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        add(&format!("{} {changed:?}", shard.bytes()));
    }
    plan.add_given(&mut hash);
    format!("{:032x}", hash.digest128())
}

/// A plan's JSON without the paths of its tensors' files: processes may know the input by different
/// paths.
fn without_paths(mut plan: Value) -> Value {
    let tensors = plan.get_mut("tensors").and_then(Value::as_array_mut);
    tensors.into_iter().flatten().filter_map(Value::as_object_mut).for_each(|tensor| {
        tensor.remove("file");
    });
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shard_is_of_one_part_and_none_has_much_more_than_another() {
        assert_eq!(parts_of(&[10, 30, 20, 20], 2), [1, 1, 2, 2]);
        assert_eq!(parts_of(&[5, 5], 4), [1, 2]);
        assert!(parts_of(&[], 3).is_empty());
        assert_eq!(parts_of(&[3, 7, 1], usize::MAX), [2, 1, 3], "nothing is kept for parts without shards");
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..100 {
            let sizes: Vec<u64> = (0..random.usize(1..60)).map(|_| random.u64(1..5000)).collect();
            let parts = random.usize(1..9);
            let mut loads = vec![0; parts];
            for (size, part) in sizes.iter().zip(parts_of(&sizes, parts)) {
                loads[part - 1] += size;
            }
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            assert!(most - least <= *sizes.iter().max().unwrap(), "{sizes:?}: {loads:?}");
        }
    }
}
