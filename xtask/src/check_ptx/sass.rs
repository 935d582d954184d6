//! Parses machine code from the output of `nvdisasm -c`: instructions, accesses and jumps.

use std::collections::BTreeMap;

/// One instruction.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    /// True if only some threads may execute the instruction.
    pub(super) predicated: bool,
    /// For example `["LDG", "E", "128"]`.
    pub(super) opcode: Vec<String>,
    /// The operands: the text after the opcode, up to a label.
    pub(super) operands: String,
    /// The label among the operands, if any.
    pub(super) label: Option<String>,
}

/// The machine code of one kernel.
#[derive(Debug, Default)]
pub(super) struct Code {
    pub(super) instructions: Vec<Instruction>,
    /// For each label, the index of the instruction after it.
    pub(super) labels: BTreeMap<String, usize>,
}

impl Instruction {
    fn parse(text: &str) -> Self {
        let text = text.trim().trim_end_matches(';').trim();
        let (predicate, text) = match text.strip_prefix('@') {
            Some(rest) => rest.split_once(' ').unwrap_or((rest, "")),
            None => ("PT", text),
        };
        let (opcode, operands) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
        let (operands, label) = match operands.split_once("`(") {
            Some((before, label)) => (before, label.split(')').next().map(str::to_owned)),
            None => (operands, None),
        };
        Self {
            predicated: predicate != "PT",
            opcode: opcode.split('.').map(str::to_owned).collect(),
            operands: operands.trim_matches([' ', ',']).to_owned(),
            label,
        }
    }

    /// Returns the opcode without modifiers, for example `LDG`.
    pub(super) fn name(&self) -> &str {
        &self.opcode[0]
    }

    /// Returns whether the opcode has a modifier.
    pub(super) fn has(&self, modifier: &str) -> bool {
        self.opcode[1..].iter().any(|part| part == modifier)
    }

    /// Returns the kind of a global memory access, `LDG` or `STG`, and the bits that one thread
    /// moves.
    pub(super) fn access(&self) -> Option<(&'static str, u32)> {
        let kind = match self.name() {
            "LDG" | "LDGSTS" => "LDG",
            "STG" => "STG",
            _ => return None,
        };
        let bits = |part: &String| match part.as_str() {
            "U8" | "S8" => Some(8),
            "U16" | "S16" => Some(16),
            "64" => Some(64),
            "128" => Some(128),
            "256" => Some(256),
            _ => None,
        };
        Some((kind, self.opcode.iter().find_map(bits).unwrap_or(32)))
    }
}

impl Code {
    /// Returns the number of instructions without the padding and the endless jump before it.
    pub(super) fn len(&self) -> usize {
        let padding = |i: &usize| {
            let instruction = &self.instructions[*i];
            instruction.name() == "NOP" || self.target(*i) == Some(*i)
        };
        self.instructions.len() - (0..self.instructions.len()).filter(padding).count()
    }

    /// Returns the index of the instruction that a jump names.
    pub(super) fn target(&self, instruction: usize) -> Option<usize> {
        let label = self.instructions[instruction].label.as_ref()?;
        self.labels.get(label).copied()
    }
}

/// Parses the code of every kernel.
pub(super) fn parse(listing: &str) -> BTreeMap<String, Code> {
    let mut kernels: BTreeMap<String, Code> = BTreeMap::new();
    let mut current: Option<&mut Code> = None;
    for line in listing.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix(".text.").and_then(|rest| rest.strip_suffix(':')) {
            current = Some(kernels.entry(name.to_owned()).or_default());
        } else if line.starts_with("//----") || line.starts_with(".section") {
            current = None;
        } else if let Some(code) = &mut current {
            if let Some((_, text)) = line.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) {
                code.instructions.push(Instruction::parse(text));
            } else if let Some(label) = line.strip_suffix(':') {
                code.labels.insert(label.to_owned(), code.instructions.len());
            }
        }
    }
    kernels
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Parses the lines of one kernel, `k`.
    pub(in super::super) fn listing(lines: &str) -> Code {
        let body = lines.split('\n').map(str::trim).map(|line| match line.ends_with(':') {
            true => format!("{line}\n"),
            false => format!("        /*0000*/                   {line} ;\n"),
        });
        let text =
            format!("//------ .text.k ----\n\t.section\t.text.k\nk:\n.text.k:\n{}", body.collect::<String>());
        parse(&text).remove("k").unwrap()
    }

    #[test]
    fn a_listing_is_parsed() {
        let code = listing(
            "@!P0 BRA `(.L_x_1)\nBRA P1, `(.L_x_1)\nLDG.E.128.CONSTANT R4, desc[UR4][R2.64+0x10]\n.L_x_1:\nEXIT\n\
                            .L_x_2:\nBRA `(.L_x_2)\nNOP",
        );
        assert_eq!(code.instructions.len(), 6);
        assert_eq!(code.len(), 4);
        assert_eq!(code.labels[".L_x_1"], 3);
        assert!(code.instructions[0].predicated);
        assert_eq!(code.instructions[1].operands, "P1");
        assert_eq!(code.target(1), Some(3));
        assert!(code.instructions[2].has("128"));
    }

    #[test]
    fn widths_are_parsed() {
        let bits = |text| Instruction::parse(text).access().map(|(_, bits)| bits);
        assert_eq!(bits("LDG.E R3, desc[UR4][R2.64]"), Some(32));
        assert_eq!(bits("LDG.E.LTC256B.128.CONSTANT R4, desc[UR4][R2.64]"), Some(128));
        assert_eq!(bits("LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64]"), Some(256));
        assert_eq!(bits("@P0 STG.E.U8 desc[UR4][R4.64], R7"), Some(8));
        assert_eq!(bits("LDS.128 R4, [R2]"), None);
    }
}
