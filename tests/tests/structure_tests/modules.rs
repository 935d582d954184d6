//! The modules of a crate, from its source files: defined, imported and named items.

use super::names::{Mention, Origin, item_name, mentions, tokens};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, ItemUse, UseTree, Visibility};

/// Returns the text of a file, or `None` if it does not exist.
pub(super) type Reader<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// The meaning of a name in a module.
pub(super) enum Named {
    /// Defined in the module.
    Item,
    /// A submodule.
    Module(usize),
    /// Imported or re-exported, with the path as written.
    Import(Vec<String>),
}

/// A module, which is a file or a part of one.
pub(super) struct Module {
    pub(super) file: PathBuf,
    pub(super) parent: Option<usize>,
    pub(super) names: HashMap<String, Vec<Named>>,
    /// The paths of `use path::*`.
    pub(super) globs: Vec<Vec<String>>,
    /// Every word in item-position macro calls. Each may be the name of an item.
    pub(super) perhaps: HashSet<String>,
    pub(super) mentions: Vec<Mention>,
}

/// The modules of a library or program. The first one is the root.
pub(super) struct Modules(pub(super) Vec<Module>);

impl Modules {
    /// Reads the root and every file that a `mod` line names, without test modules.
    pub(super) fn read(root: &Path, read: Reader<'_>) -> Self {
        let mut modules = Self(Vec::new());
        let folder = root.parent().expect("a file is in a folder");
        modules.file(root, folder, None, read);
        modules
    }

    /// Adds a module that is a file. Its submodules are files in `folder`.
    fn file(&mut self, file: &Path, folder: &Path, parent: Option<usize>, read: Reader<'_>) -> usize {
        let text = read(file).unwrap_or_else(|| panic!("{} cannot be read", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.module(file, folder, parent, &parsed.items, read)
    }

    fn module(
        &mut self,
        file: &Path,
        folder: &Path,
        parent: Option<usize>,
        items: &[Item],
        read: Reader<'_>,
    ) -> usize {
        let id = self.0.len();
        self.0.push(Module {
            file: file.to_owned(),
            parent,
            names: HashMap::new(),
            globs: Vec::new(),
            perhaps: HashSet::new(),
            mentions: Vec::new(),
        });
        for item in items.iter().filter(|item| !only_for_tests(attributes(item))) {
            match item {
                Item::Mod(inner) => {
                    let name = inner.ident.to_string();
                    let inside = folder.join(&name);
                    assert!(!has_path(&inner.attrs), "{}: #[path] is not understood", file.display());
                    let child = match &inner.content {
                        Some((_, items)) => self.module(file, &inside, Some(id), items, read),
                        None => {
                            let beside = folder.join(format!("{name}.rs"));
                            let file = if read(&beside).is_some() { beside } else { inside.join("mod.rs") };
                            self.file(&file, &inside, Some(id), read)
                        }
                    };
                    self.0[id].names.entry(name).or_default().push(Named::Module(child));
                }
                Item::Use(import) => self.0[id].import(import),
                item => self.0[id].define(item),
            }
        }
        id
    }
}

impl Module {
    fn import(&mut self, import: &ItemUse) {
        let private = matches!(import.vis, Visibility::Inherited);
        let origin = if private { Origin::Use } else { Origin::Facade };
        for leaf in leaves(&import.tree) {
            self.mentions.push(Mention { path: leaf.path.clone(), origin });
            match leaf.name {
                Some(name) => self.names.entry(name).or_default().push(Named::Import(leaf.path)),
                None => self.globs.push(leaf.path),
            }
        }
    }

    fn define(&mut self, item: &Item) {
        if let Some(name) = item_name(item) {
            self.names.entry(name).or_default().push(Named::Item);
        } else if let Item::Macro(call) = item {
            let words = tokens(call.mac.tokens.clone()).into_iter().flat_map(|mention| mention.path);
            self.perhaps.extend(words);
        }
        let (mentions, inner) = mentions(item);
        self.mentions.extend(mentions);
        // Imports inside a function count for the module, unless it already has the name.
        for import in inner {
            for leaf in leaves(&import.tree) {
                self.mentions.push(Mention { path: leaf.path.clone(), origin: Origin::Use });
                let Some(name) = leaf.name else { continue };
                self.names.entry(name).or_insert_with(|| vec![Named::Import(leaf.path)]);
            }
        }
    }
}

/// One item of a `use`. Without a name it is a glob.
struct Leaf {
    path: Vec<String>,
    name: Option<String>,
}

fn leaves(tree: &UseTree) -> Vec<Leaf> {
    fn walk(tree: &UseTree, before: &[String], leaves: &mut Vec<Leaf>) {
        let with = |last: String| [before, &[last]].concat();
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(path.ident.to_string()), leaves),
            UseTree::Group(group) => group.items.iter().for_each(|tree| walk(tree, before, leaves)),
            UseTree::Glob(_) => leaves.push(Leaf { path: before.to_vec(), name: None }),
            UseTree::Name(leaf) if leaf.ident == "self" => {
                leaves.push(Leaf { path: before.to_vec(), name: before.last().cloned() });
            }
            UseTree::Name(leaf) => {
                let name = leaf.ident.to_string();
                leaves.push(Leaf { path: with(name.clone()), name: Some(name) });
            }
            UseTree::Rename(leaf) => {
                let itself = leaf.ident == "self";
                let path = if itself { before.to_vec() } else { with(leaf.ident.to_string()) };
                leaves.push(Leaf { path, name: Some(leaf.rename.to_string()) });
            }
        }
    }
    let mut found = Vec::new();
    walk(tree, &[], &mut found);
    found
}

/// Returns whether an item is compiled only for tests.
///
/// The attributes are `#[cfg(test)]`, `#[cfg(all(test, …))]` and `#[cfg(doctest)]`.
pub(super) fn only_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let words: Vec<_> =
            tokens(list.tokens.clone()).into_iter().flat_map(|mention| mention.path).collect();
        let has = |word: &str| words.iter().any(|other| other == word);
        (has("test") || has("doctest")) && !has("not") && !has("any")
    })
}

fn has_path(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident("path"))
}

/// Returns the attributes of an item. Items that syn does not understand have none.
pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
