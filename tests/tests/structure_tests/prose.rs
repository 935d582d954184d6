//! Extracts prose from sources and documents, and finds the phrases that it should avoid.

/// The kinds of files that contain prose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Rust,
    Python,
    Markdown,
}

impl Kind {
    /// Returns the kind of a file by its extension, or `None` if the file has no prose.
    pub(super) fn of(extension: &str) -> Option<Self> {
        match extension {
            "rs" => Some(Self::Rust),
            "py" | "pyi" => Some(Self::Python),
            "md" => Some(Self::Markdown),
            _ => None,
        }
    }
}

/// Reads a file line by line. Some lines depend on earlier ones.
pub(super) struct Reader {
    kind: Kind,
    /// The current line is in a code block of a document, or in a Python docstring.
    inside: bool,
}

impl Reader {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, inside: false }
    }

    /// Returns the prose of the next line, without text in backticks. It may be empty.
    pub(super) fn prose(&mut self, line: &str) -> String {
        match self.kind {
            Kind::Rust => without_code(rust_comment(line)),
            Kind::Markdown if line.trim_start().starts_with("```") => {
                self.inside = !self.inside;
                String::new()
            }
            Kind::Markdown if self.inside => String::new(),
            Kind::Markdown => without_code(line),
            Kind::Python => self.python(line).to_owned(),
        }
    }

    /// Returns a comment's text, or a whole line of a docstring.
    fn python<'a>(&mut self, line: &'a str) -> &'a str {
        let quotes = line.matches("\"\"\"").count();
        let docstring = self.inside || quotes > 0;
        self.inside ^= quotes % 2 == 1;
        if docstring {
            return line;
        }
        let Some(comment) = line.trim_start().strip_prefix('#') else { return "" };
        let comment = comment.strip_prefix(':').unwrap_or(comment);
        comment.strip_prefix(char::is_whitespace).unwrap_or("")
    }
}

/// Returns the text of a line's comment. The slashes of a URL do not start a comment.
fn rust_comment(line: &str) -> &str {
    let Some(start) = line.find("//") else { return "" };
    let text = &line[start + 2..];
    let text = text.strip_prefix(['/', '!']).unwrap_or(text);
    let text = text.strip_prefix(char::is_whitespace).unwrap_or(text);
    if line[..line.len() - text.len()].contains("://") { "" } else { text }
}

/// Removes the text between pairs of backticks.
fn without_code(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    // An even number of parts means that the last backtick has no partner.
    let unpaired = if parts.len().is_multiple_of(2) { parts.len() - 1 } else { parts.len() };
    let mut prose: String = parts[..unpaired].iter().step_by(2).copied().collect();
    if unpaired < parts.len() {
        prose.push('`');
        prose.push_str(parts[unpaired]);
    }
    prose
}

/// Returns the number of words in a text.
pub(super) fn words(text: &str) -> usize {
    let letters = |c: char| c.is_ascii_alphabetic() || c == '\'';
    text.split(|c| !letters(c)).filter(|word| !word.is_empty()).count()
}

/// Phrases to avoid, in groups. `|` separates the alternatives of a word.
///
/// Name the subject instead of the first two groups, the parameter instead of the third, and the
/// agent instead of the fifth. Write "after", "next to", "compared with", "only" and "report".
const PHRASES: [&[&str]; 8] = [
    &["What|what is|are|was|were|has|have|had|it|they|others|follows|nobody|no|cannot|a|the"],
    &["Those|those|That|that of", "of|by|from|in|under|with|to|behind which", "Those|those who|that"],
    &["So|so|As|as many"],
    &["behind|beside"],
    &["Nobody|nobody|Somebody|somebody|Anybody|anybody|Whoever|whoever"],
    &["alone"],
    &["is|are|was|were told|said of|so|where|by", "without a word", "says so"],
    &["; none", "none if|where"],
];

