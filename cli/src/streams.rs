//! Output to stdout, where a failure is an error, and to stderr, where it is ignored.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use crate::text::names::harmless;

/// Writes a result to stdout. Unlike `println!` it does not panic on a closed pipe, and it escapes
/// control characters in names of tensors and files.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    let text = text.to_string();
    let text = harmless(&text, |c| matches!(c, '\n' | '\t'));
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Stdout)?;
    Ok(())
}

/// Writes a line to stderr, and ignores a closed pipe.
pub(crate) fn warn(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", harmless(&text.to_string(), |c| matches!(c, '\n' | '\t')));
}

/// Stdout cannot be written. A type of its own, because a closed pipe is not a failure here.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
struct Stdout(#[source] io::Error);

/// Returns whether an error means that the reader of stdout closed the pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(error)| error.kind() == ErrorKind::BrokenPipe)
}
