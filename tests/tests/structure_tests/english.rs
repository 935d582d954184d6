//! Limits the stilted phrases and the width of comments, per crate and document.

use super::prose::{Kind, Reader, phrases, words};
use microscale_test_support::data_dir;
use std::path::{Path, PathBuf};

/// Maximum width of comments, and of documents outside code blocks and tables.
const COLUMNS: usize = 100;

/// Number of faults that a failure lists.
const LISTED: usize = 20;

/// A group of files, and its limits.
struct Group {
    /// A folder or a file. A file in several groups counts for the one with the longest path.
    path: &'static str,
    /// Maximum number of phrases to avoid per 10,000 words.
    phrases: u32,
    /// Maximum number of lines wider than [`COLUMNS`], where it is limited.
    wide_lines: Option<usize>,
}

/// The limits. The goal is 10 phrases and no wide lines.
///
/// Higher limits are the figures of the day when they were set. They may only fall: lower them
/// with every change to a group. The test prints all figures with `--nocapture`.
const GROUPS: [Group; 22] = [
    group("formats", 10, Some(0)),
    group("kernels-abi", 10, Some(0)),
    group("kernels-gpu", 10, Some(0)),
    group("host", 10, Some(0)),
    group("xtask", 10, Some(0)),
    group("tests/executor", 10, Some(0)),
    group("tests", 10, None),
    group("checkpoint", 10, None),
    group("cli", 10, None),
    group("python", 10, None),
    group("candle", 10, None),
    group("models", 10, Some(0)),
    group("scripts", 10, Some(0)),
    group("docs", 10, None),
    group("README.md", 10, None),
    group("ARCHITECTURE.md", 10, None),
    group("CONTRIBUTING.md", 10, None),
    group("CHANGELOG.md", 10, None),
    group("RELEASING.md", 10, None),
    group("SECURITY.md", 10, None),
    group("docs/benchmarks", 10, Some(0)),
    group("docs/lab", 10, Some(0)),
];

const fn group(path: &'static str, phrases: u32, wide_lines: Option<usize>) -> Group {
    Group { path, phrases, wide_lines }
}

/// Counts of a group, and its faults with their locations.
#[derive(Default)]
struct Figures {
    words: usize,
    phrases: Vec<String>,
    wide_lines: Vec<String>,
}

impl Figures {
    /// Adds the text of a file.
    fn add(&mut self, file: &Path, kind: Kind, text: &str) {
        let mut reader = Reader::new(kind);
        for (number, line) in (1..).zip(text.lines()) {
            let prose = reader.prose(line);
            let fault = |what: &str| format!("{}:{number}: {what}", file.display());
            self.words += words(&prose);
            self.phrases.extend(phrases(&prose).into_iter().map(&fault));
            if is_limited(kind, line, &prose) && line.chars().count() > COLUMNS {
                self.wide_lines.push(fault(&format!("{} columns", line.chars().count())));
            }
        }
    }

    /// Returns the number of phrases per 10,000 words.
    fn rate(&self) -> f64 {
        self.phrases.len() as f64 / self.words.max(1) as f64 * 1e4
    }

    /// Returns the exceeded limits of a group, with the first faults.
    fn faults(&self, group: &Group) -> Vec<String> {
        let mut faults = Vec::new();
        if self.rate() > f64::from(group.phrases) {
            let (rate, limit) = (self.rate(), group.phrases);
            faults.push(format!("{}: {rate:.1} phrases per 10,000 words, limit {limit}", group.path));
            faults.extend(self.phrases.iter().take(LISTED).cloned());
        }
        if group.wide_lines.is_some_and(|limit| self.wide_lines.len() > limit) {
            let (count, limit) = (self.wide_lines.len(), group.wide_lines.unwrap_or(0));
            faults.push(format!("{}: {count} lines over {COLUMNS} columns, limit {limit}", group.path));
            faults.extend(self.wide_lines.iter().take(LISTED).cloned());
        }
        faults
    }
}

/// Returns whether the width of a line is limited: whole-line comments, and prose of documents.
fn is_limited(kind: Kind, line: &str, prose: &str) -> bool {
    match kind {
        Kind::Rust => line.trim_start().starts_with("//"),
        Kind::Python => line.trim_start().starts_with('#'),
        Kind::Markdown => !prose.is_empty() && !line.starts_with('|'),
    }
}

/// Returns the files with prose in a file or folder, without build outputs and hidden folders.
fn files(path: &Path, found: &mut Vec<PathBuf>) {
    if !path.is_dir() {
        found.extend(path.is_file().then(|| path.to_path_buf()));
        return;
    }
    let entries = std::fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for entry in entries {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with('.') && name != "target" {
            files(&path, found);
        }
    }
}

/// Returns the figures of a group.
fn figures(root: &Path, group: &Group) -> Figures {
    let mut paths = Vec::new();
    files(&root.join(group.path), &mut paths);
    paths.sort();
    let mut figures = Figures::default();
    for path in paths {
        let file = path.strip_prefix(root).expect("a file below the root");
        let own = GROUPS.iter().filter(|other| file.starts_with(other.path));
        let own = own.max_by_key(|other| other.path.len()).map(|other| other.path);
        let kind = file.extension().and_then(|extension| Kind::of(&extension.to_string_lossy()));
        if let (Some(kind), true) = (kind, own == Some(group.path)) {
            let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            figures.add(file, kind, &String::from_utf8_lossy(&bytes));
        }
    }
    figures
}

#[test]
fn prose_is_plain_and_comments_fit_100_columns() {
    let root = data_dir();
    // Packed for another machine, the test has no sources and nothing to check.
    if !root.join("Cargo.toml").exists() {
        return;
    }
    let mut faults = Vec::new();
    for group in &GROUPS {
        let figures = figures(&root, group);
        let (words, count, wide) = (figures.words, figures.phrases.len(), figures.wide_lines.len());
        println!("{:16} {words:6} words {count:4} phrases {:6.1} {wide:5} wide", group.path, figures.rate());
        assert!(words > 0, "{} has no prose", group.path);
        faults.extend(figures.faults(group));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the faults of a Rust file with one comment.
fn faults_of(comment: &str, limit: &Group) -> Vec<String> {
    let mut figures = Figures::default();
    figures.add(Path::new("a.rs"), Kind::Rust, &format!("{}{} {comment}\n", "/", "/"));
    figures.faults(limit)
}

#[test]
fn a_stilted_comment_exceeds_the_limit() {
    let limit = group("crate", 10, Some(0));
    let found = faults_of("What is rare goes to the definition, of which nobody tells.", &limit);
    let expected = [
        "crate: 2727.3 phrases per 10,000 words, limit 10",
        "a.rs:1: What is",
        "a.rs:1: of which",
        "a.rs:1: nobody",
    ];
    assert_eq!(found, expected);
    assert!(faults_of("Rare cases fall back to the reference implementation.", &limit).is_empty());
}

#[test]
fn a_wide_comment_exceeds_the_limit() {
    let comment = "Words. ".repeat(15);
    let found = faults_of(comment.trim(), &group("crate", 10, Some(0)));
    assert_eq!(found, ["crate: 1 lines over 100 columns, limit 0", "a.rs:1: 107 columns"]);
    assert!(faults_of(comment.trim(), &group("crate", 10, None)).is_empty());
}
