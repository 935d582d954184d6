//! Arrows from the file that names an item to the file that defines it, and circles of arrows.

use super::modules::{Modules, Reader};
use super::resolve::Target;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The imported names, by importing and by defining file.
#[derive(Default)]
pub(super) struct Arrows(BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>);

impl Arrows {
    /// Adds the imports between the files of a library or program. Returns the crates that they
    /// name.
    pub(super) fn add(&mut self, root: &Path, read: Reader<'_>) -> BTreeMap<String, PathBuf> {
        let modules = Modules::read(root, read);
        let mut outside = BTreeMap::new();
        for (id, module) in modules.0.iter().enumerate() {
            for mention in &module.mentions {
                for target in modules.targets(id, mention) {
                    let (to, name) = match target {
                        Target::Item(to, name) => (&modules.0[to].file, name),
                        Target::Module(_) => continue,
                        Target::Outside(path) => {
                            outside.entry(path[0].clone()).or_insert_with(|| module.file.clone());
                            continue;
                        }
                    };
                    if *to != module.file {
                        let arrows = self.0.entry(module.file.clone()).or_default();
                        arrows.entry(to.clone()).or_default().insert(name);
                    }
                }
            }
        }
        outside
    }

    /// Returns the sets of files that reach each other.
    pub(super) fn circles(&self) -> Vec<BTreeSet<&Path>> {
        let reached: BTreeMap<&Path, BTreeSet<&Path>> =
            self.0.keys().map(|file| (file.as_path(), self.reached_from(file))).collect();
        let mut circles = Vec::new();
        for (&file, others) in &reached {
            let leads_back = |other: &&Path| reached.get(other).is_some_and(|back| back.contains(file));
            let circle: BTreeSet<_> = others.iter().copied().filter(leads_back).collect();
            if circle.first() == Some(&file) {
                circles.push(circle);
            }
        }
        circles
    }

    fn reached_from(&self, file: &Path) -> BTreeSet<&Path> {
        let mut reached = BTreeSet::new();
        let mut waiting: Vec<&Path> = vec![file];
        while let Some(file) = waiting.pop() {
            for next in self.0.get(file).into_iter().flat_map(BTreeMap::keys) {
                if reached.insert(next.as_path()) {
                    waiting.push(next);
                }
            }
        }
        reached
    }

    /// Iterates over pairs of an importing file and the file that it imports from.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.0.iter().flat_map(|(from, all)| all.keys().map(move |to| (from.as_path(), to.as_path())))
    }

    /// Describes a circle with the imported names.
    pub(super) fn describe(&self, circle: &BTreeSet<&Path>) -> String {
        let mut text = format!("a circle of {} files:\n", circle.len());
        for &file in circle {
            for (to, names) in self.0.get(file).into_iter().flatten() {
                if circle.contains(to.as_path()) {
                    let names: Vec<_> = names.iter().map(String::as_str).collect();
                    writeln!(text, "  {} -> {}: {}", file.display(), to.display(), names.join(", "))
                        .expect("strings take everything");
                }
            }
        }
        text
    }

    /// Returns the names that one file imports from another.
    #[cfg(test)]
    pub(super) fn between(&self, from: &str, to: &str) -> Vec<&str> {
        let names = self.0.get(Path::new(from)).and_then(|arrows| arrows.get(Path::new(to)));
        names.into_iter().flatten().map(String::as_str).collect()
    }
}
