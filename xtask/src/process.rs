//! Runs other programs. Errors name the program with its arguments.

use anyhow::{Context, Result, bail};
use std::process::{Command, Output, Stdio};

/// Runs a command that inherits the terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", show(command)))?;
    if !status.success() {
        bail!("{} failed ({status})", show(command));
    }
    Ok(())
}

/// Runs a command and returns its standard output. Its standard error goes to the terminal.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {}", show(command)))?;
    if !output.status.success() {
        bail!("{} failed ({})", show(command), output.status);
    }
    text(output.stdout)
}

/// Runs a command and returns its output and status. A failing status is not an error.
pub(crate) fn capture(command: &mut Command) -> Result<Output> {
    command.output().with_context(|| format!("cannot start {}", show(command)))
}

/// Converts a program's output to text.
pub(crate) fn text(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).context("a program wrote something that is not UTF-8")
}

/// Formats the command as a user would type it, without its environment.
fn show(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|argument| argument.to_string_lossy()));
    format!("`{}`", words.join(" "))
}
