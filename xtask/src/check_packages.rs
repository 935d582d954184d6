//! `check-packages`: packs the published crates and tests them as packed.

use crate::{layout, process};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Workspace members that are not published.
const UNPUBLISHED: [&str; 5] =
    ["xtask", "microscale-python", "microscale-tests", "microscale-executor", "microscale-test-support"];

/// Packages whose unit tests run. For the others cargo only compiles the tests, which is much
/// faster.
const RUN: [&str; 3] = ["microscale-formats", "microscale-kernels-abi", "microscale"];
const COMPILED: [&str; 4] =
    ["microscale-checkpoint", "microscale-candle", "microscale-models", "microscale-cli"];

/// Files that every package must contain.
const FILES: [&str; 3] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// The profile of the repository's manifest, so that compiled dependencies are reused.
const PROFILE: &str = "[profile.dev]
opt-level = 1
debug = \"line-tables-only\"

[profile.dev.package.\"*\"]
debug = false
";

/// Packs the crates, unpacks them into a workspace, and tests them there.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    ensure!(arguments.is_empty(), "usage: cargo xtask check-packages");
    let root = layout::root()?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    // Cargo resolves a relative path against its working directory, which is not always the root.
    let target = std::path::absolute(target)?;
    let packages = target.join("packages");
    if packages.exists() {
        fs::remove_dir_all(&packages).with_context(|| format!("cannot empty {}", packages.display()))?;
    }

    let unpublished = UNPUBLISHED.iter().flat_map(|name| ["--exclude", name]);
    let mut pack = cargo(&root, &packages);
    pack.args(["package", "--quiet", "--locked", "--workspace", "--no-verify", "--allow-dirty"]);
    process::run(pack.args(unpublished))?;

    let workspace = unpack(&packages)?;
    // The repository's versions. Cargo drops the entries that only the repository's tests need.
    fs::copy(root.join("Cargo.lock"), workspace.join("Cargo.lock"))?;
    process::run(cargo(&workspace, &target).args(["test", "--lib"]).args(named(&RUN)))?;
    process::run(cargo(&workspace, &target).args(["check", "--tests"]).args(named(&COMPILED)))?;
    println!(
        "{} packages: packed, and their tests pass or compile without the repository",
        RUN.len() + COMPILED.len()
    );
    Ok(())
}

/// Unpacks all archives into a workspace and makes the packages depend on each other.
fn unpack(packages: &Path) -> Result<PathBuf> {
    let workspace = packages.join("unpacked");
    fs::create_dir_all(&workspace)?;
    for entry in fs::read_dir(packages.join("package"))? {
        let archive = entry?.path();
        if archive.extension().is_some_and(|extension| extension == "crate") {
            process::run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&workspace))?;
        }
    }
    let mut folders = Vec::new();
    for entry in fs::read_dir(&workspace)? {
        folders.push(entry?.file_name().into_string().ok().context("a package's name is not UTF-8")?);
    }
    let found: Vec<&str> = folders.iter().map(|folder| name(folder)).collect();
    for name in RUN.iter().chain(&COMPILED) {
        ensure!(found.contains(name), "cargo has packed no {name}");
    }
    ensure!(
        found.len() == RUN.len() + COMPILED.len(),
        "cargo has packed {found:?}: add each to RUN or COMPILED in xtask/src/check_packages.rs"
    );
    for folder in &folders {
        for file in FILES {
            if !workspace.join(folder).join(file).is_file() {
                bail!("the package {folder} has no {file}");
            }
        }
    }
    fs::write(workspace.join("Cargo.toml"), manifest(&folders))?;
    Ok(workspace)
}

/// Returns the manifest of a workspace of packages in folders `NAME-VERSION`.
fn manifest(folders: &[String]) -> String {
    let patch = |folder: &String| format!("{} = {{ path = \"{folder}\" }}\n", name(folder));
    let patches: String = folders.iter().map(patch).collect();
    format!("[workspace]\nresolver = \"3\"\nmembers = {folders:?}\n\n[patch.crates-io]\n{patches}\n{PROFILE}")
}

/// Returns the package name of a folder `NAME-VERSION`. The version may contain `-` too.
fn name(folder: &str) -> &str {
    let version = |at: &usize| folder[at + 1..].starts_with(|first: char| first.is_ascii_digit());
    let at = folder.match_indices('-').map(|(at, _)| at).find(version);
    at.map_or(folder, |at| &folder[..at])
}

fn named(packages: &[&'static str]) -> impl Iterator<Item = &'static str> {
    packages.iter().flat_map(|name| ["--package", name])
}

fn cargo(folder: &Path, target: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(folder).env("CARGO_TARGET_DIR", target);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_between_packages_are_found() {
        let manifest = manifest(&["microscale-cli-0.1.0-rc.1".into(), "microscale-0.1.0".into()]);
        assert!(
            manifest.contains("members = [\"microscale-cli-0.1.0-rc.1\", \"microscale-0.1.0\"]"),
            "{manifest}"
        );
        assert!(
            manifest.contains("\nmicroscale-cli = { path = \"microscale-cli-0.1.0-rc.1\" }\n"),
            "{manifest}"
        );
        assert!(manifest.contains("\nmicroscale = { path = \"microscale-0.1.0\" }\n"), "{manifest}");
    }
}
