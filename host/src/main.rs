//! The command-line program. Everything it does is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    microscale::cli::main()
}
