//! `check-docs`: checks the links of all Markdown files, and that the book lists every page.

use crate::layout;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Maximum length of README.md in lines. Longer text belongs in docs/.
const README_LINES: usize = 150;

/// Folder in docs/ whose pages are not part of the book.
const NOTEBOOK: &str = "lab";

/// Checks every Markdown file of the repository.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        bail!("usage: cargo xtask check-docs");
    }
    let root = layout::root()?;
    let mut pages = HashMap::new();
    read_pages(&root, Path::new(""), &mut pages)?;
    let mut faults = faults(&pages, &|path| root.join(path).exists());
    faults.sort();
    if !faults.is_empty() {
        bail!("{} faults in the documents:\n{}", faults.len(), faults.join("\n"));
    }
    println!("{} Markdown files: all links are valid", pages.len());
    Ok(())
}

/// Reads the Markdown files below a folder, keyed by path from the repository's root.
///
/// Build outputs and hidden folders are skipped.
fn read_pages(root: &Path, folder: &Path, pages: &mut HashMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), folder.join(entry.file_name()));
        let skipped = name == "target" || name.to_string_lossy().starts_with('.');
        if !skipped && entry.file_type()?.is_dir() {
            read_pages(root, &path, pages)?;
        } else if !skipped && path.extension().is_some_and(|extension| extension == "md") {
            let text = fs::read_to_string(root.join(&path))
                .with_context(|| format!("cannot read {}", path.display()))?;
            pages.insert(path, text);
        }
    }
    Ok(())
}

/// Returns the faults of all pages, which are keyed by path from the repository's root.
fn faults(pages: &HashMap<PathBuf, String>, exists: &dyn Fn(&Path) -> bool) -> Vec<String> {
    let mut faults = Vec::new();
    for (page, text) in pages {
        for (line, link) in links(text) {
            if let Some(why) = fault(pages, page, &link, exists) {
                faults.push(format!("{}:{line}: {link}: {why}", page.display()));
            }
        }
    }
    let summary = pages.get(Path::new("docs/SUMMARY.md")).map_or("", String::as_str);
    let listed: Vec<String> = links(summary).map(|(_, link)| link).collect();
    for page in pages.keys().filter_map(|page| page.strip_prefix("docs").ok()) {
        let name = page.to_string_lossy().replace('\\', "/");
        let outside = name == "SUMMARY.md" || page.starts_with(NOTEBOOK);
        if !outside && !listed.contains(&name) {
            faults.push(format!("docs/SUMMARY.md: {name} is not listed"));
        }
    }
    let lines = pages.get(Path::new("README.md")).map_or(0, |text| text.lines().count());
    if lines > README_LINES {
        faults.push(format!(
            "README.md: {lines} lines, and {README_LINES} are allowed: move a chapter to docs/"
        ));
    }
    faults
}

/// Returns the fault of a link on a page, if any.
fn fault(
    pages: &HashMap<PathBuf, String>,
    page: &Path,
    link: &str,
    exists: &dyn Fn(&Path) -> bool,
) -> Option<&'static str> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target = if file.is_empty() { page.to_path_buf() } else { joined(page.parent()?, file)? };
    if !exists(&target) {
        return Some("there is no such file");
    }
    let text = pages.get(&target)?;
    let missing = anchor.is_some_and(|anchor| !anchors(text).any(|heading| heading == anchor));
    missing.then_some("there is no such heading")
}

/// Joins a folder and a relative path without `..`. Returns `None` outside the repository.
fn joined(folder: &Path, file: &str) -> Option<PathBuf> {
    let mut path = folder.to_path_buf();
    for component in Path::new(file).components() {
        match component {
            Component::ParentDir => path.pop().then_some(())?,
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    Some(path)
}

/// Returns the lines outside code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((number + 1, line))
    })
}

/// Returns the link targets, with their line numbers.
fn links(text: &str) -> impl Iterator<Item = (usize, String)> {
    prose(text).flat_map(|(number, line)| {
        let mut rest = without_code(line);
        let mut found = Vec::new();
        while let Some(start) = rest.find("](") {
            rest = rest.split_off(start + 2);
            let end = rest.find(')').unwrap_or(rest.len());
            found.push((number, rest[..end].to_owned()));
        }
        found
    })
}

/// Returns the line without text in backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Returns the anchors that GitHub and mdBook give to headings.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    prose(text).filter(|(_, line)| line.starts_with('#')).map(|(_, line)| {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
        kept.map(|char| if char == ' ' { '-' } else { char }).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(readme: &str) -> Vec<String> {
        let pages = [
            ("README.md", readme),
            ("docs/SUMMARY.md", "[Numbers](numbers.md)"),
            ("docs/numbers.md", "# Numbers\n\n## NaN, and `log2`\n\n[back](../README.md)\n"),
        ];
        let pages: HashMap<_, _> = pages.map(|(name, text)| (PathBuf::from(name), text.to_owned())).into();
        faults(&pages, &|path| pages.contains_key(path) || path == Path::new("Cargo.toml"))
    }

    #[test]
    fn valid_links_pass() {
        assert!(
            found("[a](docs/numbers.md#nan-and-log2) [b](Cargo.toml) [c](https://example.org)").is_empty()
        );
        assert!(found("`[a](nothing.md)`\n```text\n[b](nothing.md)\n```").is_empty());
    }

    #[test]
    fn broken_links_are_found() {
        assert_eq!(found("\n[a](nothing.md)"), ["README.md:2: nothing.md: there is no such file"]);
        assert_eq!(
            found("[a](docs/numbers.md#nan)"),
            ["README.md:1: docs/numbers.md#nan: there is no such heading"]
        );
    }

    #[test]
    fn pages_outside_the_summary_are_found_except_in_the_notebook() {
        let page = |path: &str| (PathBuf::from(path), String::new());
        let pages = ["docs/SUMMARY.md", "docs/benchmarks/cpu.md", "docs/lab/2026-11-21.md"].map(page).into();
        assert_eq!(faults(&pages, &|_| true), ["docs/SUMMARY.md: benchmarks/cpu.md is not listed"]);
    }

    #[test]
    fn a_long_readme_is_refused() {
        assert_eq!(found(&"\n".repeat(README_LINES)), [""; 0]);
        assert_eq!(found(&"\n".repeat(README_LINES + 1)).len(), 1);
    }
}
