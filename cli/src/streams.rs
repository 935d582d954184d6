//! Writing to stdout, where a failure is an error, and to stderr, where failures are ignored.

use std::fmt::{self, Display, Write as _};
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anstyle::{AnsiColor, Style};

use crate::text::names::harmless;

/// True if only warnings and errors are shown, and results that a command exists for.
static QUIET: AtomicBool = AtomicBool::new(false);
/// True if every tensor, finding and file is listed.
static VERBOSE: AtomicBool = AtomicBool::new(false);

/// Sets the level of detail. Called once, before any output.
pub(crate) fn set_level(quiet: bool, verbose: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
    VERBOSE.store(verbose, Ordering::Relaxed);
}

pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

pub(crate) fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed)
}

/// Writes a result to stdout. Unlike `println!` it does not panic if stdout is closed, and escapes
/// characters in names of tensors and files that a terminal would interpret.
pub(crate) fn print(text: impl Display) -> anyhow::Result<()> {
    let text = text.to_string();
    let text = harmless(&text, |c| matches!(c, '\n' | '\t'));
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Stdout)?;
    Ok(())
}

/// [`print`], unless the user asked for quiet.
pub(crate) fn print_summary(text: impl Display) -> anyhow::Result<()> {
    if is_quiet() { Ok(()) } else { print(text) }
}

/// Writes JSON to stdout, piece by piece. Characters that a terminal would interpret are escaped as
/// JSON has them.
pub(crate) fn print_json(json: impl Display) -> anyhow::Result<()> {
    let mut stdout = Escaped { to: io::BufWriter::new(io::stdout().lock()), error: None };
    if writeln!(stdout, "{json:#}").is_err() {
        return Err(Stdout(stdout.error.unwrap_or_else(|| ErrorKind::Other.into())).into());
    }
    stdout.to.flush().map_err(Stdout)?;
    Ok(())
}

/// Text of JSON, on its way to a terminal.
struct Escaped<W> {
    to: W,
    /// The error that stopped writing.
    error: Option<io::Error>,
}

impl<W: Write> fmt::Write for Escaped<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let escape = |c: char| match harmless(c.encode_utf8(&mut [0; 4]), |c| c == '\n') {
            escaped if escaped.len() > 4 => format!("\\u{:04x}", u32::from(c)),
            _ => c.into(),
        };
        let is_plain = text.bytes().all(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte));
        let written = if is_plain {
            self.to.write_all(text.as_bytes())
        } else {
            self.to.write_all(text.chars().map(escape).collect::<String>().as_bytes())
        };
        written.map_err(|error| {
            self.error = Some(error);
            fmt::Error
        })
    }
}

/// Prints a warning to stderr.
pub(crate) fn warn(text: impl Display) {
    labelled("warning", AnsiColor::Yellow, text);
}

/// Prints an error to stderr, with its hint on a line of its own.
///
/// Messages are `problem; hint`: the libraries write them so.
pub(crate) fn error(text: impl Display) {
    let text = text.to_string();
    let (problem, hint) = text.split_once("; ").map_or((&text[..], None), |(a, b)| (a, Some(b)));
    labelled("error", AnsiColor::Red, problem);
    if let Some(hint) = hint {
        labelled("hint", AnsiColor::Cyan, hint);
    }
}

/// Prints a fact to stderr, unless the user asked for quiet.
pub(crate) fn note(text: impl Display) {
    if !is_quiet() {
        let _ = writeln!(io::stderr(), "{}", escaped(text));
    }
}

/// Prints a line that starts with a label, in color if stderr is a terminal that has colors, or if
/// `--color` asks for it.
fn labelled(label: &str, color: AnsiColor, text: impl Display) {
    let style = Style::new().bold().fg_color(Some(color.into()));
    let _ = writeln!(anstream::stderr(), "{style}{label}:{style:#} {}", escaped(text));
}

fn escaped(text: impl Display) -> String {
    harmless(&text.to_string(), |c| matches!(c, '\n' | '\t')).into_owned()
}

/// Writing to stdout failed. Distinguished from other errors, because a reader that closes a pipe
/// early is not a failure.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout")]
struct Stdout(#[source] io::Error);

/// Returns whether an error means that the reader of stdout is gone.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stdout>().is_some_and(|Stdout(error)| error.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_json_and_is_harmless_to_a_terminal() {
        let name = "a\u{202e}b\u{9b}2J層";
        let mut to = Escaped { to: Vec::new(), error: None };
        writeln!(to, "{:#}", serde_json::json!({ "name": name })).unwrap();
        let text = String::from_utf8(to.to).unwrap();
        assert!(!text.contains(['\u{202e}', '\u{9b}']) && text.contains('層'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap()["name"], name);
    }
}
