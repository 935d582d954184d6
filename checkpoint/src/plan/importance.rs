//! Importance per column, read from a file. It weights errors in the search for block scales.

use std::collections::HashSet;
use std::ops::Range;

use microscale::{Element, HadamardWidth, Words};

use crate::calibration::transformed;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;
use crate::error::given::GivenError;
use crate::error::{Error, Result};
use crate::gguf::imatrix::{COUNTS, SUMS};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::read::values::{typed, with_values};

/// Suffixes that name a tensor's importance vector.
const SUFFIXES: [&str; 2] = [".importance", "_importance"];

/// Importance found in a file.
#[derive(Debug)]
pub(crate) struct Importance {
    /// Importance of each requested tensor, in request order. `None` weights all columns equally.
    pub(crate) columns: Vec<Option<Columns>>,
    /// Tensors of the file that do not belong to a quantized tensor.
    pub(crate) unused: Vec<String>,
    /// Tensors to quantize without importance.
    pub(crate) unweighted: Vec<String>,
    /// Tensors with experts that received no token in an importance matrix. All columns of such an
    /// expert weigh the same.
    pub(crate) partial: Vec<String>,
}

/// Importance of a tensor's columns: one vector for all rows, or one per expert.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    /// One number per column. The vectors of experts are consecutive.
    pub(crate) numbers: Vec<f32>,
    cols: usize,
    /// Rows per expert, or rows of the tensor if there is one vector.
    rows: usize,
}

impl Columns {
    /// Creates importance of `cols` columns that weigh the same.
    pub(crate) fn equal(number: f32, cols: usize) -> Self {
        Self { numbers: vec![number; cols], cols, rows: 1 }
    }

    /// Returns the rows per vector, if there are several vectors.
    pub(crate) fn rows_each(&self) -> Option<usize> {
        (self.numbers.len() > self.cols).then_some(self.rows)
    }

    /// Returns the importance for `rows`, which must belong to one expert.
    pub(crate) fn of(&self, rows: &Range<usize>) -> &[f32] {
        let start = self.rows_each().map_or(0, |each| rows.start / each.max(1) * self.cols);
        self.numbers.get(start..start + self.cols).unwrap_or_default()
    }
}

/// Stored importance of a tensor.
enum Stored<'a> {
    /// A vector of importance.
    Vector(Tensor<'a>),
    /// Sums of llama.cpp's importance matrix, and the counts to divide them by.
    Sums(Tensor<'a>, Option<Tensor<'a>>),
}

