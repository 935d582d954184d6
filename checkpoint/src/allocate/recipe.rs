//! An allocation as a recipe file.

use std::fmt::Write;

use microscale::{Format, Search, Words};

use crate::allocate::allocation::{Allocation, Share};
use crate::allocate::choice::Choice;
use crate::allocate::patterns::patterns;

/// Characters of a line of a list.
const WIDTH: usize = 100;

impl Allocation {
    /// Returns a recipe that gives each tensor its format.
    ///
    /// A comment at the top has size, loss and bound, and that the file was `made_by` a command.
    /// [`Recipes::parse`](crate::Recipes::parse) reads the recipe.
    pub fn recipe(&self, made_by: &str) -> String {
        let mut text = self.comment(made_by);
        let shares = self.shares();
        // The format of most weights needs no rule.
        let first = self.choices.iter().find_map(|choice| choice.format()).unwrap_or_default();
        let quantized = shares.iter().filter(|share| share.choice.format().is_some());
        let most = quantized.max_by_key(|share| share.elements).and_then(|share| share.choice.format());
        let most = most.unwrap_or(first);
        text += "\n";
        settings(&mut text, most, self.search);
        key(&mut text, "to", self.checkpoint_format.word());
        let [include, exclude] = self.selection.patterns();
        list(&mut text, "include", &include);
        list(&mut text, "exclude", &exclude);
        for Share { choice, .. } in shares.iter().filter(|share| share.choice != Choice::Format(most)) {
            let is_wanted = |format: Option<Format>| format == choice.format();
            let of = |wanted: bool| {
                let tensors =
                    self.tensors.iter().filter(|tensor| is_wanted(self.format_of(tensor)) == wanted);
                tensors.map(|tensor| tensor.name.as_str()).collect::<Vec<_>>()
            };
            text += "\n[[tensors]]\n";
            list(&mut text, "match", &patterns(&of(true), &of(false)));
            match choice.format() {
                Some(format) => settings(&mut text, format, self.search),
                None => text += "keep = true\n",
            }
        }
        text
    }

    /// The comment at the top.
    fn comment(&self, made_by: &str) -> String {
        let (size, loss) = (self.chosen.bytes, self.relative(self.chosen.loss));
        let within = match self.is_optimal() {
            true => "no plan within the budget has a smaller loss".into(),
            false => format!("no plan within the budget has a loss below {:.6e}", self.relative(self.bound)),
        };
        let weighted = match &self.importance {
            None => "mean relative squared error of a weight".into(),
            Some(path) => format!("squared error weighted by {}, relative", path.display()),
        };
        let lines = [
            format!("Made by: {made_by}"),
            format!(
                "Budget: {} bytes for {} weights ({:.4} bits per weight)",
                self.budget,
                self.elements(),
                self.bits(self.budget)
            ),
            format!(
                "Size: {size} bytes ({:.4} bits per weight), and {} bytes of other tensors",
                self.bits(size),
                self.others
            ),
            format!("Loss: {loss:.6e} ({weighted})"),
            format!("Bound: {:.6e} by linear relaxation; {within}", self.relative(self.relaxed)),
        ];
        lines.iter().fold(String::new(), |text, line| {
            // A line of a comment has no control characters.
            let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            text + "# " + &line + "\n"
        })
    }
}

/// Writes format and search.
fn settings(text: &mut String, format: Format, search: Search) {
    key(text, "format", format.word());
    let search = if format.is_searched() { search } else { Search::None };
    key(text, "search", search.word());
}

/// Writes a key with a string.
fn key(text: &mut String, name: &str, value: &str) {
    // Writing to a string never fails.
    let _ = writeln!(text, "{name} = {}", quoted(value));
}

/// Writes a key with a list of strings, if there are any.
fn list(text: &mut String, name: &str, values: &[impl AsRef<str>]) {
    let values: Vec<_> = values.iter().map(|value| quoted(value.as_ref())).collect();
    let line = format!("{name} = [{}]", values.join(", "));
    match &values[..] {
        [] => {}
        [value] => *text += &format!("{name} = {value}\n"),
        _ if line.chars().count() <= WIDTH => *text += &(line + "\n"),
        _ => *text += &format!("{name} = [\n    {},\n]\n", values.join(",\n    ")),
    }
}

/// A string of TOML.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use toml::de::DeTable;

    use super::*;

    #[test]
    fn lists_are_toml() {
        let mut text = String::new();
        let odd = "a\"b\\c\u{7}d\né";
        list(&mut text, "none", &[""; 0]);
        list(&mut text, "one", &[odd]);
        list(&mut text, "few", &["a", "b"]);
        let long = "x".repeat(60);
        list(&mut text, "many", &[&long, &long]);
        let document = DeTable::parse(&text).unwrap_or_else(|why| panic!("{why}: {text}"));
        let table = document.get_ref();
        let strings = |name: &str| -> Vec<&str> {
            let value = table.get(name).unwrap().get_ref();
            let all =
                value.as_array().map(|all| all.iter().filter_map(|value| value.get_ref().as_str()).collect());
            all.unwrap_or_else(|| value.as_str().into_iter().collect())
        };
        assert_eq!(table.len(), 3);
        assert_eq!((strings("one"), strings("few")), (vec![odd], vec!["a", "b"]));
        assert_eq!(strings("many"), [&long, &long]);
    }
}
