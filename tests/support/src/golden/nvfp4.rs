//! The NVFP4 files: many small tensors each, because every tensor has a global scale.

use std::collections::BTreeSet;

use microscale::formats::nvfp4::Direction;
use microscale::{GlobalScale, Numerics, Words};

use super::{Input, Tensors};

/// A block: the name of its case, its row and its index in the row.
pub type CaseBlock = (String, usize, usize);

/// The output of one library for one tensor.
#[derive(Debug)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// Number of rows of 64 elements.
    pub rows: usize,
    /// `[rows, 64]`.
    pub input: Input,
    /// `[rows, 32]`.
    pub codes: Vec<u8>,
    /// `[rows, 4]`.
    pub scales: Vec<u8>,
    /// The number that the library used, valid or not. `None` in the variant `none`.
    pub global_scale: Option<GlobalScale>,
    /// `[rows, 64]`, if the library dequantizes.
    pub dequantized: Option<Input>,
}

/// A file.
#[derive(Debug)]
pub struct Nvfp4 {
    /// Its name without extension.
    pub name: String,
    /// The numerics that the library follows.
    pub numerics: Numerics,
    /// The source of the global scale: `computed`, `given` or `none`.
    pub variant: String,
    /// The tensors.
    pub cases: Vec<Case>,
    /// Blocks with a NaN or an infinity.
    pub non_finite: BTreeSet<CaseBlock>,
    /// Finite blocks for which the formulas have no result.
    pub degenerate: BTreeSet<CaseBlock>,
    /// Other blocks whose results deviate from the library's own rule.
    pub slips: BTreeSet<CaseBlock>,
}

impl Nvfp4 {
    /// Reads a file, given its name without extension.
    ///
    /// # Panics
    /// Panics if the file is missing or differs from its README.
    pub fn read(name: &str) -> Self {
        let file = Tensors::read("nvfp4", name);
        let direction = match file.word("direction") {
            "none" => None,
            word => Some(Direction::from_word(word).expect("a direction")),
        };
        let names: Vec<String> = file.json("cases");
        let tensors: BTreeSet<&str> =
            file.names().map(|name| name.rsplit_once('.').expect("a case").0).collect();
        assert_eq!(tensors, names.iter().map(String::as_str).collect(), "{name}: the cases");
        let cases = names.into_iter().map(|case| Case::read(&file, case, direction)).collect();
        Self {
            name: name.to_owned(),
            numerics: Numerics::from_word(file.word("convention")).expect("numerics"),
            variant: name.rsplit('-').nth(1).expect("a variant").to_owned(),
            cases,
            non_finite: file.json("nonfinite"),
            degenerate: file.json("degenerate"),
            slips: file.json("slips"),
        }
    }
}

impl Case {
    fn read(file: &Tensors, name: String, direction: Option<Direction>) -> Self {
        let tensor = |what: &str| format!("{name}.{what}");
        let &[rows, 64] = file.shape(&tensor("input")) else { panic!("{name} is no matrix of 64 columns") };
        let global_scale = direction.map(|direction| {
            let values = file.f32s(&tensor("global_scale"));
            assert_eq!(values.len(), 1, "{name}");
            GlobalScale::of(direction, values[0])
        });
        let dequantized = tensor("dequantized");
        let dequantized = file.has(&dequantized).then(|| file.input(&dequantized));
        let (codes, scales) = (file.bytes(&tensor("codes")).to_vec(), file.bytes(&tensor("scales")).to_vec());
        assert_eq!((codes.len(), scales.len()), (rows * 32, rows * 4), "{name}");
        let input = file.input(&tensor("input"));
        assert_eq!(input.what().1, rows * 64, "{name}");
        Self { rows, input, codes, scales, global_scale, dequantized, name }
    }

    /// Returns the case's blocks, each with its index.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, CaseBlock)> {
        (0..self.rows * 4).map(|index| (index, (self.name.clone(), index / 4, index % 4)))
    }
}