impl Importance {
    /// Finds the importance of each tensor. The name of a tensor with a Hadamard transform is
    /// followed by the width, such as `X.hadamard_32.importance`.
    ///
    /// A vector is called `X.importance`, `X_importance` or `X`, like its tensor. An importance
    /// matrix has `X.in_sum2` and `X.counts` instead. The vector or the sums have one float per
    /// column of `X`, or one row of them per expert.
    ///
    /// # Errors
    /// - [`GivenError::ImportanceTwice`](crate::GivenError::ImportanceTwice) if a tensor has two
    ///   vectors.
    /// - [`GivenError::ImportanceShape`](crate::GivenError::ImportanceShape) if a vector does not
    ///   fit its tensor.
    /// - [`GivenError::ImportanceNumber`](crate::GivenError::ImportanceNumber) for a number that is
    ///   negative or not finite.
    /// - [`GivenError::Imatrix`](crate::GivenError::Imatrix) if an importance matrix is malformed.
    /// - [`GivenError::ImatrixOfOthers`](crate::GivenError::ImatrixOfOthers) if an importance
    ///   matrix matches no tensor.
    pub(crate) fn find<'a>(
        file: &Checkpoint,
        tensors: impl Iterator<Item = (Tensor<'a>, &'static Storage, Option<HadamardWidth>)>,
    ) -> Result<Self> {
        let (mut used, mut unweighted) = (HashSet::new(), Vec::new());
        let (mut partial, mut all) = (Vec::new(), Vec::new());
        for (tensor, storage, hadamard) in tensors {
            // The file may have the importance of each transform.
            let names = HadamardWidth::values().map(Some).chain([None]);
            let stored = names.filter_map(|width| candidate(file, &transformed(tensor.name, width)).ok()?);
            used.extend(stored.flat_map(|stored| stored.names()));
            let numbers = match candidate(file, &transformed(tensor.name, hadamard))? {
                None => {
                    unweighted.push(tensor.name.into());
                    all.push(None);
                    continue;
                }
                Some(Stored::Vector(stored)) => vector(&stored, &tensor, storage)?,
                Some(Stored::Sums(sums, counts)) => {
                    let (means, is_partial) = means(&sums, counts.as_ref(), &tensor, storage)?;
                    partial.extend(is_partial.then(|| tensor.name.to_string()));
                    means
                }
            };
            let shape = storage.stored_shape(tensor.shape);
            let (cols, rows) = (shape.last().copied().unwrap_or(1), shape.iter().rev().nth(1).copied());
            all.push(Some(Columns { numbers, cols, rows: rows.unwrap_or(1) }));
        }
        let unused = file.tensors().map(|tensor| tensor.name).filter(|name| !used.contains(name));
        // Sums and their counts make one warning, under the tensor's name.
        let unused = unused.filter(|name| file.tensor(&paired(name)).is_none());
        let unused: Vec<String> =
            unused.map(|name| name.strip_suffix(SUMS).unwrap_or(name).to_string()).collect();
        let is_imatrix = file.tensors().any(|tensor| tensor.name.ends_with(SUMS));
        if is_imatrix && all.iter().all(Option::is_none) {
            let (file, tensor) = (file.path.clone(), unweighted.first().cloned().unwrap_or_default());
            let other = unused.first().cloned().unwrap_or_default();
            return Err(Error::Given(GivenError::ImatrixOfOthers { file, tensor, other }));
        }
        Ok(Self { columns: all, unused, unweighted, partial })
    }
}

impl<'a> Stored<'a> {
    /// Returns the names of the tensors in the file.
    fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let (first, second) = match self {
            Self::Vector(tensor) => (tensor, None),
            Self::Sums(sums, counts) => (sums, counts.map(|counts| counts.name)),
        };
        std::iter::once(first.name).chain(second)
    }
}

/// Returns the name of the sums for counts called `name`.
fn paired(name: &str) -> String {
    name.strip_suffix(COUNTS).map(|weight| format!("{weight}{SUMS}")).unwrap_or_default()
}

/// Finds the stored importance of a tensor.
///
/// Names with a suffix come first, because the file may also hold the weights of a checkpoint.
fn candidate<'a>(file: &'a Checkpoint, name: &str) -> Result<Option<Stored<'a>>> {
    let [first, second, sums, counts] =
        [SUFFIXES[0], SUFFIXES[1], SUMS, COUNTS].map(|suffix| file.tensor(&format!("{name}{suffix}")));
    let mut found = [first, second, sums].into_iter().flatten();
    if let (Some(first), Some(second)) = (found.next(), found.next()) {
        let [first, second] = [first, second].map(|found| found.name.into());
        let (file, tensor) = (file.path.clone(), name.into());
        return Err(Error::Given(GivenError::ImportanceTwice { file, tensor, first, second }));
    }
    Ok(match sums {
        Some(sums) => Some(Stored::Sums(sums, counts)),
        None => first.or(second).or_else(|| file.tensor(name)).map(Stored::Vector),
    })
}

/// Returns the numbers of columns and of experts, each 1 for a tensor without that dimension.
fn size(tensor: &Tensor<'_>, storage: &Storage) -> (usize, usize) {
    let shape = storage.stored_shape(tensor.shape);
    let experts = shape.len().checked_sub(2).and_then(|leading| shape.get(..leading));
    let experts =
        experts.unwrap_or_default().iter().fold(1usize, |product, size| product.saturating_mul(*size));
    (shape.last().copied().unwrap_or(1), experts)
}

