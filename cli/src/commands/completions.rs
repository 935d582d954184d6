//! `microscale completions`: prints the script with which a shell completes the command line.

use anyhow::Result;
use clap::Command;
use clap_complete::{Shell, generate};

use crate::streams::print;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: Args, mut program: Command) -> Result<()> {
    let name = program.get_name().to_owned();
    // Collected first: `generate` panics when nobody reads stdout any more.
    let mut script = Vec::new();
    generate(args.shell, &mut program, name, &mut script);
    print(String::from_utf8(script)?.trim_end())
}
