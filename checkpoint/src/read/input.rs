//! Reading a tensor band by band.
//!
//! Plain floats are read from the file into a buffer that each thread reuses. That avoids the page
//! faults of the mapped file and the work of unmapping it again, which every thread of a process
//! pays for. All other tensors are read from the map.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use microscale::Dtype;

use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::position::Position;
use crate::read::tensor::Tensor;
use crate::read::values::{Values, float_dtype};

/// Tensors of at least this many bytes are read from their file. For smaller ones, opening the file
/// again costs more than page faults.
const LEAST: usize = 1 << 20;

thread_local! {
    /// Buffers for the bands that this thread works on, aligned for every dtype.
    static BUFFERS: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// A tensor whose elements are read in bands, by several threads.
#[derive(Clone)]
pub(crate) struct Input<'a> {
    pub(crate) tensor: Tensor<'a>,
    /// The file and the offset of the tensor's bytes, if they are read from there.
    file: Option<(Arc<File>, u64)>,
}

impl<'a> Input<'a> {
    /// The tensor at a position of a checkpoint, as its values are read.
    pub(crate) fn new(checkpoint: &Checkpoint, tensor: Tensor<'a>, position: Position) -> Self {
        let is_read = tensor.columns.is_none() && tensor.data.len() >= LEAST;
        let file = is_read.then(|| checkpoint.reopen(position)).flatten();
        Self { tensor, file: file.map(|(file, offset)| (Arc::new(file), offset)) }
    }

    /// The tensor from the map of its file.
    pub(crate) fn mapped(tensor: Tensor<'a>) -> Self {
        Self { tensor, file: None }
    }

    /// Calls `work` with the values of a band.
    ///
    /// # Errors
    /// [`FormatError::Packed`](crate::FormatError::Packed) if the tensor has no values,
    /// [`Error::Io`].
    pub(crate) fn with_values<R>(&self, band: Range<usize>, work: impl FnOnce(Values<'_>) -> R) -> Result<R> {
        let dtype = float_dtype(self.tensor.dtype).filter(|_| self.tensor.scaling.is_none());
        let (Some((file, offset)), Some(dtype)) = (&self.file, dtype) else {
            let values = self.tensor.values_in(band);
            return values.map(work).ok_or_else(|| self.without_values());
        };
        let (start, bytes) = (band.start * dtype.bytes(), band.len() * dtype.bytes());
        let mut buffer = BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default();
        if buffer.len() < bytes.div_ceil(8) {
            buffer.resize(bytes.div_ceil(8), 0);
        }
        let of_band = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut buffer)[..bytes];
        let read = read_exact_at(file, of_band, offset + start as u64);
        let done = read.map(|()| {
            work(match dtype {
                Dtype::F32 => Values::F32(Cow::Borrowed(bytemuck::cast_slice(of_band))),
                Dtype::F16 => Values::F16(Cow::Borrowed(bytemuck::cast_slice(of_band))),
                Dtype::Bf16 => Values::Bf16(Cow::Borrowed(bytemuck::cast_slice(of_band))),
            })
        });
        BUFFERS.with_borrow_mut(|buffers| buffers.push(buffer));
        done.map_err(Error::io("read", self.tensor.file))
    }

    /// Some of the tensor's bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn bytes(&self, range: Range<usize>) -> Result<Vec<u8>> {
        let Some((file, offset)) = &self.file else {
            return Ok(self.tensor.data.get(range).unwrap_or_default().into());
        };
        let mut bytes = vec![0; range.len()];
        read_exact_at(file, &mut bytes, offset + range.start as u64)
            .map_err(Error::io("read", self.tensor.file))?;
        Ok(bytes)
    }

    /// The error that the tensor has no values that can be quantized.
    pub(crate) fn without_values(&self) -> Error {
        self.tensor.unreadable(format!("{} has no values", self.tensor.dtype))
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(not(unix))]
fn read_exact_at(_: &File, _: &mut [u8], _: u64) -> std::io::Result<()> {
    unreachable!("files are reopened on Unix only")
}
