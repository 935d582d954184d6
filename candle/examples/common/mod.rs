//! The frame of both examples.

use std::env;
use std::fmt::Display;
use std::process::ExitCode;

/// Prints the help if the arguments ask for it, or runs the example. Errors are printed as messages:
/// a `main` that returns them would print their `Debug` form.
pub(crate) fn main<E: Display>(help: &str, run: impl FnOnce() -> Result<(), E>) -> ExitCode {
    if env::args().any(|word| word == "--help" || word == "-h") {
        println!("{help}");
        return ExitCode::SUCCESS;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
