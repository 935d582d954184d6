//! Importance by column, read from a file: it weights the errors of a search for block scales.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::PathBuf;

use microscale::Element;

use crate::conventions::storage::Storage;
use crate::error::given::GivenError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;

/// The endings that name a vector of importance after its tensor.
const SUFFIXES: [&str; 2] = [".importance", "_importance"];

/// Vectors of importance from a file, by the tensors that they are for.
#[derive(Clone)]
pub struct Importance {
    /// The file or directory.
    pub path: PathBuf,
    /// Tensors of the file that are for no tensor that is quantized.
    pub unused: Vec<String>,
    /// Tensors to quantize that have no vector: all their columns weigh the same.
    pub unweighted: Vec<String>,
    vectors: HashMap<String, Vec<f32>>,
}

/// Shows which tensors have no vector and which vectors no tensor, not the numbers.
impl fmt::Debug for Importance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut importance = f.debug_struct("Importance");
        importance.field("path", &self.path).field("unused", &self.unused);
        importance.field("unweighted", &self.unweighted).finish_non_exhaustive()
    }
}

impl Importance {
    /// Finds the vector of each tensor that is stored so: `X.importance`, `X_importance` or X itself, as many
    /// floats as X has columns.
    ///
    /// # Errors
    /// [`GivenError::ImportanceTwice`](crate::GivenError::ImportanceTwice),
    /// [`GivenError::ImportanceShape`](crate::GivenError::ImportanceShape),
    /// [`GivenError::ImportanceNumber`](crate::GivenError::ImportanceNumber).
    pub(crate) fn find<'a>(
        file: &Checkpoint,
        tensors: impl Iterator<Item = (Tensor<'a>, &'static Storage)>,
    ) -> Result<Self> {
        let (mut used, mut unweighted, mut vectors) = (HashSet::new(), Vec::new(), HashMap::new());
        for (tensor, storage) in tensors {
            let Some(stored) = candidate(file, tensor.name)? else {
                unweighted.push(tensor.name.into());
                continue;
            };
            used.insert(stored.name);
            vectors.insert(tensor.name.into(), vector(&stored, &tensor, storage)?);
        }
        let unused = file.tensors().map(|tensor| tensor.name).filter(|name| !used.contains(name));
        let unused = unused.map(Into::into).collect();
        Ok(Self { path: file.path.clone(), unused, unweighted, vectors })
    }

    /// The importance of a tensor's columns.
    pub(crate) fn of(&self, tensor: &str) -> Option<&[f32]> {
        self.vectors.get(tensor).map(Vec::as_slice)
    }
}

/// The stored vector of a tensor. A file of importance may be part of a checkpoint, so that the suffixes come
/// first.
fn candidate<'a>(file: &'a Checkpoint, name: &str) -> Result<Option<Tensor<'a>>> {
    match SUFFIXES.map(|suffix| file.tensor(&format!("{name}{suffix}"))) {
        [Some(first), Some(second)] => {
            let [first, second] = [first, second].map(|found| found.name.into());
            Err(Error::Given(GivenError::ImportanceTwice {
                file: file.path.clone(),
                tensor: name.into(),
                first,
                second,
            }))
        }
        [first, second] => Ok(first.or(second).or_else(|| file.tensor(name))),
    }
}

/// The numbers of a vector that is for a tensor.
fn vector(stored: &Tensor<'_>, tensor: &Tensor<'_>, storage: &Storage) -> Result<Vec<f32>> {
    let columns = storage.stored_shape(tensor.shape).last().copied().unwrap_or(1);
    let (file, name) = (stored.file.to_path_buf(), stored.name.to_string());
    let values = stored.values().filter(|_| stored.shape == [columns]);
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
    match importance.iter().position(|number| !(number.is_finite() && *number >= 0.0)) {
        None => Ok(importance),
        Some(column) => {
            let (tensor, weight) = (tensor.name.into(), importance[column]);
            Err(Error::Given(GivenError::ImportanceNumber { file, name, tensor, column, weight }))
        }
    }
}
