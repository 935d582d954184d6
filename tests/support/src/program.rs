//! Running the program `microscale` in tests, and checking its exit code and output.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The program: what `MICROSCALE_BIN` names, or else what cargo built for the tests of its package.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| std::env::var_os("MICROSCALE_BIN").map_or_else(built, PathBuf::from))
}

/// Tests run from `TARGET/PROFILE/deps`; the program lies in `TARGET/PROFILE`. Cargo tells the test where,
/// but only its own crate.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let folder = test.parent().and_then(Path::parent).expect("a test lies in TARGET/PROFILE/deps");
    folder.join("microscale").with_extension(std::env::consts::EXE_EXTENSION)
}

/// An argument: words and paths alike.
pub type Arg<'a> = &'a dyn AsRef<OsStr>;

/// The program with arguments, not started yet.
pub fn command(args: &[Arg<'_>]) -> Command {
    let mut command = Command::new(program());
    command.args(args.iter().map(|arg| arg.as_ref()));
    command
}

/// Runs the program to its end.
pub fn run(args: &[Arg<'_>]) -> Run {
    Run::new(command(args))
}

/// The result of a run of the program: its exit code and its output.
#[derive(Debug)]
pub struct Run {
    /// The command line.
    pub command: String,
    /// The exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// The text on stdout.
    pub stdout: String,
    /// The text on stderr.
    pub stderr: String,
}

impl Run {
    /// Runs a command to its end.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn new(mut command: Command) -> Self {
        let Output { status, stdout, stderr } =
            command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self {
            command: format!("{command:?}"),
            code: status.code(),
            stdout: text(stdout),
            stderr: text(stderr),
        }
    }

    /// Makes sure that the run succeeded, and returns its stdout.
    ///
    /// # Panics
    /// If it did not.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.stdout
    }

    /// Makes sure that the run failed with exit code 1 and one line on stderr that has all these parts.
    ///
    /// # Panics
    /// If it did not.
    #[track_caller]
    pub fn fails_with(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(1), "{self:#?}");
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
        let line = self.stderr.lines().last().unwrap_or_default();
        assert!(line.starts_with("error: "), "{self:#?}");
        for part in parts {
            assert!(line.contains(part), "the error does not say {part:?}: {self:#?}");
        }
    }
}
