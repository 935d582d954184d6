//! The memory that a tensor takes while it is worked on, asked for before: an allocation that fails in the
//! middle of the work would end the process, and leave behind what it has written.

use crate::error::{Error, Result};
use crate::read::tensor::Tensor;

/// Bytes for each element that is in memory at once: two copies of its value in f32, one of them transposed,
/// and codes and scales with another copy of them, each for two workers at most.
const BYTES_PER_ELEMENT: usize = 2 * (4 + 4) + 4;

/// Makes sure that so many elements of a tensor, known by this name, can be in memory.
///
/// # Errors
/// [`Error::Memory`].
pub(crate) fn afford(tensor: &Tensor<'_>, name: &str, elements: usize) -> Result<()> {
    let bytes = elements.saturating_mul(BYTES_PER_ELEMENT);
    // Only whether it can be had is of interest: nothing is written to it, so that it costs no memory.
    Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| Error::Memory {
        file: tensor.file.into(),
        tensor: name.into(),
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::dtype::FileDtype;

    #[test]
    fn more_than_there_can_be_is_refused_by_name() {
        let (dtype, shape, data) = (FileDtype::F32, &[1usize][..], &[0u8; 4][..]);
        let tensor = Tensor {
            name: "a.codes",
            dtype,
            shape,
            data,
            file: Path::new("x.safetensors"),
            scaling: None,
            columns: None,
        };
        assert!(afford(&tensor, "a", 1000).is_ok());
        let refused = afford(&tensor, "a", usize::MAX / 8).unwrap_err().to_string();
        assert!(refused.contains("x.safetensors: tensor a needs"), "{refused}");
    }
}
