//! The command-line program as a function, [`main`], for `main.rs` and for the Python package, which
//! includes the program. One file per subcommand, each a thin layer over the libraries.
//!
//! | module | contents |
//! |---|---|
//! | `commands` | the subcommands |
//! | `options` | options of several commands: recipes, devices, outputs, words |
//! | `bench` | measuring operations |
//! | `report`, `plot`, `markup` | the HTML report, SVG plots, and the markup of both |
//! | `text` | tables and figures, names, scales |
//! | `outputs`, `pending` | checks before anything is written; files that appear when complete |
//! | `progress`, `signals`, `threads` | the progress bar; signals; the threads that compute |
//! | `streams`, `failures` | stdout and stderr; exit codes |
//!
//! Exit codes: 0 for success, 1 for failure or defects, 2 for a wrong command line. If a signal ends
//! the program, it ends by that signal. Results go to stdout, and progress, warnings and errors to
//! stderr.

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

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use microscale::cpu::Isa;

use crate::failures::Usage;
use crate::options::general::{GeneralArgs, color_of, set_color};
use crate::streams::{error, is_broken_pipe};

/// Quantize checkpoints to MXFP4, NVFP4 and MXFP8, and check, compare and convert them.
#[derive(Parser)]
#[command(name = "microscale", version, disable_version_flag = true, max_term_width = 100)]
#[command(after_long_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    general: GeneralArgs,
    /// Print the version
    #[arg(short = 'V', long, action = ArgAction::Version, help_heading = "General")]
    version: Option<bool>,
}

/// The parser of the program. `--help` is one of the general options, in every command.
fn program() -> clap::Command {
    Cli::command().disable_help_flag(true).mut_subcommands(|command| command.disable_help_flag(true))
}

const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  failure, or defects that `doctor` found
  2  a wrong command line
A signal that ends the program is its exit status.";

#[derive(Subcommand)]
enum Command {
    /// Quantize a checkpoint to MXFP4, NVFP4 or MXFP8
    Quantize(commands::quantize::Args),
    /// Choose a format for each tensor within a size, as a recipe
    Plan(commands::plan::Args),
    /// List the built-in recipes, or print one
    Recipes(commands::recipes::Args),
    /// Merge the parts that `quantize --part` made
    Merge(commands::merge::Args),
    /// Turn a quantized checkpoint back into floats
    Dequantize(commands::dequantize::Args),
    /// Rewrite a quantized checkpoint in another format of files
    Convert(commands::convert::Args),
    /// Check a quantized checkpoint for defects
    Doctor(commands::doctor::Args),
    /// Compare checkpoints, or a checkpoint with a format
    Compare(commands::compare::Args),
    /// Measure what quantization costs a model: perplexity, divergence, errors of layers
    #[cfg(feature = "models")]
    Eval(commands::eval::Args),
    /// Record the inputs of a model's layers, for searches and for quantized activations
    #[cfg(feature = "models")]
    Calibrate(commands::calibrate::Args),
    /// List tensors, and the distribution of scales and codes
    Inspect(commands::inspect::Args),
    /// List the CPU's instruction sets and the GPUs
    Devices(commands::devices::Args),
    /// Measure operations, compared with a copy of the same bytes
    Bench(commands::bench::Args),
    /// Print completions for a shell
    Completions(commands::completions::Args),
    /// Print the manual page, or write one per command
    Man(commands::man::Args),
}

/// Exit code of a wrong command line.
const WRONG_USAGE: u8 = 2;

/// Runs the program with its arguments, starting with its name, and returns its exit code.
///
/// Call it once, before the process has other threads, and end the process afterwards: its signal
/// handlers stay. If a signal asks it to end, it does not return.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    signals::watch();
    let code = run(arguments);
    signals::end();
    code
}

fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<_> = arguments.into_iter().collect();
    let color = color_of(&arguments);
    set_color(color);
    let parsed = program().color(color).try_get_matches_from(arguments);
    let Cli { general, command, .. } = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(message) => {
            let _ = message.print();
            return if message.use_stderr() { WRONG_USAGE } else { 0 };
        }
    };
    general.apply();
    if let Err(why) = Isa::asked() {
        error(why);
        return WRONG_USAGE;
    }
    if let Err(why) = threads::start(general.threads) {
        error(format_args!("{why:#}"));
        return 1;
    }
    let result = match command {
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Recipes(args) => commands::recipes::run(args),
        Command::Merge(args) => commands::merge::run(args),
        Command::Dequantize(args) => commands::dequantize::run(args),
        Command::Convert(args) => commands::convert::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::Compare(args) => commands::compare::run(args),
        #[cfg(feature = "models")]
        Command::Eval(args) => commands::eval::run(args),
        #[cfg(feature = "models")]
        Command::Calibrate(args) => commands::calibrate::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Devices(args) => commands::devices::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Completions(args) => commands::completions::run(args, program()),
        Command::Man(args) => commands::man::run(args, program()),
    };
    match result {
        Ok(()) => 0,
        Err(why) if is_broken_pipe(&why) => 0,
        Err(why) => {
            error(format_args!("{why:#}"));
            if why.is::<Usage>() { WRONG_USAGE } else { 1 }
        }
    }
}
