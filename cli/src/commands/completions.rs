//! `microscale completions`: prints the completion script of a shell.

use anyhow::Result;
use clap::Command;
use clap_complete::{Shell, generate};

use crate::streams::print;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Shell
    shell: Shell,
}

pub(crate) fn run(args: Args, mut program: Command) -> Result<()> {
    let name = program.get_name().to_owned();
    // Collected first: `generate` panics if stdout is closed.
    let mut script = Vec::new();
    generate(args.shell, &mut program, name, &mut script);
    print(String::from_utf8(script)?.trim_end())
}
