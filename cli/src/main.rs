//! The command-line program: one file a subcommand, each a thin layer over the libraries.
//!
//! Exit codes: 0 for success, 1 for failure, 2 for a command line that is wrong. Results go to stdout, progress, warnings
//! and errors to stderr.

mod bench;
mod compare;
mod convert;
mod dequantize;
mod devices;
mod doctor;
mod inspect;
mod markup;
mod measure;
mod merge;
mod names;
mod pending;
mod plot;
mod progress;
mod quantize;
mod recipe;
mod recipes;
mod report;
mod table;
mod words;

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use microscale::cpu::Isa;
use microscale::{Device, DeviceChoice, Error};

/// Quantize tensors and checkpoints to microscaling formats of 4 and 8 bits, on CPUs and NVIDIA GPUs.
#[derive(Parser)]
#[command(name = "microscale", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Quantize a checkpoint to MXFP4, NVFP4 or MXFP8.
    Quantize(quantize::Args),
    /// List the recipes that come with the program, or print one.
    Recipes(recipes::Args),
    /// Put together what `quantize --part` has made.
    Merge(merge::Args),
    /// Turn a quantized checkpoint back into floats.
    Dequantize(dequantize::Args),
    /// Write a quantized checkpoint by another convention of files, without quantizing again.
    Convert(convert::Args),
    /// Look for what is wrong with a quantized checkpoint; the exit code is 1 if something is.
    Doctor(doctor::Args),
    /// Compare two checkpoints tensor by tensor; quantized ones are dequantized first.
    Compare(compare::Args),
    /// List a checkpoint's tensors, and how its scales and codes are distributed.
    Inspect(inspect::Args),
    /// Show what work can be done on: CPU features, GPUs.
    Devices(devices::Args),
    /// Measure speed, as a share of a plain copy's.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if let Err(why) = Isa::asked() {
        warn(format_args!("error: {why}"));
        return ExitCode::from(2);
    }
    let result = match command {
        Command::Quantize(args) => quantize::run(args),
        Command::Recipes(args) => recipes::run(args),
        Command::Merge(args) => merge::run(args),
        Command::Dequantize(args) => dequantize::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Bench(args) => bench::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            warn(format_args!("error: {error:#}"));
            if error.is::<Usage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// Makes a device ready. That there is no GPU is no news, but one that fails is, even where the CPU can do the work.
fn device(choice: DeviceChoice) -> anyhow::Result<Device> {
    if choice != DeviceChoice::Auto {
        return Ok(Device::choose(choice)?);
    }
    let (device, refused) = Device::auto();
    if let Some(error @ Error::Gpu { .. }) = refused {
        warn(format_args!("warning: the CPU is used, because {error}"));
    }
    Ok(device)
}

/// Writes a result to stdout. Unlike `println!` it does not panic when nobody reads any more.
fn print(text: impl Display) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Stdout)?;
    Ok(())
}

/// Writes a line to stderr, if anybody is there to read it.
fn warn(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A command line whose options do not go together.
#[derive(Debug, thiserror::Error)]
#[error("{0}; see --help")]
struct Usage(String);

impl Usage {
    fn new(why: impl Display) -> Self {
        Self(why.to_string())
    }
}

/// Something is wrong with a checkpoint that was looked at.
#[derive(Debug, thiserror::Error)]
#[error("{} found", if *.0 == 1 { "1 defect was".into() } else { format!("{} defects were", .0) })]
struct Found(usize);

/// Stdout could not be written: kept apart from other failures to write, because a reader who has seen enough is none.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
struct Stdout(#[source] io::Error);

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(error)| error.kind() == ErrorKind::BrokenPipe)
}
