//! The files of `tests/golden`, which other libraries made; the README there describes them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use half::{bf16, f16};
use microscale::Convention;
use microscale::formats::mxfp4::Arithmetic;
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use safetensors::tensor::{Dtype, SafeTensors};

use crate::data_dir;

/// The folder of the MXFP4 files.
pub fn folder() -> PathBuf {
    data_dir().join("tests/golden/mxfp4")
}

/// The input rows, of the type that the library was given.
#[derive(Debug)]
pub enum Input {
    /// binary32.
    F32(Vec<f32>),
    /// binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

/// A block by its row and its place in the row.
pub type Block = (usize, usize);

/// Rows that were made for one purpose.
#[derive(Debug)]
pub struct Group {
    /// What they are.
    pub name: String,
    /// The first row.
    pub first: usize,
    /// The last row.
    pub last: usize,
}

/// What one library made of the input rows.
#[derive(Debug)]
pub struct Golden {
    /// The file's name without its ending.
    pub name: String,
    /// The library that made it.
    pub library: String,
    /// The convention that the library follows, but for `slips`.
    pub arithmetic: Arithmetic,
    /// Rows.
    pub rows: usize,
    /// Elements in a row.
    pub cols: usize,
    /// `[rows, cols]`.
    pub input: Input,
    /// `[rows, cols / 2]`.
    pub codes: Vec<u8>,
    /// `[rows, cols / 32]`.
    pub scales: Vec<u8>,
    /// Finite blocks in which the library departs from its convention.
    pub slips: BTreeSet<Block>,
    /// Blocks with a NaN or an infinity.
    pub non_finite: BTreeSet<Block>,
    /// The groups of rows.
    pub groups: Vec<Group>,
}

impl Golden {
    /// Reads a file by its name without the ending.
    ///
    /// # Panics
    /// If the file is not there or not as its README says.
    pub fn read(name: &str) -> Self {
        let bytes = read_file(name);
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let metadata = header.metadata().as_ref().expect("metadata");
        let list = |key: &str| serde_json::from_str::<Vec<Block>>(&metadata[key]).expect("blocks");
        let groups: Vec<(String, usize, usize)> = serde_json::from_str(&metadata["groups"]).expect("groups");
        let input = tensors.tensor("input").expect("input");
        let &[rows, cols] = input.shape() else { panic!("{name}: input is no matrix") };
        Self {
            name: name.to_owned(),
            library: metadata["library"].clone(),
            arithmetic: Arithmetic {
                scale_rule: scale_rule(&metadata["rule"]),
                ties: ties(&metadata["ties"]),
                negative_zero: negative_zero(&metadata["zero_sign"]),
            },
            rows,
            cols,
            input: match input.dtype() {
                Dtype::F32 => Input::F32(words(input.data(), f32::from_le_bytes)),
                Dtype::F16 => Input::F16(words(input.data(), f16::from_le_bytes)),
                Dtype::BF16 => Input::Bf16(words(input.data(), bf16::from_le_bytes)),
                other => panic!("{name}: input is {other:?}"),
            },
            codes: tensors.tensor("codes").expect("codes").data().to_vec(),
            scales: tensors.tensor("scales").expect("scales").data().to_vec(),
            slips: list("slips").into_iter().collect(),
            non_finite: list("nonfinite").into_iter().collect(),
            groups: groups.into_iter().map(|(name, first, last)| Group { name, first, last }).collect(),
        }
    }

    /// The convention of the library, where it has only one.
    pub fn convention(&self) -> Option<Convention> {
        match self.library.as_str() {
            "torchao" if self.arithmetic.scale_rule == ScaleRule::Floor => Some(Convention::Ocp),
            "torchao" => None,
            "compressed-tensors" => Some(Convention::CompressedTensors),
            "nvidia-modelopt" => Some(Convention::Modelopt),
            "gguf" => Some(Convention::Ggml),
            other => panic!("{}: no convention is known for {other}", self.name),
        }
    }

    /// The scale byte and the packed codes of a block.
    pub fn block(&self, (row, block): Block) -> (u8, &[u8]) {
        let index = row * self.cols / 32 + block;
        (self.scales[index], &self.codes[index * 16..][..16])
    }

    /// All blocks.
    pub fn blocks(&self) -> impl Iterator<Item = Block> {
        let in_row = self.cols / 32;
        (0..self.rows).flat_map(move |row| (0..in_row).map(move |block| (row, block)))
    }

    /// The group of a row.
    pub fn group(&self, row: usize) -> &str {
        &self.groups.iter().find(|group| (group.first..=group.last).contains(&row)).expect("a group").name
    }
}

/// One tensor of `ml_dtypes`' tables: its bytes.
///
/// # Panics
/// If it is not there.
pub fn table(tensor: &str) -> Vec<u8> {
    let bytes = read_file("ml_dtypes-0.6.0-tables");
    SafeTensors::deserialize(&bytes)
        .expect("a safetensors file")
        .tensor(tensor)
        .expect(tensor)
        .data()
        .to_vec()
}

/// [`table`] of f32.
pub fn table_f32(tensor: &str) -> Vec<f32> {
    words(&table(tensor), f32::from_le_bytes)
}

fn read_file(name: &str) -> Vec<u8> {
    let path = folder().join(format!("{name}.safetensors"));
    std::fs::read(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

fn words<const N: usize, T>(bytes: &[u8], word: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (words, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty(), "{} bytes are no whole words", bytes.len());
    words.iter().copied().map(word).collect()
}

fn scale_rule(word: &str) -> ScaleRule {
    match word {
        "floor" => ScaleRule::Floor,
        "ceil" => ScaleRule::Ceil,
        "even" => ScaleRule::Even,
        "rceil" => ScaleRule::Rceil,
        other => panic!("unknown rule {other}"),
    }
}

fn ties(word: &str) -> Ties {
    match word {
        "even" => Ties::Even,
        "toward-zero" => Ties::Zero,
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
