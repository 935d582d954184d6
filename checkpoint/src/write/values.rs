//! Writing a tensor's values in another dtype, or in Q8_0.

use bytemuck::Pod;
use microscale::{Element, NonFinite, Report};

use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::gguf::q8_0;
use crate::pipeline::Worker;
use crate::read::bands::{BAND, band, count};
use crate::read::input::Input;
use crate::read::memory::afford;
use crate::read::tensor::Q8_0;
use crate::read::values::with_values;
use crate::write::narrowed::replace;
use crate::write::sink::Sink;

/// Writes the values of a tensor, each rounded to nearest even. Returns their bytes, and the counts
/// of values that are not finite, which `policy` decides about.
///
/// # Errors
/// [`Error::Memory`], [`Error::Io`].
pub(crate) fn write_values<'env, T: Element + Pod>(
    input: &Input<'env>,
    policy: NonFinite,
    worker: &Worker<'_, 'env>,
    sink: &Sink,
) -> Result<(u64, Report)> {
    let tensor = input.tensor;
    let (elements, cols) = (tensor.elements() as usize, tensor.matrix().1);
    afford(&tensor, tensor.name, elements.min(BAND))?;
    let (each, sink) = (input.clone(), sink.clone());
    let write = move |number: usize| {
        let band = band(elements, number);
        let first = band.start;
        let mut values: Vec<T> = each.with_values(band, |values| {
            with_values!(&values, values => values.iter().map(|x| T::from_f32(x.to_f32())).collect())
        })?;
        let report = replace(&mut values, first, cols, policy);
        sink.put(0, (first * size_of::<T>()) as u64, bytemuck::cast_slice(&values).to_vec())?;
        Ok(report)
    };
    let mut report = Report::default();
    worker.each_band(count(elements), write, |of_band| {
        report += of_band;
        Ok(())
    })?;
    Ok(((elements * size_of::<T>()) as u64, report))
}

/// Writes the values of a tensor in ggml's Q8_0, whose rows are whole blocks. Returns their bytes.
///
/// # Errors
/// [`FormatError::NotInQ8_0`](crate::FormatError::NotInQ8_0), [`Error::Memory`], [`Error::Io`].
pub(crate) fn write_q8_0<'env>(input: &Input<'env>, worker: &Worker<'_, 'env>, sink: &Sink) -> Result<u64> {
    let tensor = input.tensor;
    let elements = tensor.elements() as usize;
    afford(&tensor, tensor.name, elements.min(BAND))?;
    let (each, sink) = (input.clone(), sink.clone());
    let write = move |number: usize| {
        let band = band(elements, number);
        let (first, offset) = (band.start, Q8_0.bytes_of(band.start as u64));
        let (blocks, found) = each.with_values(band, |values| {
            with_values!(&values, values => {
                let blocks = q8_0::blocks(values);
                let found = blocks.as_ref().err().and_then(|at| values.get(*at));
                let found = found.map_or(0.0, |value| value.to_f32());
                (blocks, found)
            })
        })?;
        let blocks = blocks.map_err(|at| {
            let (file, name, (_, cols)) = (tensor.file.into(), tensor.name.into(), tensor.matrix());
            let (row, col) = ((first + at) / cols.max(1), (first + at) % cols.max(1));
            Error::Format(FormatError::NotInQ8_0 { file, tensor: name, row, col, found })
        })?;
        let bytes = blocks.len() as u64;
        sink.put(0, offset, blocks).map(|()| bytes)
    };
    let mut written = 0;
    worker.each_band(count(elements), write, |bytes| {
        written += bytes;
        Ok(())
    })?;
    Ok(written)
}
