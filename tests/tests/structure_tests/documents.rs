//! Compares the words of command lines and files with the documents.
//!
//! Every word must be in a page of docs/. A list that claims to be complete has a marker,
//! `<!-- words: scale rule -->`, in the line above it: its words must be the code's. The words of
//! a table are in its first column.

use microscale::formats::{Format, ScaleRule, Search, Ties};
use microscale::{NonFinite, Numerics, Recipe, Words};
use microscale_checkpoint::{CheckpointFormat, Defect, KeptAs, Written};
use microscale_test_support::data_dir;
use std::collections::BTreeSet;
use std::path::Path;

const MARKER: &str = "<!-- words: ";

/// A kind of words, as markers name it, with all its words.
type List = (&'static str, BTreeSet<&'static str>);

fn words<T: Words>() -> List {
    (T::WHAT, T::WORDS.iter().map(|(word, _)| *word).collect())
}

/// Returns the lists that documents may have, without words of formats that are for comparison only.
fn lists() -> Vec<List> {
    let has_kernels =
        |numerics| Format::WITH_KERNELS.into_iter().any(|format| Recipe::of(format, numerics).is_ok());
    let numerics = Numerics::WORDS.iter().filter(|(_, numerics)| has_kernels(*numerics));
    let written = CheckpointFormat::WORDS.iter().filter(|(_, format)| format.written() != Written::No);
    vec![
        ("format", Format::WITH_KERNELS.map(Words::word).into()),
        ("numerics", numerics.map(|(word, _)| *word).collect()),
        words::<ScaleRule>(),
        words::<Ties>(),
        words::<Search>(),
        words::<NonFinite>(),
        words::<KeptAs>(),
        words::<Defect>(),
        ("written checkpoint format", written.map(|(word, _)| *word).collect()),
    ]
}

/// Returns the text in backticks, without quotation marks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).map(|word| word.trim_matches('"'))
}

/// Returns the words of the list or table that starts with these lines.
fn listed<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    let list = lines.skip_while(|line| line.is_empty()).take_while(|line| !line.is_empty());
    let first_column = |line: &'a str| line.strip_prefix('|').map(|row| row.split('|').next().unwrap_or(row));
    list.flat_map(|line| quoted(first_column(line).unwrap_or(line))).collect()
}

/// Returns the differences between the marked lists of a page and the code.
fn faults(page: &str, text: &str, lists: &[List]) -> Vec<String> {
    let mut faults = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let Some(what) = line.strip_prefix(MARKER).and_then(|rest| rest.strip_suffix(" -->")) else {
            continue;
        };
        let found = listed(text.lines().skip(number + 1));
        match lists.iter().find(|(known, _)| *known == what) {
            Some((_, expected)) if *expected == found => {}
            Some((_, expected)) => faults.push(format!("{page}: {what}: {found:?}, expected {expected:?}")),
            None => faults.push(format!("{page}: {what} is no list of words")),
        }
    }
    faults
}

/// Returns the pages of a folder, with their names.
fn pages(folder: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let pages = paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let read = |path| std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    pages.map(|path| (path.display().to_string(), read(path))).collect()
}

#[test]
fn documents_have_the_words_of_the_code() {
    let folder = data_dir().join("docs");
    // Packed for another machine, the test has no documents and nothing to check.
    if !folder.exists() {
        return;
    }
    let (pages, lists) = (pages(&folder), lists());
    let quoted = pages.iter().flat_map(|(_, text)| text.lines().flat_map(quoted));
    let named: BTreeSet<&str> =
        quoted.flat_map(|code| code.split_whitespace()).map(|word| word.trim_matches('"')).collect();
    let mut faults: Vec<_> = pages.iter().flat_map(|(page, text)| faults(page, text, &lists)).collect();
    for (what, words) in &lists {
        let missing = words.iter().filter(|word| !named.contains(*word));
        faults.extend(missing.map(|word| format!("docs/: the {what} `{word}` is in no page")));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_list_that_is_not_the_codes_is_a_fault() {
    let lists = [("rule", BTreeSet::from(["ceil", "floor"]))];
    let table = "<!-- words: rule -->\n\n| `floor` | `0` |\n| `ceil` | 1 |\n\n`even`\n";
    assert!(faults("page", table, &lists).is_empty());
    let list = "<!-- words: rule -->\n`floor` or `\"even\"`\n";
    assert_eq!(
        faults("page", list, &lists),
        [r#"page: rule: {"even", "floor"}, expected {"ceil", "floor"}"#]
    );
    assert_eq!(faults("page", "<!-- words: x -->", &lists), ["page: x is no list of words"]);
}
