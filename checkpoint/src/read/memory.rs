//! Checks that there is enough memory for a tensor before work starts. A failed allocation in the
//! middle would abort the process and leave partial output.

use crate::error::{Error, Result};
use crate::read::tensor::Tensor;

/// Bytes per element in memory: two f32 copies of its value, one of them transposed, and codes and
/// scales with a copy of them, each for at most two workers.
const BYTES_PER_ELEMENT: usize = 2 * (4 + 4) + 4;

/// Checks that `elements` elements of a tensor fit in memory. Errors call it `name`.
///
/// # Errors
/// [`Error::Memory`] if they do not.
pub(crate) fn afford(tensor: &Tensor<'_>, name: &str, elements: usize) -> Result<()> {
    let bytes = elements.saturating_mul(BYTES_PER_ELEMENT);
    // The reservation only tests whether memory is available. Untouched pages cost nothing.
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
