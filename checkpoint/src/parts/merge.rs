//! Merges finished shards into the output.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use crate::error::parts::PartsError;
use crate::error::{Error, Result};
use crate::parts::directory::Directory;
use crate::parts::note::Note;
use crate::plan::sources::source_positions;
use crate::progress::{Meter, OnProgress};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::shard::Shard;
use crate::write::others::Skipped;
use crate::write::output::Output;
use crate::write::place::Place;
use crate::write::rewrite::write_rest;
use crate::write::work::Renamed;

/// The result of merging.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Merged {
    /// The number of shards.
    pub shards: usize,
    /// The outcome of each input tensor, in the JSON format of [`Plan::run`](crate::Plan::run).
    pub tensors: Vec<Value>,
    /// The size of all tensors of the output in bytes.
    pub bytes: u64,
    /// Other entries of the input directory that were not copied.
    pub skipped: Vec<Skipped>,
    /// `OUT.parts` if it could not be removed: it contains other files, or shards that were made
    /// again during the merge.
    pub left: Option<PathBuf>,
    /// The duration in seconds.
    pub seconds: f64,
}

/// Merges the parts into `out`, with the same bytes as from [`Plan::run`](crate::Plan::run), and
/// removes the merged shards from `OUT.parts`.
///
/// Every shard is read once to check it. Nothing is quantized, so no options are needed. Parts may
/// be made again during the merge: the shards in the output are the ones that were checked.
///
/// # Errors
/// [`PartsError::Missing`](crate::PartsError::Missing) if shards are missing or incomplete,
/// [`PartsError::Differ`](crate::PartsError::Differ) if they come from different plans,
/// [`PartsError::Split`] if experts were split in only one of parts and checkpoint, and the errors
/// of writing.
pub fn merge(checkpoint: &Checkpoint, out: &Path, progress: &mut OnProgress<'_>) -> Result<Merged> {
    let start = Instant::now();
    let directory = Directory::find(checkpoint, out)?;
    let notes = notes(checkpoint, &directory)?;
    if let Some(note) = notes.iter().find(|note| note.experts_split != checkpoint.options.split_experts) {
        let split = note.experts_split;
        return Err(Error::Parts(PartsError::Split { directory: directory.path, split }));
    }
    let mut has_sources = vec![false; checkpoint.shards.len()];
    source_positions(checkpoint)?.iter().for_each(|position| has_sources[position.shard] = true);
    let mut output = Output::create(checkpoint, out)?;
    let (mut renamed, mut tensors, mut taken) = (Renamed::default(), Vec::new(), Vec::new());
    let mut meter = Meter::new(checkpoint.tensors().map(|tensor| tensor.data.len() as u64).sum(), progress);
    let mut description = Description::of(checkpoint);
    for ((shard, note), has_sources) in checkpoint.shards.iter().zip(notes).zip(has_sources) {
        meter.before(&shard.name.to_string_lossy())?;
        // No index names a shard that had only scales: scales are written with their codes.
        let is_left = checkpoint.index.is_none() || has_sources;
        let mut shared = None;
        if is_left {
            let to = output.place(&shard.written_name())?;
            let Some(place) = take(&directory.shard(shard), &to, &note)? else {
                return Err(missing(checkpoint, &directory, vec![shard.name.clone()]));
            };
            shared = place;
            output.wrote(to, note.bytes);
        }
        taken.push((shard, is_left.then_some(note.bytes), shared, note.checksum));
        meter.done += shard.tensors().map(|tensor| tensor.data.len() as u64).sum::<u64>();
        renamed.extend(Renamed { names: note.names.into_iter().collect(), bytes: note.tensor_bytes });
        tensors.extend(note.tensors);
        (description.config, description.hf_quant_config) = (note.config, note.hf_quant_config);
    }
    let bytes = renamed.bytes;
    let skipped = write_rest(checkpoint, &mut output, &renamed, &description, &mut meter)?;
    // From here on the output has every shard, so the parts are no longer needed.
    output.commit()?;
    let is_in_output = |shard: &Shard, bytes: &u64| {
        let file = if checkpoint.directory { out.join(shard.written_name()) } else { out.into() };
        fs::metadata(file).is_ok_and(|file| file.len() == *bytes)
    };
    let merged = taken.iter().filter(|(shard, bytes, place, checksum)| {
        bytes.as_ref().is_none_or(|bytes| is_in_output(shard, bytes))
            && is_still(&directory.shard(shard), place.as_ref(), checksum)
    });
    let gone = directory.remove(merged.map(|(shard, ..)| directory.shard(shard)));
    let left = (!gone).then_some(directory.path);
    let (shards, seconds) = (checkpoint.shards.len(), start.elapsed().as_secs_f64());
    Ok(Merged { shards, tensors, bytes, skipped, left, seconds })
}

/// Links or copies a finished shard into the output, then checks the result: the source may have
/// been replaced meanwhile.
///
/// Returns `None` if the file is not the shard of the note. Otherwise returns its place if it was
/// linked.
fn take(from: &Path, to: &Path, note: &Note) -> Result<Option<Option<Place>>> {
    if !note.may_fit(from) {
        return Ok(None);
    }
    // A hard link costs nothing, and a killed merge can be repeated. A hard link to a symlink would
    // be a symlink too.
    let linked = !from.is_symlink() && fs::hard_link(from, to).is_ok();
    if !linked {
        fs::copy(from, to).map_err(Error::io("write", to))?;
        // Windows does not flush a file that is open read-only.
        let copied = File::options().write(true).open(to);
        copied.and_then(|file| file.sync_all()).map_err(Error::io("write", to))?;
    }
    if to.is_symlink() || !note.fits(to) {
        return Ok(None);
    }
    Ok(Some(if linked { Some(Place::of(to)?) } else { None }))
}

/// Returns whether a shard in `OUT.parts` is still the one that was taken.
fn is_still(shard: &Path, taken: Option<&Place>, checksum: &str) -> bool {
    match taken {
        Some(taken) if cfg!(unix) => Place::of(shard).is_ok_and(|shard| shard.is(taken)),
        _ => Note::read(shard).ok().flatten().is_some_and(|note| note.checksum == checksum),
    }
}

/// The notes of all shards, which must come from the same plan.
fn notes(checkpoint: &Checkpoint, directory: &Directory) -> Result<Vec<Note>> {
    let found = checkpoint.shards.iter().map(|shard| Note::read(&directory.shard(shard)));
    let found = found.collect::<Result<Vec<_>>>()?;
    let names = checkpoint.shards.iter().map(|shard| &shard.name);
    let without: Vec<_> =
        names.zip(&found).filter(|(_, note)| note.is_none()).map(|(name, _)| name.clone()).collect();
    if !without.is_empty() {
        return Err(missing(checkpoint, directory, without));
    }
    let notes: Vec<_> = found.into_iter().flatten().collect();
    let other = notes.iter().position(|note| note.fingerprint != notes[0].fingerprint);
    match other {
        None => Ok(notes),
        Some(other) => {
            let shard = |number: usize| checkpoint.shards[number].name.clone();
            let (first, second) = (shard(0), shard(other));
            Err(Error::Parts(PartsError::Differ { directory: directory.path.clone(), first, second }))
        }
    }
}

fn missing(checkpoint: &Checkpoint, directory: &Directory, shards: Vec<PathBuf>) -> Error {
    let (directory, of) = (directory.path.clone(), checkpoint.shards.len());
    Error::Parts(PartsError::Missing { directory, shards, of })
}
