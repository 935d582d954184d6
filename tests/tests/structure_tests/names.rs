//! The paths that an item names, at any position in it.

use super::modules::{attributes, only_for_tests};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ItemUse, Macro, Meta};

/// The position of a path, which determines how it is resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    Use,
    /// In a `pub use`, a table of contents. Only other crates that it names are imported.
    Facade,
    Code,
    /// In the body of a `macro_rules`, where some names are resolved at the call.
    Rules,
}

/// A path as written, without generic arguments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mention {
    pub(super) path: Vec<String>,
    pub(super) origin: Origin,
}

/// Returns the name that an item defines.
pub(super) fn item_name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// Returns the paths that an item names, and the `use` lines inside it.
pub(super) fn mentions(item: &Item) -> (Vec<Mention>, Vec<&ItemUse>) {
    let mut names = Names { mentions: Vec::new(), imports: Vec::new() };
    names.visit_item(item);
    (names.mentions, names.imports)
}

struct Names<'ast> {
    mentions: Vec<Mention>,
    imports: Vec<&'ast ItemUse>,
}

impl<'ast> Visit<'ast> for Names<'ast> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !only_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Macro(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => &[],
        };
        if !only_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        self.imports.push(import);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.mentions.push(Mention { path: segments, origin: Origin::Code });
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        let rules = call.path.is_ident("macro_rules");
        let origin = if rules { Origin::Rules } else { Origin::Code };
        if !rules {
            self.visit_path(&call.path);
        }
        let inside = tokens(call.tokens.clone()).into_iter();
        self.mentions.extend(inside.map(|mention| Mention { origin, ..mention }));
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        // `#[derive]` names macros, `#[arg]` functions. Documentation and conditions name nothing.
        if let Meta::List(list) = &attribute.meta
            && !attribute.path().is_ident("cfg")
        {
            self.mentions.extend(tokens(list.tokens.clone()));
        }
    }
}

/// Returns the paths in the arguments of a macro: words joined by `::`.
///
/// Methods, fields, lifetimes, macro parameters and defined names are excluded.
pub(super) fn tokens(stream: TokenStream) -> Vec<Mention> {
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < trees.len() {
        match &trees[at] {
            TokenTree::Group(group) => found.extend(tokens(group.stream())),
            TokenTree::Ident(_) => {
                let start = at;
                let mut path = vec![word(&trees, at).expect("an identifier")];
                while is(&trees, at + 1, ':') && is(&trees, at + 2, ':') {
                    let Some(next) = word(&trees, at + 3) else { break };
                    path.push(next);
                    at += 3;
                }
                if can_be_a_path(&trees, start, at, &path) {
                    found.push(Mention { path, origin: Origin::Code });
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        at += 1;
    }
    found
}

fn can_be_a_path(trees: &[TokenTree], start: usize, end: usize, path: &[String]) -> bool {
    let before = |mark: char| start > 0 && is(trees, start - 1, mark);
    if before('$') {
        return path[0] == "crate";
    }
    let method = before('.') && !(start > 1 && is(trees, start - 2, '.'));
    let field = path.len() == 1 && is(trees, end + 1, ':') && !is(trees, end + 2, ':');
    let defined = start > 0
        && word(trees, start - 1).is_some_and(|word| {
            ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "let"]
                .contains(&word.as_str())
        });
    !method && !field && !defined && !before('\'')
}

fn is(trees: &[TokenTree], at: usize, mark: char) -> bool {
    matches!(trees.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == mark)
}

fn word(trees: &[TokenTree], at: usize) -> Option<String> {
    match trees.get(at) {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}