/// Reads the importance vector of a tensor, or one vector per expert.
fn vector(stored: &Tensor<'_>, tensor: &Tensor<'_>, storage: &Storage) -> Result<Vec<f32>> {
    let (columns, experts) = size(tensor, storage);
    let (file, name) = (stored.file.to_path_buf(), stored.name.to_string());
    let fits = stored.shape == [columns] || experts > 1 && stored.shape == [experts, columns];
    let values = stored.values().filter(|_| fits);
    let Some(values) = values else {
        let (dtype, shape) = (stored.dtype, stored.shape.to_vec());
        return Err(Error::Given(GivenError::ImportanceShape {
            file,
            name,
            tensor: tensor.name.into(),
            columns,
            dtype,
            shape,
        }));
    };
    let importance: Vec<f32> =
        with_values!(&values, slice => slice.iter().map(|number| Element::to_f32(*number)).collect());
    check(stored, tensor, columns, importance)
}

/// Computes the mean squared activation of each column.
///
/// Returns true if some expert received no token. The columns of such an expert weigh the same, as
/// in llama.cpp.
fn means(
    sums: &Tensor<'_>,
    counts: Option<&Tensor<'_>>,
    tensor: &Tensor<'_>,
    storage: &Storage,
) -> Result<(Vec<f32>, bool)> {
    let (columns, experts) = size(tensor, storage);
    let refused = |why| {
        let (file, tensor) = (sums.file.to_path_buf(), tensor.name.to_string());
        Error::Given(GivenError::Imatrix { file, tensor, why })
    };
    let (legacy, counts) = match counts.map(|counts| (counts.dtype, counts)) {
        Some((FileDtype::F32, counts)) => (false, typed::<f32>(counts.data).into_owned()),
        // Counts of a legacy `.dat` file.
        Some((FileDtype::I32, counts)) => (
            true,
            counts.data.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes) as f32).collect(),
        ),
        Some((dtype, _)) => return Err(refused(format!("has counts of {dtype}, and must have F32"))),
        None => return Err(refused("has sums and no counts".into())),
    };
    let numbers = sums.elements();
    if sums.dtype != FileDtype::F32 || numbers != (columns as u64).saturating_mul(experts as u64) {
        let dtype = sums.dtype;
        let of = if experts == 1 { String::new() } else { format!(" in each of {experts} experts") };
        return Err(refused(format!("has {numbers} numbers of {dtype}, and must have {columns} of F32{of}")));
    }
    if counts.len() != 1 && counts.len() != experts {
        let found = counts.len();
        return Err(refused(format!(
            "has {found} counts, and must have 1 or one for each of {experts} experts"
        )));
    }
    if let Some(count) = counts.iter().find(|count| !(count.is_finite() && **count >= 0.0)) {
        return Err(refused(format!(
            "has a count of {count}, and must have finite ones that are not negative"
        )));
    }
    let mut means = typed::<f32>(sums.data).into_owned();
    for (expert, means) in means.chunks_mut(columns.max(1)).enumerate() {
        let count = counts.get(expert).or(counts.first()).copied().unwrap_or(0.0);
        match (count > 0.0, legacy) {
            (true, _) => means.iter_mut().for_each(|sum| *sum /= count),
            (false, true) => {}
            (false, false) => means.fill(1.0),
        }
    }
    let partial = !legacy && counts.contains(&0.0);
    Ok((check(sums, tensor, columns, means)?, partial))
}

