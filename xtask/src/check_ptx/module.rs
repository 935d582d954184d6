//! Splits PTX text into statements. It parses only as much as the checks need.

use anyhow::{Result, bail};

/// One statement: an instruction or a directive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Statement {
    /// The line that it starts on, from 1.
    pub(super) line: usize,
    /// Its text, without labels and comments. Blanks are single spaces.
    pub(super) text: String,
}

impl Statement {
    /// Returns the instruction and its modifiers: `["ld", "global", "v4", "b32"]`.
    ///
    /// A directive gives an empty first text.
    pub(super) fn opcode(&self) -> Vec<&str> {
        let guarded = self.text.starts_with('@');
        let word = self.text.split(' ').nth(usize::from(guarded)).unwrap_or_default();
        word.split('.').collect()
    }
}

/// A kernel.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) line: usize,
    pub(super) body: Vec<Statement>,
}

/// A PTX module.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// Everything outside functions, and the signatures of functions that are not kernels.
    pub(super) directives: Vec<Statement>,
    pub(super) entries: Vec<Entry>,
}

impl Module {
    /// Splits a module into its statements.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut parser = Parser::default();
        for (number, line) in text.lines().enumerate() {
            parser.line(number + 1, line.split("//").next().unwrap_or_default());
        }
        if parser.body.is_some() || !parser.text.trim().is_empty() {
            bail!("the module ends in the middle of `{}`", parser.text.trim());
        }
        Ok(parser.module)
    }
}

#[derive(Default)]
struct Parser {
    module: Module,
    /// The current statement, and the line that it started on.
    text: String,
    line: usize,
    /// The current function, and the number of scopes open in it.
    body: Option<Entry>,
    scopes: usize,
    /// Braces open in the current statement: vector operands and initializers.
    braces: usize,
}

impl Parser {
    fn line(&mut self, number: usize, line: &str) {
        for c in line.chars() {
            if self.text.trim().is_empty() {
                self.line = number;
            }
            self.character(c);
        }
        // Three module-level directives end at the end of their line instead of at a semicolon.
        let unterminated = [".version", ".target", ".address_size"];
        if self.body.is_none() && unterminated.iter().any(|name| self.text.trim().starts_with(name)) {
            self.end_statement();
        } else if self.text.trim_end().ends_with(':') {
            self.text.clear();
        } else {
            self.text.push(' ');
        }
    }

    fn character(&mut self, c: char) {
        let blank = self.text.trim().is_empty();
        match c {
            ';' if self.braces == 0 => self.end_statement(),
            '{' if self.body.is_some() && blank => self.scopes += 1,
            '{' if self.body.is_none() && self.is_function() => self.begin_function(),
            '}' if self.braces == 0 => self.end_scope(),
            _ => {
                self.braces = match c {
                    '{' => self.braces + 1,
                    '}' => self.braces - 1,
                    _ => self.braces,
                };
                self.text.push(c);
            }
        }
    }

    fn is_function(&self) -> bool {
        self.text.contains(".entry") || self.text.contains(".func")
    }

    fn begin_function(&mut self) {
        let name = self.text.split_once(".entry ").map_or("", |(_, rest)| rest.trim_start());
        let name = name.split(['(', ' ']).next().unwrap_or_default().to_owned();
        self.body = Some(Entry { name, line: self.line, body: Vec::new() });
        self.scopes = 1;
        if self.text.contains(".func") {
            self.push_directive();
        }
        self.text.clear();
    }

    fn end_scope(&mut self) {
        self.scopes = self.scopes.saturating_sub(1);
        if self.scopes == 0 {
            // A function that is not a kernel has no name here. Its signature is among the
            // directives.
            self.module.entries.extend(self.body.take().filter(|entry| !entry.name.is_empty()));
        }
    }

    fn end_statement(&mut self) {
        match &mut self.body {
            Some(entry) => entry.body.push(Statement { line: self.line, text: without_labels(&self.text) }),
            None => self.push_directive(),
        }
        self.text.clear();
    }

    fn push_directive(&mut self) {
        self.module.directives.push(Statement { line: self.line, text: single_spaced(&self.text) });
    }
}

fn without_labels(text: &str) -> String {
    let words = text.split_whitespace().skip_while(|word| word.ends_with(':'));
    words.collect::<Vec<_>>().join(" ")
}

fn single_spaced(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_found_on_their_lines() {
        let text = "// head\n.version 8.0\n.target sm_90\n.address_size 64\n.global .align 4 .b8 t[2] = {1, 2};\n\
            .visible .entry k(\n .param .u64 k_0\n)\n.maxntid 128\n{\n .reg .b32 %r<4>;\n$L_1:\n\
            @!%p1 ld.global.v2.b32 \t{%r1, %r2}, [%rd1];\n { .reg .b8 t; cvt.u16.u8 %rs1, t; }\n ret;\n}\n";
        let module = Module::parse(text).unwrap();
        let directives: Vec<_> = module.directives.iter().map(|s| (s.line, s.text.as_str())).collect();
        let data = ".global .align 4 .b8 t[2] = {1, 2}";
        assert_eq!(
            directives,
            [(2, ".version 8.0"), (3, ".target sm_90"), (4, ".address_size 64"), (5, data)]
        );
        let [entry] = &module.entries[..] else { panic!("one entry") };
        assert_eq!((entry.name.as_str(), entry.line), ("k", 6));
        let body: Vec<_> = entry.body.iter().map(|s| (s.line, s.text.as_str())).collect();
        let load = "@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1]";
        let expected = [
            (11, ".reg .b32 %r<4>"),
            (13, load),
            (14, ".reg .b8 t"),
            (14, "cvt.u16.u8 %rs1, t"),
            (15, "ret"),
        ];
        assert_eq!(body, expected);
        assert_eq!(entry.body[1].opcode(), ["ld", "global", "v2", "b32"]);
    }

    #[test]
    fn a_device_function_is_a_directive() {
        let module = Module::parse(".func (.param .b32 r) helper(.param .b32 a)\n{\n ret;\n}\n").unwrap();
        assert!(module.entries.is_empty());
        assert_eq!(module.directives[0].text, ".func (.param .b32 r) helper(.param .b32 a)");
    }

    #[test]
    fn a_truncated_file_is_refused() {
        assert!(Module::parse(".visible .entry k()\n{\n ret;\n").is_err());
        assert!(Module::parse(".visible .entry k(").is_err());
    }
}
