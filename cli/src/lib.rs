//! The command-line program as a function, [`main`]: for `main.rs`, and for those who carry the program along, as the Python
//! package does. One file a subcommand, each a thin layer over the libraries.
//!
//! | room | what it knows |
//! |---|---|
//! | `commands` | the subcommands |
//! | `options` | options that several have: recipes, devices, words |
//! | `bench` | measuring operations |
//! | `report`, `plot`, `markup` | the HTML report, SVG plots, and the markup of both |
//! | `text` | what people read: tables and figures, names, scales |
//! | `outputs`, `pending` | what may be written; complete files |
//! | `progress`, `signals`, `threads` | the bar; being asked to end; the threads that compute |
//! | `streams`, `failures` | stdout and stderr; exit codes |
//!
//! Exit codes: 0 for success, 1 for failure, 2 for a command line that is wrong. A signal that asks the program
//! to end is what it ends by. Results go to stdout,
//! progress, warnings and errors to stderr.

mod bench;
mod commands;
mod failures;
mod markup;
mod options;
mod outputs;
mod pending;
mod plot;
mod progress;
mod report;
mod signals;
mod streams;
mod text;
mod threads;

use std::ffi::OsString;

use clap::{CommandFactory, Parser, Subcommand};
use microscale::cpu::Isa;

use crate::failures::Usage;
use crate::streams::{is_broken_pipe, warn};

/// Quantize tensors and checkpoints to microscaling formats of 4 and 8 bits, on CPUs and NVIDIA GPUs.
#[derive(Parser)]
#[command(name = "microscale", version, about, max_term_width = 100)]
struct Cli {
    /// Threads that compute and read [default: RAYON_NUM_THREADS, or one for each core]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    threads: Option<u64>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Quantize a checkpoint to MXFP4, NVFP4 or MXFP8.
    Quantize(commands::quantize::Args),
    /// List the recipes that come with the program, or print one.
    Recipes(commands::recipes::Args),
    /// Put together what `quantize --part` has made.
    Merge(commands::merge::Args),
    /// Turn a quantized checkpoint back into floats.
    Dequantize(commands::dequantize::Args),
    /// Write a quantized checkpoint in another checkpoint format, without quantizing again.
    Convert(commands::convert::Args),
    /// Look for what is wrong with a quantized checkpoint; the exit code is 1 if something is.
    Doctor(commands::doctor::Args),
    /// Compare two checkpoints tensor by tensor; quantized ones are dequantized first.
    Compare(commands::compare::Args),
    /// List a checkpoint's tensors, and how its scales and codes are distributed.
    Inspect(commands::inspect::Args),
    /// Show what work can be done on: CPU features, GPUs.
    Devices(commands::devices::Args),
    /// Measure speed, as a share of a plain copy's.
    Bench(commands::bench::Args),
    /// Print what makes a shell complete the program's commands and options.
    Completions(commands::completions::Args),
    /// Print the manual page, or write one for each command into a folder.
    Man(commands::man::Args),
}

/// Exit code of a command line that is wrong.
const WRONG_USAGE: u8 = 2;

/// Runs the program with its arguments, the first of which is its name, and returns its exit code.
///
/// To be called once, before the process has other threads, and to be followed by the process's end: what it does about signals
/// stays. If a signal asks it to end, it does not return.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    signals::watch();
    let code = run(arguments);
    signals::end();
    code
}

fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let Cli { threads, command } = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(told) => {
            let _ = told.print();
            return if told.use_stderr() { WRONG_USAGE } else { 0 };
        }
    };
    if let Err(why) = Isa::asked() {
        warn(format_args!("error: {why}"));
        return WRONG_USAGE;
    }
    if let Err(error) = threads::start(threads) {
        warn(format_args!("error: {error:#}"));
        return 1;
    }
    let result = match command {
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Recipes(args) => commands::recipes::run(args),
        Command::Merge(args) => commands::merge::run(args),
        Command::Dequantize(args) => commands::dequantize::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::Compare(args) => commands::compare::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Devices(args) => commands::devices::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Completions(args) => commands::completions::run(args, Cli::command()),
        Command::Man(args) => commands::man::run(args, Cli::command()),
    };
    match result {
        Ok(()) => 0,
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            warn(format_args!("error: {error:#}"));
            if error.is::<Usage>() { WRONG_USAGE } else { 1 }
        }
    }
}