/// Returns the phrases in a text that it should avoid.
pub(super) fn phrases(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for group in PHRASES {
        let mut at = 0;
        while at < text.len() {
            let end = group.iter().find_map(|phrase| phrase_end(text, at, phrase));
            match end.filter(|&end| !is_fine(text, at, end)) {
                Some(end) => {
                    found.push(&text[at..end]);
                    at = end;
                }
                None => at += text[at..].chars().next().map_or(1, char::len_utf8),
            }
        }
    }
    found
}

/// Returns the end of a phrase that starts at `at`, if it does and both ends are ends of words.
fn phrase_end(text: &str, at: usize, phrase: &str) -> Option<usize> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let starts_word = text[at..].starts_with(is_word);
    if starts_word && text[..at].ends_with(is_word) {
        return None;
    }
    let mut end = at;
    for (i, word) in phrase.split(' ').enumerate() {
        if i > 0 {
            end += text[end..].strip_prefix(' ').map(|_| 1)?;
        }
        let rest = &text[end..];
        let ends = |choice: &&str| {
            let after = rest.strip_prefix(choice);
            after.is_some_and(|after| !after.starts_with(is_word) || *choice == ";")
        };
        end += word.split('|').find(ends)?.len();
    }
    Some(end)
}

/// Returns whether a phrase is fine where it is: in a question, or in a comparison of speeds.
fn is_fine(text: &str, at: usize, end: usize) -> bool {
    const COMPARISONS: [&str; 6] = ["fall ", "falls ", "fell ", "never ", "% ", "times "];
    let question = || text[end..].split('.').next().is_some_and(|rest| rest.contains('?'));
    match &text[at..end] {
        "behind" | "beside" => COMPARISONS.iter().any(|before| text[..at].ends_with(before)),
        phrase => (phrase.starts_with("What ") || phrase.starts_with("what ")) && question(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the prose of the lines of a file.
    fn prose(kind: Kind, text: &str) -> Vec<String> {
        let mut reader = Reader::new(kind);
        text.lines().map(|line| reader.prose(line)).collect()
    }

    #[test]
    fn comments_of_rust_are_prose_and_code_is_not() {
        let slashes = "/".repeat(2);
        let text = format!("let a = 1; {slashes} Sets `a`.\n{slashes}/ Docs.\nlet url = \"s:{slashes}x\";");
        assert_eq!(prose(Kind::Rust, &text), ["Sets .", "Docs.", ""]);
    }

    #[test]
    fn code_blocks_of_documents_are_not_prose() {
        let text = "One `two` three.\n```rust\ncode\n```\nAn open ` tick.";
        assert_eq!(prose(Kind::Markdown, text), ["One  three.", "", "", "", "An open ` tick."]);
    }

    #[test]
    fn docstrings_and_comments_of_python_are_prose() {
        let quotes = "\"".repeat(3);
        let text = format!("x = 1\n{quotes}Doc\nmore{quotes}\n    # Comment\n#:  Two\n#none");
        let expected = ["", "\"\"\"Doc", "more\"\"\"", "Comment", " Two", ""];
        assert_eq!(prose(Kind::Python, &text), expected);
    }

    #[test]
    fn phrases_are_found_at_ends_of_words_only() {
        let text = "What is rare; those of which nobody knows are told of, so many, beside it; none";
        let found = phrases(text);
        assert_eq!(found, ["What is", "those of", "so many", "beside", "nobody", "are told of", "; none"]);
        assert!(phrases("whatever island; noneworthy, nobodys, behind_it, as manyfold").is_empty());
    }

    #[test]
    fn questions_and_comparisons_are_fine() {
        assert!(phrases("What is a block? It is 3 % behind, and never beside.").is_empty());
        assert_eq!(phrases("See what is left. Why?"), ["what is"]);
    }

    #[test]
    fn words_are_runs_of_letters() {
        assert_eq!(words("It's 16 blocks of E4M3, isn't it?"), 7);
    }
}
