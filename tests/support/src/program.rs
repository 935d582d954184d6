//! Runs the program `microscale` in tests, and checks its exit code and output.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Returns the program: `MICROSCALE_BIN`, or cargo's build of its package.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| std::env::var_os("MICROSCALE_BIN").map_or_else(built, PathBuf::from))
}

/// Finds the program in `TARGET/PROFILE`. Tests run from `TARGET/PROFILE/deps`.
///
/// Cargo provides the path only to the program's own crate.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let folder = test.parent().and_then(Path::parent).expect("a test lies in TARGET/PROFILE/deps");
    folder.join("microscale").with_extension(std::env::consts::EXE_EXTENSION)
}

/// An argument, either a word or a path.
pub type Arg<'a> = &'a dyn AsRef<OsStr>;

/// Returns a command with arguments that has not been started.
pub fn command(args: &[Arg<'_>]) -> Command {
    let mut command = Command::new(program());
    command.args(args.iter().map(|arg| arg.as_ref()));
    command
}

/// Runs the program and waits for its exit.
pub fn run(args: &[Arg<'_>]) -> Run {
    Run::new(command(args))
}

/// The result of running the program: its exit code and output.
#[derive(Debug)]
pub struct Run {
    /// The command line.
    pub command: String,
    /// The exit code, or `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Run {
    /// Runs a command and waits for its exit.
    ///
    /// # Panics
    /// Panics if it cannot be started.
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

    /// Asserts that the run succeeded, and returns its standard output.
    ///
    /// # Panics
    /// Panics if it failed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.stdout
    }

    /// Standard error with each hint on the line of its error, as the libraries write messages:
    /// `error: problem; hint`.
    pub fn messages(&self) -> String {
        self.stderr.replace("\nhint: ", "; ")
    }

    /// Asserts exit code 1, and a last message on standard error that contains all `parts`.
    ///
    /// # Panics
    /// Panics otherwise.
    #[track_caller]
    pub fn fails_with(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(1), "{self:#?}");
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
        let messages = self.messages();
        let line = messages.lines().last().unwrap_or_default();
        assert!(line.starts_with("error: "), "{self:#?}");
        for part in parts {
            assert!(line.contains(part), "the error does not say {part:?}: {self:#?}");
        }
    }
}