/// Checks that all numbers are finite and not negative.
fn check(stored: &Tensor<'_>, tensor: &Tensor<'_>, columns: usize, importance: Vec<f32>) -> Result<Vec<f32>> {
    match importance.iter().position(|number| !(number.is_finite() && *number >= 0.0)) {
        None => Ok(importance),
        Some(place) => {
            let (file, name) = (stored.file.to_path_buf(), stored.name.to_string());
            let (tensor, weight, column) = (tensor.name.into(), importance[place], place % columns.max(1));
            Err(Error::Given(GivenError::ImportanceNumber { file, name, tensor, column, weight }))
        }
    }
}

#[cfg(test)]
mod golden_tests {
    //! Importance matrices from llama.cpp's llama-imatrix, and the numbers that its quantizer uses.
    //! `tests/golden/README.md` in the repository describes the files.

    use std::path::Path;

    use super::*;
    use crate::checkpoint_format::CheckpointFormat;
    use microscale::Format;
    use safetensors::SafeTensors;

    const VALUES: &[u8] = include_bytes!("../../golden/imatrix-values.safetensors");

    fn found(file: &str) -> (Importance, Vec<(String, Vec<f32>)>) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(file);
        let file = Checkpoint::open(&file).unwrap();
        let values = SafeTensors::deserialize(VALUES).unwrap();
        let mut expected: Vec<_> = values
            .tensors()
            .into_iter()
            .map(|(name, view)| (name, view.shape().to_vec(), typed::<f32>(view.data()).into_owned()))
            .collect();
        expected.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        let storage = Storage::of_format(CheckpointFormat::Gguf, Format::Nvfp4).unwrap();
        let shapes: Vec<_> = expected
            .iter()
            .map(|(_, shape, _)| match shape[..] {
                [columns] => vec![32, columns],
                [experts, columns] => vec![experts, 32, columns],
                _ => panic!("{shape:?}"),
            })
            .collect();
        let tensors = expected.iter().zip(&shapes).map(|((name, ..), shape)| {
            let (dtype, file) = (FileDtype::F32, Path::new("model.gguf"));
            (Tensor { name, dtype, shape, data: &[], file, scaling: None, columns: None }, storage, None)
        });
        let importance = Importance::find(&file, tensors).unwrap();
        (importance, expected.into_iter().map(|(name, _, numbers)| (name, numbers)).collect())
    }

    #[test]
    fn numbers_are_those_that_llama_cpp_quantizes_with() {
        let (importance, expected) = found("imatrix.gguf");
        assert_eq!(expected.len(), 8);
        for ((name, numbers), found) in expected.iter().zip(&importance.columns) {
            assert_eq!(found.as_ref().map(|columns| &columns.numbers), Some(numbers), "{name}");
        }
        let experts = ["down", "gate", "up"].map(|layer| format!("blk.0.ffn_{layer}_exps.weight"));
        assert_eq!(importance.partial, experts);
        assert_eq!((importance.unused.len(), importance.unweighted.len()), (0, 0));
    }

    /// The legacy format stores sums multiplied by the number of chunks, which rounds. It does not
    /// record which experts received no token.
    #[test]
    fn the_older_form_has_the_same_numbers_but_for_rounding() {
        let (importance, expected) = found("imatrix.dat");
        for ((name, numbers), found) in expected.iter().zip(&importance.columns) {
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() * 2.0 * f32::EPSILON;
            let found = &found.as_ref().unwrap().numbers;
            assert!(found.iter().zip(numbers).all(close), "{name}");
            assert_eq!(found.len(), numbers.len());
        }
        assert!(importance.partial.is_empty());
    }

    #[test]
    fn each_expert_has_its_own_columns() {
        let numbers = vec![1.0, 2.0, 3.0, 4.0];
        let both = Columns { numbers: numbers.clone(), cols: 2, rows: 5 };
        assert_eq!(
            (both.rows_each(), both.of(&(3..5)), both.of(&(5..6))),
            (Some(5), &numbers[..2], &numbers[2..])
        );
        let one = Columns { numbers: numbers.clone(), cols: 4, rows: 5 };
        assert_eq!((one.rows_each(), one.of(&(3..5))), (None, &numbers[..]));
    }
}
