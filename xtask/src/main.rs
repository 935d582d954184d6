//! The project's own commands. `cargo xtask help` lists them, and each has a module of its name.

mod build_ptx;
mod check_docs;
mod check_packages;
mod check_ptx;
mod dist;
mod layout;
mod process;
mod toolchain;

use anyhow::{Result, bail};
use std::process::ExitCode;

/// A command: its name, its arguments and description for the help text, and its function.
struct Command {
    name: &'static str,
    arguments: &'static str,
    about: &'static str,
    run: fn(&[String]) -> Result<()>,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "build-ptx",
        arguments: "[--check] [--target NAME]...",
        about: "Compile kernels-gpu into host/ptx/; with --check, only compare with the committed files",
        run: build_ptx::run,
    },
    Command {
        name: "check-ptx",
        arguments: "[--kernel TEXT] [--every-gpu] [--install-ptxas] [--require-ptxas] [--write-table]",
        about: "Check host/ptx/: forbidden and required instructions, the machine code, and docs/lab/sass.md",
        run: check_ptx::run,
    },
    Command {
        name: "check-docs",
        arguments: "",
        about: "Check the links of all Markdown files, and that docs/SUMMARY.md lists every page",
        run: check_docs::run,
    },
    Command {
        name: "check-packages",
        arguments: "",
        about: "Pack the published crates, and test the packages without the repository",
        run: check_packages::run,
    },
    Command {
        name: "dist",
        arguments: "[DIR]",
        about: "Pack the program, the tests and their data into a folder (default: dist) that runs without Rust",
        run: dist::run,
    },
    Command { name: "help", arguments: "", about: "Print this list", run: help },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else { return help(&[]) };
    let name = if matches!(name.as_str(), "-h" | "--help") { "help" } else { name };
    match COMMANDS.iter().find(|command| command.name == name) {
        Some(command) if rest.iter().any(|argument| matches!(argument.as_str(), "-h" | "--help")) => {
            println!("Usage: cargo xtask {} {}\n\n{}", command.name, command.arguments, command.about);
            Ok(())
        }
        Some(command) => (command.run)(rest),
        None => bail!("there is no command `{name}`; `cargo xtask help` lists them"),
    }
}

fn help(_: &[String]) -> Result<()> {
    println!("Usage: cargo xtask COMMAND\n");
    for command in COMMANDS {
        println!("  {} {}\n      {}", command.name, command.arguments, command.about);
    }
    Ok(())
}
