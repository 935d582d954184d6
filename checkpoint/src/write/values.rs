//! Writing a tensor's values in another dtype.

use bytemuck::Pod;
use microscale::Element;
use rayon::prelude::*;

use crate::error::Result;
use crate::read::bands::bands;
use crate::read::memory::afford;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::write::writer::Sink;

/// Writes the values of a tensor that has some, band by band and each rounded to nearest even, under its name; and returns
/// their bytes.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory), and those of writing.
pub(crate) fn write_values<T: Element + Pod>(tensor: &Tensor<'_>, sink: &Sink<'_>) -> Result<u64> {
    let mut written = 0;
    for band in bands(tensor.elements() as usize) {
        afford(tensor, tensor.name, band.len())?;
        let Some(values) = tensor.values_in(band) else {
            return Err(tensor.unreadable(format!("{} has no values", tensor.dtype)));
        };
        let values: Vec<T> =
            with_values!(&values, values => values.par_iter().map(|x| T::from_f32(x.to_f32())).collect());
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        written += bytes.len() as u64;
        sink.append(tensor.name, bytes)?;
    }
    Ok(written)
}
