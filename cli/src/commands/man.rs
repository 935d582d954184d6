//! `microscale man`: prints the manual page, or writes the pages of all commands.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Command;
use clap_mangen::{Man, generate_to};

use crate::streams::print;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to write microscale.1 and a page for each command; created if it is missing
    folder: Option<PathBuf>,
}

pub(crate) fn run(args: Args, program: Command) -> Result<()> {
    // The command `help` prints the same text as the pages, so it has no page of its own.
    let program = program.disable_help_subcommand(true);
    let Some(folder) = args.folder else {
        let mut page = Vec::new();
        Man::new(program).render(&mut page)?;
        return print(String::from_utf8(page)?.trim_end());
    };
    fs::create_dir_all(&folder)
        .and_then(|()| generate_to(program, &folder))
        .with_context(|| format!("cannot write manual pages into {}", folder.display()))
}
