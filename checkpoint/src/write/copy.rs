//! Tensors that are written unchanged.

use bytemuck::cast_slice;

use crate::error::Result;
use crate::pipeline::Worker;
use crate::read::bands::{band, count};
use crate::read::input::Input;
use crate::read::values::with_values;
use crate::sums::Sums;
use crate::write::sink::Sink;

/// Bytes that a thread copies at a time.
const PIECE: usize = 1 << 20;

/// Writes a tensor as it is, and returns its sums. A transposed view of stored columns is written
/// in its own order.
pub(crate) fn copy<'env>(input: &Input<'env>, worker: &Worker<'_, 'env>, sink: &Sink) -> Result<Sums> {
    let tensor = input.tensor;
    let mut bytes = 0;
    let (each, sink) = (input.clone(), sink.clone());
    if tensor.columns.is_none() {
        let all = tensor.data.len();
        let piece = move |number: usize| {
            let piece = number * PIECE..all.min((number + 1) * PIECE);
            sink.put(0, piece.start as u64, each.bytes(piece)?)
        };
        worker.each_band(all.div_ceil(PIECE), piece, |()| Ok(()))?;
        bytes = all as u64;
    } else {
        let (elements, size) = (tensor.elements() as usize, tensor.dtype.bytes_of(1));
        let write = move |number: usize| {
            let band = band(elements, number);
            let start = band.start as u64 * size;
            let values = each
                .with_values(band, |values| with_values!(&values, values => cast_slice(values).to_vec()))?;
            let bytes = values.len() as u64;
            sink.put(0, start, values).map(|()| bytes)
        };
        worker.each_band(count(elements), write, |written| {
            bytes += written;
            Ok(())
        })?;
    }
    let mut sums = Sums::default();
    sums.add(tensor.elements(), bytes, bytes);
    Ok(sums)
}
