//! The program `microscale`, which is the library's function.

use std::process::ExitCode;

fn main() -> ExitCode {
    microscale_cli::main(std::env::args_os()).into()
}
