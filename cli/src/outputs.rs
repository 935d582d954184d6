//! What is looked at before a command writes: whether anything would be lost, what killed runs have left, and
//! links that lead out of a checkpoint.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use microscale_checkpoint::{
    Checkpoint, Error, LeftBehind, OpenOptions, OutputError, Places, other_weights, outside_links,
};

use crate::failures::Usage;
use crate::streams::warn;
use crate::text::table::{bytes, count};

/// Links that are listed one by one.
const LISTED: usize = 3;

/// Options of commands that copy the other files of a checkpoint.
#[derive(clap::Args)]
pub(crate) struct OtherFilesArgs {
    /// Copy files that links lead to, outside of INPUT, without a word about it
    #[arg(long)]
    follow_links: bool,
    /// Leave out the directory's other files with weights: .bin, .pth, .onnx, other .safetensors
    #[arg(long)]
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

    /// Says which files from outside of a checkpoint, and which with other weights, will be copied with it.
    pub(crate) fn tell(&self, checkpoint: &Checkpoint) -> Result<()> {
        if !self.skip_others {
            tell_of_weights(&other_weights(checkpoint)?);
        }
        let links = if self.follow_links { Vec::new() } else { outside_links(checkpoint)? };
        for (path, target) in links.iter().take(LISTED) {
            warn(format_args!(
                "warning: {} is a link out of the checkpoint, and {} is copied; --follow-links does so without a word",
                path.display(),
                target.display()
            ));
        }
        if links.len() > LISTED {
            warn(format_args!("warning: and {} more such links", count((links.len() - LISTED) as u64)));
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
    let checkpoint = Checkpoint::open_with(path, options)?;
    warn_of(&checkpoint);
    Ok(checkpoint)
}

/// Prints the warnings about a checkpoint's index.
pub(crate) fn warn_of(checkpoint: &Checkpoint) {
    for warning in checkpoint.warnings() {
        warn(format_args!("warning: {warning}"));
    }
}

/// Says which files with other weights will be copied whole.
fn tell_of_weights(weights: &[(PathBuf, u64)]) {
    if weights.is_empty() {
        return;
    }
    let all = bytes(weights.iter().map(|(_, bytes)| bytes).sum());
    let listed: Vec<_> = weights.iter().take(LISTED).map(|(path, _)| path.display().to_string()).collect();
    let more = weights.len().saturating_sub(LISTED);
    let more = if more == 0 { String::new() } else { format!(" and {} more", count(more as u64)) };
    warn(format_args!(
        "warning: other files with weights are copied as they are ({all}): {}{more}; --skip-others leaves them out",
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
            None => warn(format_args!("removed {path} ({left}), which a run that was killed had left")),
            Some(host) => warn(format_args!(
                "warning: {path} ({left}) stays: a run on {host} made it, which goes on or was killed; if none goes on \
                 there, remove it with: rm -r {path}"
            )),
        }
    }
}

/// Adds to the failure of a step that follows the output that the output itself is complete.
pub(crate) fn after(complete: impl Display, step: Result<()>) -> Result<()> {
    step.with_context(|| format!("{complete} is complete; only this failed"))
}
