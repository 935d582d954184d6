//! Finds tensors of zeros: norms, embeddings, output heads and other unquantized weights.

use std::collections::HashMap;

use super::contents::{Contents, Entry, last_part, numbered};
use super::finding::{Defect, Finding};
use crate::names::role::Role;
use crate::names::weight::{WEIGHT, module};

/// Last name components of tables of token embeddings. Tables of positions may be zeros.
const TOKENS: [&str; 7] =
    ["embed_tokens", "word_embeddings", "tok_embeddings", "wte", "shared", "embed_in", "token_embd"];

/// Checks unquantized weights for zeros.
///
/// Weights of norms may all be zeros: Gemma's are offsets from 1. So a norm is compared with the
/// same norm of other layers, or else, after the last layer, with the norms of its size in layers.
pub(super) fn check_zeros(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let naming = contents.checkpoint.naming;
    let weights = || contents.entries().filter(|entry| entry.name.ends_with(WEIGHT));
    let is_zero = |name: &str| contents.zeros.get(name).is_some_and(|zeros| zeros.zero == zeros.rows);
    let role = |entry: &Entry<'_>| naming.unquantized_role(entry.name, entry.shape);
    // Whether the tensors of each kind are zeros: the same tensor of all layers, and all norms of a
    // size.
    let mut kinds: HashMap<String, Vec<bool>> = HashMap::new();
    let mut norms: HashMap<(&str, usize), Vec<bool>> = HashMap::new();
    for entry in weights() {
        let is_zero = is_zero(entry.name);
        kinds.entry(kind(entry.name)).or_default().push(is_zero);
        if let (Some(Role::Norm), [size]) = (role(&entry), entry.shape)
            && let Some((stack, ..)) = numbered(entry.name)
        {
            norms.entry((parent(stack), *size)).or_default().push(is_zero);
        }
    }
    for entry in weights() {
        let Some(zeros) = contents.zeros.get(entry.name).filter(|zeros| zeros.zero > 0) else { continue };
        let all = zeros.zero == zeros.rows;
        let part = last_part(entry.name);
        let what = match role(&entry) {
            Some(Role::Embedding) if TOKENS.contains(&part) && 2 * zeros.zero >= zeros.rows => {
                format!("{} of its {} rows are zeros", zeros.zero, zeros.rows)
            }
            Some(Role::OutputHead) if entry.shape.len() == 2 && 2 * zeros.zero >= zeros.rows => {
                format!("{} of its {} rows are zeros", zeros.zero, zeros.rows)
            }
            Some(Role::Embedding | Role::OutputHead) => continue,
            role if all => {
                let same = &kinds[&kind(entry.name)];
                let size = entry.shape.first().filter(|_| role == Some(Role::Norm));
                let others = match (same.len(), size) {
                    (1, Some(size)) => {
                        norms.get(&(parent(module(entry.name)), *size)).map_or(&[][..], Vec::as_slice)
                    }
                    _ => same,
                };
                let zero = others.iter().filter(|zero| **zero).count();
                if others.is_empty() || 2 * zero > others.len() {
                    continue;
                }
                format!("all values are zeros, and {} tensors like it have others", others.len() - zero)
            }
            _ => continue,
        };
        findings.push(Finding::of(Defect::ZeroTensor, entry.stored, what));
    }
}

/// The name of the module that a module is in.
fn parent(module: &str) -> &str {
    module.rsplit_once('.').map_or("", |(parent, _)| parent)
}

/// A name without its numbers: the same for all layers and experts.
fn kind(name: &str) -> String {
    let part = |part: &'_ str| if part.parse::<u64>().is_ok() { "*".to_string() } else { part.to_string() };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}
