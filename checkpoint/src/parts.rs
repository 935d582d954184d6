//! Quantizing a checkpoint in parts, by processes or machines that know nothing of each other, and merging
//! what they made.
//!
//! A part is some of the shards. Beside OUT there is a directory `OUT.parts` with the finished ones. Each has
//! a note: a fingerprint of input and options, its checksum, and the outcome of its tensors. A shard gets its
//! name when it is complete, and its note after that, so that a part that was killed is made by running it
//! again: it keeps shards whose notes fit. Merging takes a shard only if its note fits.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Instant, UNIX_EPOCH};

use memmap2::Mmap;
use microscale::Device;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::parts::PartsError;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::quantize::Quantizer;
use crate::quantize::summary::Summary;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::json;
use crate::read::shard::Shard;
use crate::write::others::Skipped;
use crate::write::output::{Output, destination};
use crate::write::progress::{Meter, OnProgress};
use crate::write::rewrite::write_rest;
use crate::write::work::{Renamed, Rewrite};
use crate::write::workers::{ShardOutput, write_shards};

/// One of several parts of a checkpoint: `2/8` is the second of eight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Counted from 1.
    pub index: usize,
    /// The number of parts.
    pub of: usize,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((index, of)) if (1..=of).contains(&index) => Ok(Self { index, of }),
            _ => Err("I/N, where I goes from 1 to N".into()),
        }
    }
}

/// The outcome of a part.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PartDone {
    /// The summary of the shards that were made now.
    pub summary: Summary,
    /// Shards that were made now.
    pub made: usize,
    /// Shards that were there already.
    pub kept: usize,
    /// All shards of the checkpoint.
    pub of: usize,
    /// The directory of the shards.
    pub directory: PathBuf,
}

/// The outcome of merging.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Merged {
    /// Shards.
    pub shards: usize,
    /// Each tensor of the input with what became of it, as `quantize` would have said it in JSON.
    pub tensors: Vec<Value>,
    /// Bytes of all tensors of the output.
    pub bytes: u64,
    /// Other entries of the directory that were not copied.
    pub skipped: Vec<Skipped>,
    /// Time for everything.
    pub seconds: f64,
}

/// The note that is kept beside a shard.
#[derive(Serialize, Deserialize)]
struct Note {
    /// A hash of everything that decides the bytes of the output.
    fingerprint: String,
    bytes: u64,
    checksum: String,
    /// The names that took each tensor's place.
    names: Vec<(String, Vec<String>)>,
    tensor_bytes: u64,
    tensors: Vec<Value>,
    config: Option<Map<String, Value>>,
    hf_quant_config: Option<Map<String, Value>>,
}

