//! The crates as floors: each may import only some others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A crate: its folder, its package, and the folders of the crates that it may import.
pub(super) struct Floor {
    pub(super) folder: &'static str,
    pub(super) package: &'static str,
    pub(super) below: &'static [&'static str],
}

/// The order of crates. A crate may not import any other than those in its last column.
pub(super) const FLOORS: [Floor; 11] = [
    floor("formats", "microscale-formats", &[]),
    floor("kernels-abi", "microscale-kernels-abi", &["formats"]),
    floor("kernels-gpu", "microscale-kernels", &["formats", "kernels-abi"]),
    floor("host", "microscale", &["formats", "kernels-abi"]),
    floor("checkpoint", "microscale-checkpoint", &["formats", "kernels-abi", "host"]),
    floor("candle", "microscale-candle", &["formats", "kernels-abi", "host", "checkpoint"]),
    floor("models", "microscale-models", &["formats", "kernels-abi", "host", "checkpoint", "candle"]),
    floor("cli", "microscale-cli", &["formats", "kernels-abi", "host", "checkpoint", "candle", "models"]),
    floor(
        "python",
        "microscale-python",
        &["formats", "kernels-abi", "host", "checkpoint", "candle", "models", "cli"],
    ),
    floor("xtask", "xtask", &["formats", "kernels-abi"]),
    floor("tests/executor", "microscale-executor", &["formats"]),
];

const fn floor(folder: &'static str, package: &'static str, below: &'static [&'static str]) -> Floor {
    Floor { folder, package, below }
}

impl Floor {
    /// Returns the root files of the crate's library and program.
    pub(super) fn roots(&self) -> [PathBuf; 2] {
        ["src/lib.rs", "src/main.rs"].map(|root| Path::new(self.folder).join(root))
    }

    /// Returns the crates that the manifest or the sources import although they may not.
    ///
    /// `named` holds the first words of paths in the sources, each with a file.
    pub(super) fn faults(&self, manifest: &str, named: &BTreeMap<String, PathBuf>) -> Vec<String> {
        let manifest: toml::Table =
            manifest.parse().unwrap_or_else(|error| panic!("{}/Cargo.toml: {error}", self.folder));
        assert_eq!(manifest["package"]["name"].as_str(), Some(self.package), "{}/Cargo.toml", self.folder);

        let in_manifest = dependencies(&manifest).into_iter().map(|name| (name, "Cargo.toml".to_owned()));
        let in_sources =
            named.iter().map(|(name, file)| (name.replace('_', "-"), file.display().to_string()));
        in_manifest.chain(in_sources).filter_map(|(name, place)| self.fault(&name, &place)).collect()
    }

    fn fault(&self, package: &str, place: &str) -> Option<String> {
        let other = FLOORS.iter().find(|other| other.package == package)?;
        let allowed = other.folder == self.folder || self.below.contains(&other.folder);
        (!allowed)
            .then(|| format!("{} imports {}, which is not below it: {place}", self.folder, other.folder))
    }
}

/// Returns the packages that a manifest depends on.
///
/// Dev-dependencies of published packages count, because cargo must publish them first.
fn dependencies(manifest: &toml::Table) -> BTreeSet<String> {
    let published = manifest["package"].get("publish").and_then(toml::Value::as_bool) != Some(false);
    let mut kinds = vec!["dependencies", "build-dependencies"];
    kinds.extend(published.then_some("dev-dependencies"));

    let targets = manifest.get("target").and_then(toml::Value::as_table).into_iter();
    let targets = targets.flat_map(toml::Table::values).filter_map(toml::Value::as_table);
    let tables = targets.chain([manifest]).flat_map(|table| kinds.iter().filter_map(|kind| table.get(*kind)));
    let entries = tables.filter_map(toml::Value::as_table).flatten();
    // A dependency may have another name than its package.
    let package = |(name, entry): (&String, &toml::Value)| {
        entry.get("package").and_then(toml::Value::as_str).unwrap_or(name).to_owned()
    };
    entries.map(package).collect()
}
