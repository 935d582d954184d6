//! The kernels' pinned compiler, from kernels-gpu/rust-toolchain.toml.
//!
//! It is installed if missing, and started in an environment without traces of the outer cargo.

use crate::process;
use anyhow::{Context, Result};
use std::process::Command;

/// A pinned toolchain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Toolchain {
    /// For example `nightly-2026-10-01`.
    pub(crate) channel: String,
    profile: String,
    components: Vec<String>,
}

impl Toolchain {
    /// Parses the few keys of a pinned rust-toolchain.toml. Each key must be on one line.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let value = |key: &str| {
            let lines = text.lines().filter_map(|line| line.split_once('='));
            let mut values = lines.filter(|(name, _)| name.trim() == key).map(|(_, value)| value.trim());
            values.next().with_context(|| format!("rust-toolchain.toml has no `{key}`"))
        };
        let unquoted = |text: &str| text.trim().trim_matches('"').to_owned();
        let components = value("components")?.trim_matches(['[', ']']);
        Ok(Self {
            channel: unquoted(value("channel")?),
            profile: unquoted(value("profile")?),
            components: components.split(',').map(unquoted).filter(|name| !name.is_empty()).collect(),
        })
    }

    /// Installs missing components, and prints that it does.
    pub(crate) fn ensure_installed(&self) -> Result<()> {
        let mut list = rustup();
        list.args(["component", "list", "--installed", "--toolchain", &self.channel]);
        let output = process::capture(&mut list).context("the kernels' compiler comes from rustup")?;
        let installed = String::from_utf8_lossy(&output.stdout);
        let present = |name: &String| installed.lines().any(|line| line.starts_with(name.as_str()));
        if output.status.success() && self.components.iter().all(present) {
            return Ok(());
        }
        println!("installing Rust {} with {}", self.channel, self.components.join(", "));
        let mut install = rustup();
        install.args(["toolchain", "install", &self.channel, "--profile", &self.profile, "--no-self-update"]);
        install.args(self.components.iter().flat_map(|name| ["--component", name]));
        process::run(&mut install)
    }

    /// Returns `cargo` of this toolchain, in a clean environment.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = rustup();
        command.args(["run", &self.channel, "cargo"]);
        command
    }
}

/// Returns `rustup` without the variables that steer a build.
///
/// An outer cargo, rustup or user may have set them. They would select another compiler
/// (`RUSTUP_TOOLCHAIN`, `RUSTC`) or other code (`RUSTFLAGS`, `CARGO_PROFILE_RELEASE_LTO`, …).
fn rustup() -> Command {
    let mut command = Command::new("rustup");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(steers_the_build) {
            command.env_remove(name);
        }
    }
    command
}

fn steers_the_build(variable: &str) -> bool {
    // Variables that concern downloads and output are kept.
    let harmless = ["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_TERM_"];
    let cargo = variable == "CARGO" || variable.starts_with("CARGO_");
    let rust =
        variable.starts_with("RUSTC") || variable.starts_with("RUSTFLAGS") || variable == "RUSTUP_TOOLCHAIN";
    rust || cargo && !harmless.iter().any(|prefix| variable.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIN: &str = "# why\n[toolchain]\nchannel = \"nightly-2026-10-01\"\nprofile = \"minimal\"\n\
                       components = [\"rust-src\", \"llvm-tools\"]\n";

    #[test]
    fn a_pinned_channel_is_parsed() {
        let toolchain = Toolchain::parse(PIN).unwrap();
        assert_eq!(toolchain.channel, "nightly-2026-10-01");
        assert_eq!(toolchain.profile, "minimal");
        assert_eq!(toolchain.components, ["rust-src", "llvm-tools"]);
    }

    #[test]
    fn a_pin_without_a_channel_is_refused() {
        let error = Toolchain::parse("[toolchain]\nprofile = \"minimal\"\ncomponents = []\n").unwrap_err();
        assert!(error.to_string().contains("channel"), "{error}");
    }

    #[test]
    fn only_harmless_variables_reach_the_inner_cargo() {
        for name in
            ["CARGO", "CARGO_ENCODED_RUSTFLAGS", "CARGO_PROFILE_RELEASE_LTO", "CARGO_TARGET_DIR", "RUSTC"]
        {
            assert!(steers_the_build(name), "{name}");
        }
        for name in
            ["RUSTFLAGS", "RUSTUP_TOOLCHAIN", "RUSTC_WRAPPER", "CARGO_BUILD_RUSTFLAGS", "CARGO_MANIFEST_DIR"]
        {
            assert!(steers_the_build(name), "{name}");
        }
        for name in [
            "PATH",
            "RUSTUP_HOME",
            "CARGO_HOME",
            "CARGO_HTTP_CAINFO",
            "CARGO_NET_OFFLINE",
            "CARGO_TERM_COLOR",
        ] {
            assert!(!steers_the_build(name), "{name}");
        }
    }
}
