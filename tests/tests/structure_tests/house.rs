//! Checks the repository's own crates.

use super::arrows::Arrows;
use super::floors::{FLOORS, Floor};
use microscale_test_support::data_dir;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Returns the text of a file of the repository.
fn read(file: &Path) -> Option<String> {
    std::fs::read_to_string(data_dir().join(file)).ok()
}

/// Returns the manifest of a crate.
///
/// Packed for another machine, the test has no sources and nothing to check.
fn manifest(floor: &Floor) -> Option<String> {
    read(&Path::new(floor.folder).join("Cargo.toml"))
}

fn roots(floor: &Floor) -> impl Iterator<Item = PathBuf> {
    floor.roots().into_iter().filter(|root| read(root).is_some())
}

#[test]
fn no_crate_imports_one_above_it() {
    let mut faults = Vec::new();
    for floor in &FLOORS {
        let Some(manifest) = manifest(floor) else { continue };
        let mut named = BTreeMap::new();
        for root in roots(floor) {
            named.extend(Arrows::default().add(&root, &read));
        }
        faults.extend(floor.faults(&manifest, &named));
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut arrows = Arrows::default();
    for root in FLOORS.iter().flat_map(roots) {
        arrows.add(&root, &read);
    }
    let circles: Vec<_> = arrows.circles().iter().map(|circle| arrows.describe(circle)).collect();
    assert!(circles.is_empty(), "\n{}", circles.join("\n"));
}

/// The table of a crate's root lists its modules from the bottom up.
#[test]
fn modules_of_the_checkpoint_crate_import_only_modules_above_them_in_its_table() {
    let root = Path::new("checkpoint/src/lib.rs");
    let Some(text) = read(root) else { return };
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | `")?.split(" | ").next());
    let order: Vec<_> = rows.flat_map(|row| row.split(", ").map(|name| name.trim_matches('`'))).collect();
    let declared = text.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let listed: BTreeSet<_> = order.iter().copied().collect();
    assert_eq!(listed, declared.collect(), "the table and the modules of {}", root.display());
    let mut arrows = Arrows::default();
    arrows.add(root, &read);
    let place = |file: &Path| {
        let within = file.strip_prefix("checkpoint/src").ok()?.with_extension("");
        let module = within.iter().next()?.to_str()?.to_owned();
        order.iter().position(|name| *name == module)
    };
    let is_wrong = |(from, to): &(&Path, &Path)| place(from).zip(place(to)).is_some_and(|(a, b)| a < b);
    let wrong: Vec<_> = arrows.pairs().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "imports of modules below: {wrong:?}");
}

/// `cargo run` builds all default members, so no test crate may be one.
#[test]
fn cargo_run_builds_no_test_crate() {
    let Some(manifest) = read(Path::new("Cargo.toml")) else { return };
    let manifest: toml::Table = manifest.parse().expect("the workspace's manifest");
    for member in manifest["workspace"]["default-members"].as_array().expect("a list") {
        let member = member.as_str().expect("a folder");
        let product =
            ["formats", "kernels-abi", "host", "checkpoint", "candle", "models", "cli"].contains(&member);
        let builds = ["src/lib.rs", "src/main.rs"].map(|root| read(&Path::new(member).join(root)).is_some());
        assert!(product || builds == [false, false], "{member} would be built");
    }
}
