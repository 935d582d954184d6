//! Writing to stdout, where a failure is an error, and to stderr, where it is ignored.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use crate::text::names::harmless;

/// Writes a result to stdout. Unlike `println!` it does not panic when nobody reads any more, and names of
/// tensors and files do nothing to a terminal.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    let text = text.to_string();
    let text = harmless(&text, |c| matches!(c, '\n' | '\t'));
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Stdout)?;
    Ok(())
}

/// Writes a line to stderr, if anybody is there to read it.
pub(crate) fn warn(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", harmless(&text.to_string(), |c| matches!(c, '\n' | '\t')));
}

/// Stdout could not be written: kept apart from other failures to write, because a reader who has seen enough
/// is none.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
struct Stdout(#[source] io::Error);

/// Returns whether an error means that nobody reads stdout any more.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(error)| error.kind() == ErrorKind::BrokenPipe)
}
