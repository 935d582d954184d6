//! Builds the program and the test programs, and reads their paths from cargo's messages.

use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An executable that cargo built.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Executable {
    /// A name without hashes: `microscale`, `formats-unit`, `tests-golden`.
    pub(super) name: String,
    pub(super) path: PathBuf,
}

/// Builds the program with the release profile.
pub(super) fn build_program(root: &Path) -> Result<Executable> {
    let messages =
        cargo(root, &["build", "--release", "--package", "microscale-cli", "--bin", "microscale"])?;
    let found = executables(&messages, false)?.pop();
    let program = found.context("cargo built no program `microscale`")?;
    Ok(Executable { name: "microscale".to_owned(), ..program })
}

/// Builds the test programs of the default members, with `cargo test`'s profile.
pub(super) fn build_tests(root: &Path) -> Result<Vec<Executable>> {
    let tests = executables(&cargo(root, &["test", "--no-run"])?, true)?;
    if tests.is_empty() {
        bail!("cargo built no tests");
    }
    Ok(tests)
}

fn cargo(root: &Path, arguments: &[&str]) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root).args(arguments).arg("--message-format=json-render-diagnostics");
    process::read(&mut command)
}

/// Returns the executables in cargo's messages, sorted by name: only tests, or only others.
fn executables(messages: &str, tests: bool) -> Result<Vec<Executable>> {
    let mut found = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("cargo wrote something that is not JSON")?;
        let wanted = message["reason"] == "compiler-artifact" && message["profile"]["test"] == tests;
        if let (true, Some(path)) = (wanted, message["executable"].as_str()) {
            found.push(Executable { name: name(&message)?, path: path.into() });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = found.windows(2).find(|pair| pair[0].name == pair[1].name) {
        bail!("{} and {} would get one name", pair[0].path.display(), pair[1].path.display());
    }
    Ok(found)
}

/// Returns a stable name made of the package folder and the target.
///
/// Examples: `formats-unit` for a library's unit tests, `cli-microscale-unit` for a program's, and
/// `tests-golden` for tests/tests/golden.rs.
fn name(message: &Value) -> Result<String> {
    let text = |value: &Value| value.as_str().map(str::to_owned).context("cargo's message lacks a name");
    let manifest = PathBuf::from(text(&message["manifest_path"])?);
    let package = manifest.parent().and_then(Path::file_name).context("a manifest without a folder")?;
    let package = package.to_string_lossy();
    let target = text(&message["target"]["name"])?;
    Ok(match text(&message["target"]["kind"][0])?.as_str() {
        "test" => format!("{package}-{target}"),
        "bin" => format!("{package}-{target}-unit"),
        _ => format!("{package}-unit"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(package: &str, kind: &str, target: &str, test: bool, executable: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"/r/{package}/Cargo.toml","profile":{{"test":{test}}},
            "target":{{"kind":["{kind}"],"name":"{target}"}},"executable":{executable}}}"#
        )
        .replace('\n', "")
    }

    #[test]
    fn executables_get_stable_names() {
        let messages = [
            artifact("host", "lib", "microscale", false, "null"),
            artifact("cli", "bin", "microscale", false, "\"/t/microscale\""),
            artifact("cli", "bin", "microscale", true, "\"/t/microscale-1\""),
            artifact("host", "lib", "microscale", true, "\"/t/microscale-2\""),
            artifact("tests", "test", "golden", true, "\"/t/golden-3\""),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ]
        .join("\n");
        let tests = executables(&messages, true).unwrap();
        let names: Vec<&str> = tests.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(names, ["cli-microscale-unit", "host-unit", "tests-golden"]);
        assert_eq!(executables(&messages, false).unwrap()[0].path, PathBuf::from("/t/microscale"));
    }

    #[test]
    fn duplicate_names_are_refused() {
        let one = artifact("tests", "test", "golden", true, "\"/t/golden-3\"");
        let two = artifact("tests", "test", "golden", true, "\"/t/golden-4\"");
        assert!(executables(&format!("{one}\n{two}"), true).is_err());
    }
}
