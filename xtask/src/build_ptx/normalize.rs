//! Turns LLVM's PTX into PTX fit to be committed: nothing in it depends on where it was built, and a change to one kernel
//! changes that kernel's lines only.

use std::collections::{BTreeMap, BTreeSet};

/// Memory that a launch gives to a thread block: one place, which LLVM gives a name for each kernel that asks for it.
const DYNAMIC: &str = ".extern .shared ";

/// A module taken apart.
pub(super) struct Parts {
    /// What every file starts with: version, target, address size.
    head: Vec<String>,
    /// Declarations of data, in order.
    data: Vec<String>,
    /// Kernels by name, sorted.
    entries: BTreeMap<String, Vec<String>>,
}

impl Parts {
    /// Drops comments, blank lines and debug lines, numbers labels within their function, and shortens what is long.
    pub(super) fn of(raw: &str) -> Self {
        let mut parts = Self { head: Vec::new(), data: Vec::new(), entries: BTreeMap::new() };
        let mut current: Option<String> = None;
        for raw in raw.lines() {
            let line = clean(raw);
            if line.is_empty() || is_debug(&line) {
                continue;
            }
            current = entry_name(&line).or(current);
            // Not one of a scope within the kernel, which is indented.
            let ends = raw.starts_with('}');
            match &current {
                Some(name) => {
                    let line = line.replace(&format!("{name}_param_"), "p");
                    parts.entries.entry(name.clone()).or_default().push(line);
                }
                None if declared(&line).is_some() => parts.data.push(line),
                None => parts.head.push(line),
            }
            if ends {
                current = None;
            }
        }
        parts
    }

    /// The lines that every file starts with.
    pub(super) fn head(&self) -> String {
        self.head.iter().map(|line| format!("{line}\n")).collect()
    }

    /// The names of the kernels.
    pub(super) fn kernels(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// A module of some kernels, sorted, with the data that they use: private data named by position, dynamic shared memory once
    /// for all.
    pub(super) fn module(&self, has: impl Fn(&str) -> bool) -> String {
        let entries: Vec<_> =
            self.entries.iter().filter(|(name, _)| has(name)).map(|(_, lines)| lines).collect();
        let used: BTreeSet<&str> =
            entries.iter().copied().flatten().flat_map(|line| identifiers(line)).collect();
        let mut names = BTreeMap::new();
        let mut data = Vec::new();
        // Of several declarations of dynamic shared memory, the one with the largest alignment holds for all.
        let mut shared: Option<(u32, String)> = None;
        for line in &self.data {
            let Some(name) = declared(line).filter(|name| used.contains(name)) else { continue };
            let position = data.len();
            let dynamic = line.starts_with(DYNAMIC);
            names.insert(name, if dynamic { "shared".to_owned() } else { format!("data_{position}") });
            let line = rename(line, &names);
            if !dynamic {
                data.push(line);
            } else if shared.as_ref().is_none_or(|(largest, _)| alignment(&line) > *largest) {
                shared = Some((alignment(&line), line));
            }
        }
        data.extend(shared.map(|(_, line)| line));
        let mut text = String::new();
        for line in self.head.iter().chain(&data) {
            text += line;
            text.push('\n');
        }
        for entry in entries {
            text.push('\n');
            for line in entry {
                text += &rename(line, &names);
                text.push('\n');
            }
        }
        text
    }
}

/// A line without its comment, its indentation, trailing blanks, tabs after blanks and blanks after commas, and without the function's
/// number in its labels: `$L__BB7_2` → `$L_2`. Labels are local to a function in PTX, and the number would change whenever a kernel is added.
fn clean(line: &str) -> String {
    let line = line.split("//").next().unwrap_or_default().trim().replace(" \t", " ").replace(", ", ",");
    let mut pieces = line.split("$L__BB");
    let mut cleaned = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        cleaned.push_str("$L");
        cleaned.push_str(piece.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    cleaned
}

fn is_debug(line: &str) -> bool {
    [".loc", ".file"].iter().any(|directive| line.split_whitespace().next() == Some(directive))
}

fn entry_name(line: &str) -> Option<String> {
    let (_, rest) = line.split_once(".entry ")?;
    Some(rest.split(['(', ' ']).next().unwrap_or(rest).to_owned())
}

/// The name of the data that a line outside of kernels declares. Names hold hashes of paths and compilers.
fn declared(line: &str) -> Option<&str> {
    let declares = [".global ", ".const ", ".shared ", DYNAMIC].iter().any(|space| line.starts_with(space));
    line.split(['=', '[', ';']).next().filter(|_| declares)?.split_whitespace().last()
}

/// The alignment that a declaration asks for, in bytes.
fn alignment(line: &str) -> u32 {
    let behind = line.split_once(".align ").map_or("", |(_, behind)| behind);
    behind.split_whitespace().next().and_then(|bytes| bytes.parse().ok()).unwrap_or(1)
}

/// The identifiers of a line.
fn identifiers(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c| !is_identifier(c)).filter(|word| !word.is_empty())
}

/// Replaces whole identifiers.
fn rename(line: &str, names: &BTreeMap<&str, String>) -> String {
    let mut renamed = String::with_capacity(line.len());
    let mut rest = line;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !is_identifier(c)).unwrap_or(rest.len());
        let (word, tail) = rest.split_at(end);
        renamed.push_str(names.get(word).map_or(word, String::as_str));
        let next = tail.find(is_identifier).unwrap_or(tail.len());
        renamed.push_str(&tail[..next]);
        rest = &tail[next..];
    }
    renamed
}

fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = "//\n// Generated by LLVM NVPTX Back-End\n//\n\n.version 8.0\n.target sm_90\n.address_size 64\n\n\
        \t// .globl\tb // -- Begin function b\n\
        .global .align 4 .b8 _RNvCs9kE_5TABLE[4] = {1, 2, 3, 4};\n\
        .visible .entry b(\n\t.param .u64 b_param_0\n)   // @b\n{\n\t.file 1 \"/home/me/b.rs\"\n\t.loc 1 2 3\n\
        $L__BB11_2:\n\tmov.b64 %rd1, _RNvCs9kE_5TABLE; // comment\n\t@%p1 bra \t$L__BB11_2;\n// %bb.1:\n\tret;\n}\n\
        .visible .entry a()\n{\n\tret;\n}\n";

    #[test]
    fn nothing_of_the_place_remains() {
        let expected = ".version 8.0\n.target sm_90\n.address_size 64\n.global .align 4 .b8 data_0[4] = {1,2,3,4};\n\n\
            .visible .entry a()\n{\nret;\n}\n\n\
            .visible .entry b(\n.param .u64 p0\n)\n{\n\
            $L_2:\nmov.b64 %rd1,data_0;\n@%p1 bra $L_2;\nret;\n}\n";
        assert_eq!(Parts::of(RAW).module(|_| true), expected);
    }

    #[test]
    fn a_module_has_its_kernels_and_their_data() {
        let parts = Parts::of(RAW);
        assert_eq!(parts.kernels().collect::<Vec<_>>(), ["a", "b"]);
        let expected = ".version 8.0\n.target sm_90\n.address_size 64\n\n.visible .entry a()\n{\nret;\n}\n";
        assert_eq!(parts.module(|name| name == "a"), expected);
        assert!(parts.module(|name| name == "b").contains("data_0[4]"));
    }

    #[test]
    fn shared_memory_is_declared_once() {
        let raw = ".extern .shared .align 4 .b8 anon_1[];\n.extern .shared .align 16 .b8 anon_2[];\n\
            .global .align 4 .b8 table[4] = {1, 2, 3, 4};\n\
            .visible .entry a()\n{\n\tmov.b64 %rd1, anon_2;\n\tmov.b64 %rd3, anon_1;\n\tmov.b64 %rd2, table;\n}\n";
        let expected = ".global .align 4 .b8 data_0[4] = {1,2,3,4};\n.extern .shared .align 16 .b8 shared[];\n\n\
            .visible .entry a()\n{\nmov.b64 %rd1,shared;\nmov.b64 %rd3,shared;\nmov.b64 %rd2,data_0;\n}\n";
        assert_eq!(Parts::of(raw).module(|_| true), expected);
    }

    #[test]
    fn only_whole_names_are_replaced() {
        let names = BTreeMap::from([("t", "data_0".to_owned())]);
        assert_eq!(rename("ld.global.b32 %r1, [t+4]; // st", &names), "ld.global.b32 %r1, [data_0+4]; // st");
        assert_eq!(rename("%t t_1 $t", &names), "%t t_1 $t");
    }
}
