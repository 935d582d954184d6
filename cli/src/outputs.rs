//! Checks before a command writes: nothing is overwritten, leftovers of killed runs are removed, and
//! links out of the checkpoint are reported.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use microscale_checkpoint::{
    Checkpoint, Error, LeftBehind, OpenOptions, OutputError, Places, other_weights, outside_links,
};

use crate::failures::Usage;
use crate::streams::{is_verbose, note, warn};
use crate::text::table::{bytes, count};

/// Links that are listed one by one.
const LISTED: usize = 3;

/// Options of commands that copy the other files of a checkpoint.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OtherFilesArgs {
    /// Copy files outside of INPUT that links point to, without a warning
    #[arg(long, hide_short_help = true)]
    follow_links: bool,
    /// Leave out other files with weights: .bin, .pth, .onnx, other .safetensors
    #[arg(long, hide_short_help = true)]
    skip_others: bool,
}

impl OtherFilesArgs {
    /// Options to open a checkpoint whose other files will be copied.
    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions { skip_other_weights: self.skip_others, ..OpenOptions::default() }
    }

    /// Opens a checkpoint whose other files will be copied.
    pub(crate) fn open(&self, path: &Path) -> Result<Checkpoint> {
        open_with(path, self.options())
    }

    /// Warns about files outside of a checkpoint, and files with other weights, that will be copied.
    pub(crate) fn tell(&self, checkpoint: &Checkpoint) -> Result<()> {
        if !self.skip_others {
            tell_of_weights(&other_weights(checkpoint)?);
        }
        let links = if self.follow_links { Vec::new() } else { outside_links(checkpoint)? };
        let listed = if is_verbose() { usize::MAX } else { LISTED };
        for (path, target) in links.iter().take(listed) {
            warn(format_args!(
                "{} is a link to a file outside of the checkpoint, {}, which is copied; pass --follow-links to \
                 copy such files without this warning",
                path.display(),
                target.display()
            ));
        }
        if links.len() > listed {
            warn(format_args!(
                "and {} more such links; -v lists them all",
                count((links.len() - LISTED) as u64)
            ));
        }
        Ok(())
    }
}

/// Opens a checkpoint, and warns where its index and its files disagree.
pub(crate) fn open(path: &Path) -> Result<Checkpoint> {
    open_with(path, OpenOptions::default())
}

/// [`open`] with options.
pub(crate) fn open_with(path: &Path, options: OpenOptions) -> Result<Checkpoint> {
    opened(path, Checkpoint::open_with(path, options).map_err(Into::into))
}

/// Warns about a checkpoint that was opened, or says what helps if it is a model of Hugging Face.
pub(crate) fn opened(path: &Path, checkpoint: Result<Checkpoint>) -> Result<Checkpoint> {
    let checkpoint = checkpoint.map_err(|error| match model_id(path).filter(|_| !path.exists()) {
        None => error,
        Some((id, name)) => anyhow!(
            "{error:#}; if it is a model on Hugging Face, download it first: hf download {id} --local-dir {name}"
        ),
    })?;
    warn_of(&checkpoint);
    Ok(checkpoint)
}

/// A path that has the form of a model's id on Hugging Face, `owner/name`, and the name.
fn model_id(path: &Path) -> Option<(&str, &str)> {
    let id = path.to_str()?;
    let (owner, name) = id.split_once('/')?;
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let is_file = [".safetensors", ".gguf", ".json"].iter().any(|end| name.ends_with(end));
    (is_word(owner) && is_word(name) && !is_file).then_some((id, name))
}

/// Prints the warnings about a checkpoint's index.
pub(crate) fn warn_of(checkpoint: &Checkpoint) {
    for warning in checkpoint.warnings() {
        warn(warning);
    }
}

/// Warns about files with other weights that will be copied.
fn tell_of_weights(weights: &[(PathBuf, u64)]) {
    if weights.is_empty() {
        return;
    }
    let all = bytes(weights.iter().map(|(_, bytes)| bytes).sum());
    let most = if is_verbose() { usize::MAX } else { LISTED };
    let listed: Vec<_> = weights.iter().take(most).map(|(path, _)| path.display().to_string()).collect();
    let more = weights.len().saturating_sub(most);
    let more = if more == 0 { String::new() } else { format!(" and {} more", count(more as u64)) };
    warn(format_args!(
        "other files with weights are copied unchanged ({all}): {}{more}; --skip-others leaves them out",
        listed.join(", ")
    ));
}

/// The files of a command. Each that is written is checked against all others.
#[derive(Default)]
pub(crate) struct Files<'a> {
    pub(crate) checkpoints: &'a [&'a Checkpoint],
    /// Other files that are read.
    pub(crate) read: &'a [Option<&'a Path>],
    /// Checkpoints that are written, and directories of parts.
    pub(crate) outputs: &'a [&'a Path],
    /// Other files that are written.
    pub(crate) written: &'a [Option<&'a Path>],
}

impl Files<'_> {
    /// Makes sure that nothing that is read, or written otherwise, would be overwritten.
    pub(crate) fn check(&self) -> Result<()> {
        let mut places = Places::default();
        self.checkpoints.iter().try_for_each(|checkpoint| places.read(checkpoint))?;
        self.read.iter().flatten().try_for_each(|file| places.read_file(file))?;
        self.outputs.iter().try_for_each(|out| places.write(out))?;
        let written = self.written.iter().flatten().try_for_each(|file| places.write_file(file));
        written.map_err(|error| match error {
            Error::Output(OutputError::Same { .. }) => Usage::new(error).into(),
            error => error.into(),
        })
    }
}

/// Reports directories of killed runs, which were removed, and of other hosts' runs, which stay.
pub(crate) fn tell_of_left(left: &[LeftBehind]) {
    for LeftBehind { path, bytes: left, other_host, .. } in left {
        let (path, left) = (path.display(), bytes(*left));
        match other_host {
            None => note(format_args!("removed {path} ({left}), which a run that was killed had left")),
            Some(host) => warn(format_args!(
                "{path} ({left}) stays: a run on {host} made it, which goes on or was killed; if none goes on \
                 there, remove it with: rm -r {path}"
            )),
        }
    }
}

/// Adds to the failure of a step that follows the output that the output itself is complete.
pub(crate) fn after(complete: impl Display, step: Result<()>) -> Result<()> {
    step.with_context(|| format!("{complete} is complete, only this failed"))
}