/// Carries out a part of a plan: makes the shards of `OUT.parts` that fall to it and are not there yet.
///
/// All parts of all runs must be given the same input and options. The bytes are those that
/// [`quantize`](crate::quantize()) makes. Shards go to parts by their sizes, the largest first and each to
/// the part with the least so far; a part may get none.
///
/// # Errors
/// Those of [`quantize`](crate::quantize()).
pub fn quantize_part(
    plan: &Plan<'_>,
    part: Part,
    out: &Path,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<PartDone> {
    let start = Instant::now();
    let checkpoint = plan.checkpoint();
    let directory = directory_of(&destination(checkpoint, out)?);
    fs::create_dir_all(&directory).map_err(Error::io("create", &directory))?;
    let fingerprint = fingerprint(plan);
    let work = Quantizer::new(plan)?;
    let mut description = Description::of(checkpoint);
    work.describe(&mut description);

    let shards = assigned(&checkpoint.shards, part);
    let mut meter = Meter::new(shards.iter().flat_map(|shard| shard.tensors()), progress);
    let (mut missing, mut kept) = (Vec::new(), 0);
    for shard in shards {
        meter.before(&shard.name.to_string_lossy())?;
        let path = directory.join(&shard.name);
        if let Some(note) = Note::read(&path)
            && note.fingerprint == fingerprint
            && note.fits(&path)
        {
            meter.done += shard.tensors().map(|tensor| tensor.data.len() as u64).sum::<u64>();
            kept += 1;
        } else {
            let parent = path.parent().unwrap_or(&directory);
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
            missing.push(shard);
        }
    }
    // This directory is removed at the end, with unfinished files in it.
    let making = tempfile::Builder::new().prefix(".making").tempdir_in(&directory);
    let making = making.map_err(Error::io("create a temporary directory in", &directory))?;
    let unfinished = (0..).map(|number: usize| making.path().join(number.to_string()));
    let outputs: Vec<_> =
        missing.into_iter().zip(unfinished).map(|(shard, path)| ShardOutput { shard, path }).collect();
    let tensors = write_shards(&outputs, &work, device, &mut meter, |output, renamed, done| {
        let path = directory.join(&output.shard.name);
        fs::rename(&output.path, &path).map_err(Error::io("rename the finished shard to", &path))?;
        let (bytes, checksum) = checksum(&path).map_err(Error::io("read", &path))?;
        let note = Note {
            fingerprint: fingerprint.clone(),
            bytes,
            checksum,
            names: renamed.names.into_iter().collect(),
            tensor_bytes: renamed.bytes,
            tensors: done.iter().map(|done| done.summary.to_json()).collect(),
            config: description.config.clone(),
            hf_quant_config: description.hf_quant_config.clone(),
        };
        note.write(&path)
    })?;
    meter.before("")?;
    let summary = work.summary(device, tensors, Vec::new(), start);
    Ok(PartDone { summary, made: outputs.len(), kept, of: checkpoint.shards.len(), directory })
}

/// Puts the parts together: `out` is then what [`quantize`](crate::quantize()) would have made, and
/// `OUT.parts` is gone.
///
/// Every shard is read once to check it. Nothing is quantized, so that no options are needed but the input
/// and the output.
///
/// # Errors
/// [`PartsError::Missing`](crate::PartsError::Missing), [`PartsError::Differ`](crate::PartsError::Differ),
/// and everything about writing.
pub fn merge(checkpoint: &Checkpoint, out: &Path, progress: &mut OnProgress<'_>) -> Result<Merged> {
    let start = Instant::now();
    let directory = directory_of(&destination(checkpoint, out)?);
    let notes = notes(checkpoint, &directory)?;
    let output = Output::create(checkpoint, out)?;
    let (mut renamed, mut tensors) = (Renamed::default(), Vec::new());
    let mut meter = Meter::new(checkpoint.tensors(), progress);
    let mut description = Description::of(checkpoint);
    for (shard, note) in checkpoint.shards.iter().zip(notes) {
        meter.before(&shard.name.to_string_lossy())?;
        let from = directory.join(&shard.name);
        if !note.fits(&from) {
            return Err(Error::Parts(PartsError::Missing {
                directory,
                shards: vec![shard.name.clone()],
                of: checkpoint.shards.len(),
            }));
        }
        let to = output.place(&shard.name)?;
        // A second name costs nothing, and a merge that is killed can be repeated. That of a link would be a
        // link too.
        if from.is_symlink() || fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).map_err(Error::io("write", &to))?;
            File::open(&to).and_then(|file| file.sync_all()).map_err(Error::io("write", &to))?;
        }
        meter.done += shard.tensors().map(|tensor| tensor.data.len() as u64).sum::<u64>();
        renamed.extend(Renamed { names: note.names.into_iter().collect(), bytes: note.tensor_bytes });
        tensors.extend(note.tensors);
        (description.config, description.hf_quant_config) = (note.config, note.hf_quant_config);
    }
    let bytes = renamed.bytes;
    let skipped = write_rest(checkpoint, &output, &renamed, &description, &mut meter)?;
    output.commit()?;
    fs::remove_dir_all(&directory).map_err(Error::io("remove", &directory))?;
    let (shards, seconds) = (checkpoint.shards.len(), start.elapsed().as_secs_f64());
    Ok(Merged { shards, tensors, bytes, skipped, seconds })
}

