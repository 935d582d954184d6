//! A rule of a recipe file: settings for the tensors whose names match its patterns.

use std::collections::BTreeMap;

use globset::GlobMatcher;

use crate::plan::settings::Settings;

/// A rule for the tensors whose names match.
#[derive(Clone, Debug)]
pub(super) struct Rule {
    pub(super) line: usize,
    pub(super) patterns: Vec<GlobMatcher>,
    /// True to copy the tensors, false to quantize them; `None` if the rule does not decide.
    pub(super) keep: Option<bool>,
    pub(super) settings: Settings,
    pub(super) lines: Lines,
}

/// The lines of keys, counted from 1.
pub(super) type Lines = BTreeMap<&'static str, usize>;

impl Rule {
    pub(super) fn matches(&self, tensor: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.is_match(tensor))
    }

    /// The patterns as in the file.
    pub(super) fn text(&self) -> String {
        let patterns: Vec<_> =
            self.patterns.iter().map(|pattern| format!("{:?}", pattern.glob().glob())).collect();
        patterns.join(", ")
    }
}
