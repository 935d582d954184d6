//! Resolves paths in a module to the files that define the items, through imports and re-exports.

use super::modules::{Modules, Named};
use super::names::{Mention, Origin};
use std::collections::HashSet;

/// The target of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Target {
    /// An item with a name that a module defines.
    Item(usize, String),
    Module(usize),
    /// Another crate, or a name outside this crate, with the rest of the path.
    Outside(Vec<String>),
}

/// Names under resolution, because imports may be circular.
type Open = HashSet<(usize, String)>;

impl Modules {
    /// Returns the targets of a path in a module. A name can be a module and a function at once.
    pub(super) fn targets(&self, module: usize, mention: &Mention) -> Vec<Target> {
        let mut found = self.resolve(module, &mention.path, mention.origin, &mut Open::new());
        match mention.origin {
            // `use crate::amax`, where it is both a module and a function: the code after it
            // decides.
            Origin::Use if found.iter().any(|target| matches!(target, Target::Module(_))) => found.clear(),
            Origin::Facade => found.retain(|target| matches!(target, Target::Outside(_))),
            _ => {}
        }
        found
    }

    fn resolve(&self, module: usize, path: &[String], origin: Origin, open: &mut Open) -> Vec<Target> {
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        let mut found = match first.as_str() {
            "crate" => vec![Target::Module(0)],
            "self" => vec![Target::Module(module)],
            "super" => self.0[module].parent.into_iter().map(Target::Module).collect(),
            "Self" => return Vec::new(),
            name => self.lookup(module, name, open),
        };
        if found.is_empty() {
            return vec![Target::Outside(path.to_vec())];
        }
        for (at, name) in rest.iter().enumerate() {
            let Some(inside) = found.iter().find_map(|target| match target {
                Target::Module(module) => Some(*module),
                _ => None,
            }) else {
                // The rest of the path is a variant, a constant or a function of a type.
                return extended(found, &rest[at..]);
            };
            found = match name.as_str() {
                "self" => vec![Target::Module(inside)],
                "super" => self.0[inside].parent.into_iter().map(Target::Module).collect(),
                name => self.lookup(inside, name, open),
            };
            if found.is_empty() {
                // A macro defines it. If a macro names it, it may just as well be a name of another
                // module.
                return if origin == Origin::Rules {
                    Vec::new()
                } else {
                    vec![Target::Item(inside, name.clone())]
                };
            }
        }
        found
    }

    fn lookup(&self, module: usize, name: &str, open: &mut Open) -> Vec<Target> {
        let first_visit = open.insert((module, name.to_owned()));
        let here = &self.0[module];
        let mut found = Vec::new();
        for named in here.names.get(name).into_iter().flatten() {
            match named {
                Named::Item => found.push(Target::Item(module, name.to_owned())),
                Named::Module(inner) => found.push(Target::Module(*inner)),
                Named::Import(path) if first_visit => {
                    found.extend(self.resolve(module, path, Origin::Use, open));
                }
                Named::Import(_) => {}
            }
        }
        if found.is_empty() && first_visit {
            for glob in &here.globs {
                for target in self.resolve(module, glob, Origin::Use, open) {
                    if let Target::Module(inner) = target {
                        found.extend(self.lookup(inner, name, open));
                    }
                }
            }
        }
        if found.is_empty() && here.perhaps.contains(name) {
            found.push(Target::Item(module, name.to_owned()));
        }
        open.remove(&(module, name.to_owned()));
        found
    }
}

fn extended(mut targets: Vec<Target>, rest: &[String]) -> Vec<Target> {
    for target in &mut targets {
        if let Target::Outside(path) = target {
            path.extend_from_slice(rest);
        }
    }
    targets
}