/// The notes of all shards, which must be of one plan.
fn notes(checkpoint: &Checkpoint, directory: &Path) -> Result<Vec<Note>> {
    let found: Vec<_> =
        checkpoint.shards.iter().map(|shard| Note::read(&directory.join(&shard.name))).collect();
    let names = checkpoint.shards.iter().map(|shard| &shard.name);
    let missing: Vec<_> =
        names.zip(&found).filter(|(_, note)| note.is_none()).map(|(name, _)| name.clone()).collect();
    if !missing.is_empty() {
        let (directory, of) = (directory.into(), checkpoint.shards.len());
        return Err(Error::Parts(PartsError::Missing { directory, shards: missing, of }));
    }
    let notes: Vec<_> = found.into_iter().flatten().collect();
    let other = notes.iter().position(|note| note.fingerprint != notes[0].fingerprint);
    match other {
        None => Ok(notes),
        Some(other) => {
            let [first, second] = [0, other].map(|shard| checkpoint.shards[shard].name.clone());
            Err(Error::Parts(PartsError::Differ { directory: directory.into(), first, second }))
        }
    }
}

/// `OUT.parts`.
fn directory_of(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_os_string();
    name.push(".parts");
    out.with_file_name(name)
}

/// The shards of a part, in the checkpoint's order.
fn assigned(shards: &[Shard], part: Part) -> Vec<&Shard> {
    let sizes: Vec<u64> = shards.iter().map(Shard::bytes).collect();
    let mine = parts_of(&sizes, part.of);
    shards.iter().zip(mine).filter(|(_, index)| *index == part.index).map(|(shard, _)| shard).collect()
}

/// The part of each shard, counted from 1.
fn parts_of(sizes: &[u64], parts: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|shard| (std::cmp::Reverse(sizes[*shard]), *shard));
    // No more parts than shards get any.
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

/// Hashes everything that decides the output's bytes. The sizes and times of the input's files stand for
/// their data.
fn fingerprint(plan: &Plan<'_>) -> String {
    let mut hash = Xxh3::new();
    let mut add = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(env!("CARGO_PKG_VERSION"));
    add(&plan.to_json().to_string());
    for shard in &plan.checkpoint().shards {
        add(&shard.name.to_string_lossy());
        let changed = fs::metadata(&shard.path).and_then(|file| file.modified()).ok();
        let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        add(&format!("{} {changed:?}", shard.bytes()));
    }
    plan.add_given(&mut hash);
    format!("{:032x}", hash.digest128())
}

/// A file's length and checksum.
fn checksum(path: &Path) -> std::io::Result<(u64, String)> {
    let file = File::open(path)?;
    // SAFETY: the map is private and read-only and only read as bytes. Nobody else changes a finished shard:
    // it was renamed into its place, and whoever makes it again makes another file.
    let map = unsafe { Mmap::map(&file) }?;
    Ok((map.len() as u64, format!("{:032x}", xxh3_128(&map))))
}

impl Note {
    fn path(shard: &Path) -> PathBuf {
        let mut name = shard.file_name().unwrap_or_default().to_os_string();
        name.push(".note.json");
        shard.with_file_name(name)
    }

    /// The note beside a shard; `None` if there is none, or it is of another version.
    fn read(shard: &Path) -> Option<Self> {
        serde_json::from_slice(&json::read(&Self::path(shard)).ok()?).ok()
    }

    /// Returns whether a shard is the one that the note describes, and can hold as many tensors as it says.
    fn fits(&self, shard: &Path) -> bool {
        let length = fs::metadata(shard).ok().filter(|file| file.is_file()).map(|file| file.len());
        length == Some(self.bytes)
            && self.tensor_bytes <= self.bytes
            && checksum(shard).is_ok_and(|(_, checksum)| checksum == self.checksum)
    }

    fn write(&self, shard: &Path) -> Result<()> {
        let path = Self::path(shard);
        let write = || {
            let parent = path.parent().unwrap_or(Path::new("."));
            let mut file = tempfile::NamedTempFile::new_in(parent)?;
            serde_json::to_writer(&mut file, self)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        write().map_err(Error::io("write", &path))
    }
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

    #[test]
    fn parts_are_counted_from_one() {
        assert_eq!("2/8".parse(), Ok(Part { index: 2, of: 8 }));
        for wrong in ["0/8", "9/8", "1/0", "1", "/", "a/b", "-1/2", "1/2/3"] {
            assert!(wrong.parse::<Part>().is_err(), "{wrong}");
        }
    }
}
