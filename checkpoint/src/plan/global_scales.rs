//! NVFP4 global scales read from a file instead of computed. The file names them after their
//! tensors.

use std::collections::{HashMap, HashSet};

use microscale::GlobalScale;
use microscale::formats::nvfp4::Direction;

use crate::checkpoint_formats::packed::global_scale;
use crate::checkpoint_formats::storage::StoredGlobal;
use crate::checkpoint_formats::{compressed_tensors, modelopt};
use crate::error::given::GivenError;
use crate::error::{Error, Result};
use crate::names::fused::fused;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;

/// Stored forms of a global scale. The suffix of the name determines the direction.
const STORED: [StoredGlobal; 2] = [compressed_tensors::GLOBAL_SCALE, modelopt::GLOBAL_SCALE];

/// Global scales found in a file.
#[derive(Debug, Default)]
pub(crate) struct GlobalScales {
    /// Global scale of each requested tensor, in request order.
    pub(crate) scales: Vec<GlobalScale>,
    /// Tensors of the file that do not belong to a quantized tensor.
    pub(crate) unused: Vec<String>,
    /// Tensors whose global scale has the other direction than the numerics. Its inverse is used,
    /// rounded to f32.
    pub(crate) inverted: Vec<String>,
    /// Tensors whose global scale differs from other parts of their fused layer.
    pub(crate) unequal: Vec<String>,
}

impl GlobalScales {
    /// Finds the global scale of each tensor, in the direction of its numerics.
    ///
    /// A scale is called `X_global_scale` (a divisor), `X_scale_2` (a multiplier) or `X` (the
    /// direction of the numerics).
    ///
    /// # Errors
    /// - [`GivenError::NoGlobalScale`](crate::GivenError::NoGlobalScale) if a tensor has none.
    /// - [`GivenError::GlobalScaleTwice`](crate::GivenError::GlobalScaleTwice) if a tensor has two.
    /// - [`FormatError::Packed`](crate::FormatError::Packed) unless the scale is one F32.
    /// - [`Error::Tensor`] for a number that cannot be a global scale.
    pub(crate) fn find<'a>(
        file: &Checkpoint,
        tensors: impl Iterator<Item = (Tensor<'a>, Direction)>,
    ) -> Result<Self> {
        let mut found = Self::default();
        let mut used = HashSet::new();
        let mut fused_scales = HashMap::new();
        for (tensor, direction) in tensors {
            let name = tensor.name;
            let (stored, stored_direction) = candidate(file, name, direction)?;
            let mut scale = global_scale(&stored, stored_direction)?;
            if stored_direction != direction {
                found.inverted.push(name.to_string());
                scale = toward(direction, scale, &stored)?;
            }
            if let Some(layer) = fused(name, tensor.shape)
                && *fused_scales.entry(layer).or_insert(scale) != scale
            {
                found.unequal.push(name.to_string());
            }
            used.insert(stored.name);
            found.scales.push(scale);
        }
        let unused = file.tensors().map(|tensor| tensor.name).filter(|name| !used.contains(name));
        found.unused = unused.map(Into::into).collect();
        Ok(found)
    }
}

/// Finds the stored global scale of a tensor, and its direction.
fn candidate<'a>(file: &'a Checkpoint, name: &str, direction: Direction) -> Result<(Tensor<'a>, Direction)> {
    let [first, second] = STORED.map(|stored: StoredGlobal| {
        file.tensor(&stored.name_for(name)?).map(|found| (found, stored.direction))
    });
    let path = || file.path.clone();
    match (first, second) {
        (Some((first, _)), Some((second, _))) => {
            let [first, second] = [first, second].map(|found| found.name.into());
            Err(Error::Given(GivenError::GlobalScaleTwice {
                file: path(),
                tensor: name.into(),
                first,
                second,
            }))
        }
        // Suffixes come first: a quantized checkpoint may store codes under the plain name.
        (Some(found), None) | (None, Some(found)) => Ok(found),
        (None, None) => file
            .tensor(name)
            .map(|found| (found, direction))
            .ok_or_else(|| Error::Given(GivenError::NoGlobalScale { file: path(), tensor: name.into() })),
    }
}

/// Converts a scale to a direction, which rounds.
fn toward(direction: Direction, scale: GlobalScale, stored: &Tensor<'_>) -> Result<GlobalScale> {
    let inverse = scale.toward(direction);
    let error = || Error::tensor(stored.file, stored.name, microscale::Error::GlobalScale { given: inverse });
    if inverse.in_range() { Ok(inverse) } else { Err(error()) }
}
