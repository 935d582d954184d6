//! Running the program.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The program: what `MICROSCALE_BIN` names, or else built now, in the profile and the target directory of this test.
///
/// # Panics
/// If it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| std::env::var_os("MICROSCALE_BIN").map_or_else(build, PathBuf::from))
}

/// Tests run from `TARGET/PROFILE/deps`; the program belongs into `TARGET/PROFILE`.
fn build() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile_dir = test.parent().and_then(Path::parent).expect("a test lies in TARGET/PROFILE/deps");
    let profile = match profile_dir.file_name().and_then(OsStr::to_str) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--quiet",
        "--package",
        "microscale-cli",
        "--bin",
        "microscale",
        "--profile",
        profile,
    ]);
    cargo.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(profile_dir.parent().unwrap());
    let status = cargo.status().expect("cargo can be started");
    assert!(status.success(), "the program could not be built: {cargo:?}");
    profile_dir.join("microscale").with_extension(std::env::consts::EXE_EXTENSION)
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

/// What a run of the program left: its exit code and what it printed.
#[derive(Debug)]
pub struct Run {
    /// The command line.
    pub command: String,
    /// The exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
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
