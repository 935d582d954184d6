//! The MXFP4 and MXFP8 files: one matrix each, in groups of rows.

use std::collections::BTreeSet;

use microscale::formats::mx::Arithmetic;
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{Format, Numerics, Scheme};

use super::{Input, Tensors};

/// A block: its row and its index in the row.
pub type Block = (usize, usize);

/// Rows for one purpose.
#[derive(Debug)]
pub struct Group {
    /// The purpose of the rows.
    pub name: String,
    /// The first row.
    pub first: usize,
    /// The last row.
    pub last: usize,
}

/// The output of one library for the input rows.
#[derive(Debug)]
pub struct Golden {
    /// The file's name without its ending.
    pub name: String,
    /// The library that made it.
    pub library: String,
    /// The scheme that the library follows, except in `slips`.
    pub scheme: Scheme,
    /// Rows.
    pub rows: usize,
    /// Elements per row.
    pub cols: usize,
    /// `[rows, cols]`.
    pub input: Input,
    /// `[rows, cols / 2]` with 4 bits, or `[rows, cols]` with 8 bits.
    pub codes: Vec<u8>,
    /// `[rows, cols / 32]`.
    pub scales: Vec<u8>,
    /// Finite blocks whose results deviate from the library's own rule.
    pub slips: BTreeSet<Block>,
    /// Blocks with a NaN or an infinity.
    pub non_finite: BTreeSet<Block>,
    /// The groups of rows.
    pub groups: Vec<Group>,
}

impl Golden {
    /// Reads a file, given its folder and its name without extension.
    ///
    /// # Panics
    /// Panics if the file is missing or differs from its README.
    pub fn read(folder: &str, name: &str) -> Self {
        let file = Tensors::read(folder, name);
        let list = |key: &str| -> BTreeSet<Block> { file.json(key) };
        let groups: Vec<(String, usize, usize)> = file.json("groups");
        let &[rows, cols] = file.shape("input") else { panic!("{name}: input is no matrix") };
        let (rule, ties) = (scale_rule(file.word("rule")), ties(file.word("ties")));
        let negative_zero = negative_zero(file.word("zero_sign"));
        let scheme = match (folder, name) {
            ("mxfp4", _) => Scheme::Mxfp4(Arithmetic { scale_rule: rule, ties, negative_zero }),
            ("mxfp8", _) => {
                assert_eq!((ties, negative_zero), (Ties::Even, NegativeZero::Keep), "{name}");
                match file.word("element") {
                    "e4m3" => Scheme::Mxfp8E4m3(rule),
                    "e5m2" => Scheme::Mxfp8E5m2(rule),
                    other => panic!("{name}: unknown element {other}"),
                }
            }
            _ => panic!("{folder} has no MX files"),
        };
        Self {
            name: name.to_owned(),
            library: file.word("library").to_owned(),
            scheme,
            rows,
            cols,
            input: file.input("input"),
            codes: file.bytes("codes").to_vec(),
            scales: file.bytes("scales").to_vec(),
            slips: list("slips"),
            non_finite: list("nonfinite"),
            groups: groups.into_iter().map(|(name, first, last)| Group { name, first, last }).collect(),
        }
    }

    /// Returns the scale rule that the library follows.
    pub fn scale_rule(&self) -> ScaleRule {
        match self.scheme {
            Scheme::Mxfp4(arithmetic) => arithmetic.scale_rule,
            Scheme::Mxfp8E4m3(rule) | Scheme::Mxfp8E5m2(rule) => rule,
            Scheme::Nvfp4(..) | Scheme::Comparison(_) => unreachable!("no MX format with files here"),
        }
    }

    /// Returns the format.
    pub fn format(&self) -> Format {
        self.scheme.format()
    }

    /// Returns the library's numerics, if it has only one.
    pub fn numerics(&self) -> Option<Numerics> {
        match self.library.as_str() {
            "torchao" if self.scale_rule() == ScaleRule::Floor => Some(Numerics::Ocp),
            "torchao" | "microxcaling" | "qwantize" => None,
            "compressed-tensors" => Some(Numerics::CompressedTensors),
            "nvidia-modelopt" => Some(Numerics::Modelopt),
            "gguf" => Some(Numerics::Ggml),
            other => panic!("{}: no numerics are known for {other}", self.name),
        }
    }

    /// Returns the scale byte and the packed codes of a block.
    pub fn block(&self, (row, block): Block) -> (u8, &[u8]) {
        let index = row * self.cols / 32 + block;
        (
            self.scales[index],
            &self.codes[index * self.format().block_bytes()..][..self.format().block_bytes()],
        )
    }

    /// Returns all blocks.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        let in_row = self.cols / 32;
        (0..self.rows).flat_map(move |row| (0..in_row).map(move |block| (row, block)))
    }

    /// Returns the group of a row.
    pub fn group(&self, row: usize) -> &str {
        &self.groups.iter().find(|group| (group.first..=group.last).contains(&row)).expect("a group").name
    }
}

fn scale_rule(word: &str) -> ScaleRule {
    word.parse().unwrap_or_else(|error| panic!("{word}: {error}"))
}

fn ties(word: &str) -> Ties {
    match word {
        "even" => Ties::Even,
        "toward-zero" => Ties::Zero,
        "away" => Ties::Away,
        other => panic!("unknown ties {other}"),
    }
}

fn negative_zero(word: &str) -> NegativeZero {
    match word {
        "keep" => NegativeZero::Keep,
        "keep-unless-exact" => NegativeZero::DropInput,
        "drop" => NegativeZero::Drop,
        "negative-if-exact" => NegativeZero::Force,
        other => panic!("unknown zero sign {other}"),
    }
}
