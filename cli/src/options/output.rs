//! Where commands write: the output, and JSON.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::failures::Usage;
use crate::pending::Pending;
use crate::streams::{print_json, print_summary};

/// The output of a command, given by position or by an option.
#[derive(clap::Args)]
pub(crate) struct OutputArgs {
    /// File or directory to write, like INPUT; new, or an empty directory
    #[arg(value_name = "OUTPUT", conflicts_with = "output")]
    position: Option<PathBuf>,
    /// The same as OUTPUT
    #[arg(short, long, alias = "out", value_name = "OUTPUT", help_heading = "Output")]
    output: Option<PathBuf>,
}

impl OutputArgs {
    /// The output, if one is given.
    pub(crate) fn given(&self) -> Option<&Path> {
        self.position.as_deref().or(self.output.as_deref())
    }

    /// The output.
    ///
    /// # Errors
    /// [`Usage`] if none is given.
    pub(crate) fn required(&self, command: &str) -> Result<&Path> {
        let missing = || Usage::new(format!("no output is given; microscale {command} INPUT OUTPUT"));
        Ok(self.given().ok_or_else(missing)?)
    }
}

/// Results as JSON.
#[derive(clap::Args)]
pub(crate) struct JsonArgs {
    /// Write the results as JSON; - is stdout
    ///
    /// JSON on stdout replaces the table. docs/json.md lists the keys.
    #[arg(long, value_name = "FILE|-", help_heading = "Output")]
    json: Option<PathBuf>,
}

impl JsonArgs {
    /// The file, if it is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.json.as_deref().filter(|path| *path != Path::new("-"))
    }

    /// Makes sure that the file can be written.
    pub(crate) fn start(&self) -> Result<JsonOutput> {
        Ok(match (&self.json, self.file()) {
            (None, _) => JsonOutput::None,
            (Some(_), None) => JsonOutput::Stdout,
            (Some(_), Some(file)) => JsonOutput::File(Pending::create(file)?),
        })
    }
}

/// Where JSON goes.
pub(crate) enum JsonOutput {
    None,
    Stdout,
    File(Pending),
}

impl JsonOutput {
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Writes JSON, and prints the text of a command that exists for it, unless JSON is printed.
    pub(crate) fn finish(self, json: impl Display, text: impl FnOnce() -> Result<()>) -> Result<()> {
        match self {
            Self::None => text(),
            Self::Stdout => print_json(json),
            Self::File(pending) => {
                pending.finish(format_args!("{json:#}"))?;
                text()
            }
        }
    }

    /// [`Self::finish`] with the summary of a command that wrote something else.
    pub(crate) fn finish_summary(self, json: impl Display, text: impl Display) -> Result<()> {
        self.finish(json, || print_summary(text))
    }
}
