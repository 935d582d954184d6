//! The files of a checkpoint directory that are not weights: tokenizer, generation config, code,
//! licence.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::write::temporary::is_temporary;

/// The directory that file systems have at their top, where they are mounted.
pub(crate) const OF_FILE_SYSTEM: &str = "lost+found";

/// Directories that belong to the tools that fetched the checkpoint, and to the file system that it
/// is on.
const NOT_CONTENT: [&str; 3] = [".git", ".cache", OF_FILE_SYSTEM];

/// An entry of a checkpoint's directory that was not copied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Its path relative to the checkpoint.
    pub path: PathBuf,
    /// The reason.
    pub why: &'static str,
}

/// Entries that were not copied, as JSON.
pub(crate) fn skipped_to_json(skipped: &[Skipped]) -> Value {
    let entry = |entry: &Skipped| json!({ "path": entry.path.to_string_lossy(), "why": entry.why });
    skipped.iter().map(entry).collect()
}

/// The other files, relative to the checkpoint, sorted; and what should not be copied.
///
/// Symbolic links to files are read through, as in Hugging Face's cache. Links to directories are
/// not followed: they may lead out of the checkpoint or back into it.
pub(crate) fn list(checkpoint: &Checkpoint) -> Result<(Vec<PathBuf>, Vec<Skipped>)> {
    let root = &checkpoint.path;
    let configs = [&checkpoint.config, &checkpoint.hf_quant_config].into_iter().flatten();
    let configs = configs.map(|config| config.file.clone());
    let read = checkpoint.index.as_ref().map(|index| &index.file);
    let stale = checkpoint.stale_index.as_ref().map(|stale| &stale.index);
    let index = read.into_iter().chain(stale).cloned();
    let shards = checkpoint.shards.iter().map(|shard| shard.path.clone());
    let rewritten: HashSet<_> = shards.chain(index).chain(configs).collect();

    let (mut files, mut skipped, mut directories) = (Vec::new(), Vec::new(), vec![root.clone()]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).map_err(Error::io("list", &directory))? {
            let entry = entry.map_err(Error::io("list", &directory))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(Error::io("open", &path))?;
            let skip = if rewritten.contains(&path) {
                continue;
            } else if kind.is_dir() && NOT_CONTENT.iter().any(|name| entry.file_name() == *name) {
                "it belongs to the tool that fetched the checkpoint, or to the file system"
            } else if kind.is_dir() && is_temporary(&entry.file_name()) {
                "it belongs to a run of this program, which goes on or was killed"
            } else if kind.is_dir() {
                directories.push(path);
                continue;
            } else if path.is_file() {
                files.push(relative(&path, root));
                continue;
            } else if kind.is_symlink() {
                "it links to a directory, or to nothing"
            } else {
                "it is not a regular file"
            };
            skipped.push(Skipped { path: relative(&path, root), why: skip });
        }
    }
    files.sort();
    skipped.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((files, skipped))
}

/// The ends of the names of files that hold weights.
const WEIGHTS: [&str; 14] = [
    "bin",
    "ckpt",
    "gguf",
    "h5",
    "llamafile",
    "mlmodel",
    "msgpack",
    "onnx",
    "onnx_data",
    "ot",
    "pt",
    "pth",
    "safetensors",
    "tflite",
];

/// Returns whether a file is named like one that holds weights, in upper or lower case.
pub(crate) fn is_named_like_weights(file: &Path) -> bool {
    file.extension().is_some_and(|end| WEIGHTS.iter().any(|known| end.eq_ignore_ascii_case(known)))
}

/// Returns whether a file's name says that it holds weights. The weights of the checkpoint itself
/// are not among the other files.
fn holds_weights(file: &Path) -> bool {
    // The arguments of transformers' Trainer.
    is_named_like_weights(file) && file.file_name().is_none_or(|name| name != "training_args.bin")
}

/// The other files of a checkpoint's directory that hold weights, with their sizes: each is a copy
/// of the model, or of another, that is not quantized.
///
/// # Errors
/// [`Error::Io`].
pub fn other_weights(checkpoint: &Checkpoint) -> Result<Vec<(PathBuf, u64)>> {
    if !checkpoint.directory {
        return Ok(Vec::new());
    }
    let (files, _) = list(checkpoint)?;
    let weights = files.into_iter().filter(|file| holds_weights(file));
    let size = |file: PathBuf| {
        let path = checkpoint.path.join(&file);
        let bytes = fs::metadata(&path).map_err(Error::io("open", &path))?.len();
        Ok((file, bytes))
    };
    weights.map(size).collect()
}

/// The other files to copy, and the skipped ones.
pub(crate) fn to_copy(checkpoint: &Checkpoint) -> Result<(Vec<PathBuf>, Vec<Skipped>)> {
    let (mut files, mut skipped) = list(checkpoint)?;
    if checkpoint.options.skip_other_weights {
        let why = "it holds other weights, and --skip-others was given";
        let left = files.iter().filter(|file| holds_weights(file));
        skipped.extend(left.map(|path| Skipped { path: path.clone(), why }));
        files.retain(|file| !holds_weights(file));
    }
    skipped.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((files, skipped))
}

/// The files that are no weights and that links lead to, outside of the checkpoint: each link, and
/// the file that will be copied. Hugging Face's cache is made of such links.
///
/// # Errors
/// [`Error::Io`].
pub fn outside_links(checkpoint: &Checkpoint) -> Result<Vec<(PathBuf, PathBuf)>> {
    if !checkpoint.directory {
        return Ok(Vec::new());
    }
    let root = checkpoint.path.canonicalize().map_err(Error::io("open", &checkpoint.path))?;
    let (files, _) = to_copy(checkpoint)?;
    let links = files.into_iter().map(|file| checkpoint.path.join(file)).filter(|file| file.is_symlink());
    let targets = links.filter_map(|link| link.canonicalize().ok().map(|target| (link, target)));
    Ok(targets.filter(|(_, target)| !target.starts_with(&root)).collect())
}

/// Copies a file byte for byte, and returns its bytes.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<u64> {
    let mut reader = fs::File::open(from).map_err(Error::io("open", from))?;
    let copied = fs::File::create_new(to).and_then(|mut writer| {
        let bytes = std::io::copy(&mut reader, &mut writer)?;
        writer.set_permissions(reader.metadata()?.permissions())?;
        writer.sync_all()?;
        Ok(bytes)
    });
    copied.map_err(Error::io("write", to))
}

fn relative(path: &Path, root: &Path) -> PathBuf {
    path.strip_prefix(root).unwrap_or(path).into()
}
