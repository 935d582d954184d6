//! Writing a tensor's values in another dtype, or in Q8_0.

use bytemuck::Pod;
use microscale::{Element, NonFinite, Report};
use rayon::prelude::*;

use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::gguf::q8_0;
use crate::read::bands::bands;
use crate::read::memory::afford;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::write::narrowed::replace;
use crate::write::writer::Sink;

/// Writes the values of a tensor that has some, band by band and each rounded to nearest even, under its name. Returns their
/// bytes, and the counts of values that are not finite, which `policy` decides about.
///
/// # Errors
/// [`Error::Memory`](crate::Error::Memory), and those of writing.
pub(crate) fn write_values<T: Element + Pod>(
    tensor: &Tensor<'_>,
    policy: NonFinite,
    sink: &Sink<'_>,
) -> Result<(u64, Report)> {
    let (mut written, mut report) = (0, Report::default());
    for band in bands(tensor.elements() as usize) {
        afford(tensor, tensor.name, band.len())?;
        let first = band.start;
        let Some(values) = tensor.values_in(band) else {
            return Err(tensor.unreadable(format!("{} has no values", tensor.dtype)));
        };
        let mut values: Vec<T> =
            with_values!(&values, values => values.par_iter().map(|x| T::from_f32(x.to_f32())).collect());
        report += replace(&mut values, first, tensor.matrix().1, policy);
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        written += bytes.len() as u64;
        sink.append(tensor.name, bytes)?;
    }
    Ok((written, report))
}

/// Writes the values of a tensor that has some in ggml's Q8_0, band by band, under its name; and returns their bytes. Its rows
/// are whole blocks.
///
/// # Errors
/// [`FormatError::NotInQ8_0`](crate::FormatError::NotInQ8_0), [`Error::Memory`], and those of writing.
pub(crate) fn write_q8_0(tensor: &Tensor<'_>, sink: &Sink<'_>) -> Result<u64> {
    let mut written = 0;
    for band in bands(tensor.elements() as usize) {
        afford(tensor, tensor.name, band.len())?;
        let Some(values) = tensor.values_in(band.clone()) else {
            return Err(tensor.unreadable(format!("{} has no values", tensor.dtype)));
        };
        let (blocks, found) = with_values!(&values, values => {
            let blocks = q8_0::blocks(values);
            let found = blocks.as_ref().err().and_then(|at| values.get(*at)).map_or(0.0, |value| value.to_f32());
            (blocks, found)
        });
        let blocks = blocks.map_err(|at| {
            let (file, name, (_, cols)) = (tensor.file.into(), tensor.name.into(), tensor.matrix());
            let (row, col) = ((band.start + at) / cols.max(1), (band.start + at) % cols.max(1));
            Error::Format(FormatError::NotInQ8_0 { file, tensor: name, row, col, found })
        })?;
        written += blocks.len() as u64;
        sink.append(tensor.name, &blocks)?;
    }
    Ok(written)
}
