//! Copies between a GPU and unpinned host memory, through pinned memory.
//!
//! The driver does the same for a mapped file, but with one thread and a small buffer. Here several
//! threads copy one piece into pinned memory while the previous piece is transferred.

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PinnedHostSlice,
    result, sys,
};
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::gpu::runtime::driver::doing;
use crate::origin::Origin;

/// Bytes per piece.
const PIECE: usize = 4 << 20;
/// Bytes that a thread copies at a time.
const PART: usize = 512 << 10;
/// Copies of fewer bytes are not split into pieces.
const LEAST: usize = 1 << 20;

/// Two pieces of pinned memory, used alternately, by one operation at a time.
pub(in crate::gpu) struct Staging {
    context: Arc<CudaContext>,
    /// Empty until first used.
    pieces: Mutex<Vec<Piece>>,
}

struct Piece {
    memory: PinnedHostSlice<u8>,
    /// Completes with the last enqueued work that uses this memory.
    used: CudaEvent,
}

impl Piece {
    fn new(context: &Arc<CudaContext>) -> Result<Self> {
        // SAFETY: the `PIECE` bytes are uninitialized, and a copy or the GPU writes them before
        // they are read.
        let memory = unsafe { context.alloc_pinned_with_flags(PIECE, 0) }.map_err(doing("pinning memory"))?;
        let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC;
        Ok(Self { memory, used: context.new_event(Some(flags)).map_err(doing("creating an event"))? })
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // A copy may still be in progress if an operation failed. That operation returned the
        // error.
        let _ = self.used.synchronize();
    }
}

impl Staging {
    /// Pins no memory yet.
    pub(in crate::gpu) fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: context.clone(), pieces: Mutex::default() }
    }

    /// The two pieces, for one operation.
    fn pieces(&self) -> Result<MutexGuard<'_, Vec<Piece>>> {
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        while pieces.len() < 2 {
            pieces.push(Piece::new(&self.context)?);
        }
        Ok(pieces)
    }

    /// Copies to the start of device memory; later work on the stream finds the values there.
    ///
    /// Reads the file that the values are mapped from, if `origin` names it.
    pub(in crate::gpu) fn copy_to_device<T: DeviceRepr + bytemuck::Pod>(
        &self,
        stream: &Arc<CudaStream>,
        values: &[T],
        origin: Option<Origin<'_>>,
        target: &mut CudaSlice<T>,
    ) -> Result<()> {
        let copying = doing("copying the input to it");
        assert!(target.len() >= values.len(), "the target is too short");
        let mut pieces = self.pieces()?;
        if size_of_val(values) < LEAST {
            return stream.memcpy_htod(values, target).map_err(copying);
        }
        self.context.bind_to_thread().map_err(&copying)?;
        let (target, _written) = target.device_ptr_mut(stream);
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let file = origin.map(|origin| Ok((File::open(origin.file)?, origin.offset)));
        let file = file.transpose().map_err(reading)?;
        for (number, from) in bytes.chunks(PIECE).enumerate() {
            let Piece { memory, used } = &mut pieces[number % 2];
            used.synchronize().map_err(&copying)?;
            let to = &mut memory.as_mut_slice().map_err(&copying)?[..from.len()];
            let offset = (number * PIECE) as u64;
            let parts = to.par_chunks_mut(PART).zip(from.par_chunks(PART)).enumerate();
            let copied = parts.try_for_each(|(part, (to, from))| match &file {
                Some((file, start)) => read_at(file, to, from, start + offset + (part * PART) as u64),
                None => {
                    to.copy_from_slice(from);
                    Ok(())
                }
            });
            copied.map_err(reading)?;
            // SAFETY: the target holds all bytes, checked above, and these start at `offset`. The
            // pinned memory lives as long as `self`, is not touched again before its event
            // completes, and dropping it waits for that event.
            unsafe { result::memcpy_htod_async(target + offset, to, stream.cu_stream()) }
                .map_err(&copying)?;
            used.record(stream).map_err(&copying)?;
        }
        Ok(())
    }

    /// Copies from the start of device memory, and waits for it.
    pub(in crate::gpu) fn copy_to_host(
        &self,
        stream: &Arc<CudaStream>,
        source: &CudaSlice<u8>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let mut rest = &mut bytes[..];
        let length = rest.len();
        self.each_piece(stream, source, length, &mut |from| {
            let (to, after) = std::mem::take(&mut rest).split_at_mut(from.len());
            to.par_chunks_mut(PART)
                .zip(from.par_chunks(PART))
                .for_each(|(to, from)| to.copy_from_slice(from));
            rest = after;
            ControlFlow::Continue(())
        })
    }

    /// Copies `bytes` bytes from the start of device memory, and passes them on piece by piece.
    ///
    /// Each piece is passed on while the next one is transferred. Ends with the last piece, or when
    /// `hand_on` breaks.
    pub(in crate::gpu) fn each_piece(
        &self,
        stream: &Arc<CudaStream>,
        source: &CudaSlice<u8>,
        bytes: usize,
        hand_on: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let copying = doing("copying the output back");
        assert!(source.len() >= bytes, "the source is too short");
        let mut pieces = self.pieces()?;
        self.context.bind_to_thread().map_err(&copying)?;
        let (source, _read) = source.device_ptr(stream);
        let length_of = |number: usize| bytes.saturating_sub(number * PIECE).min(PIECE);
        for number in 0..=bytes.div_ceil(PIECE) {
            let length = length_of(number);
            if length > 0 {
                let Piece { memory, used } = &mut pieces[number % 2];
                used.synchronize().map_err(&copying)?;
                let to = &mut memory.as_mut_slice().map_err(&copying)?[..length];
                let offset = (number * PIECE) as u64;
                // SAFETY: the source holds all bytes, checked above, and these start at `offset`.
                // The pinned memory lives as long as `self`, is not touched again before its event
                // completes, and dropping it waits for that event.
                unsafe { result::memcpy_dtoh_async(to, source + offset, stream.cu_stream()) }
                    .map_err(&copying)?;
                used.record(stream).map_err(&copying)?;
            }
            let Some(before) = number.checked_sub(1) else { continue };
            let Piece { memory, used } = &pieces[before % 2];
            used.synchronize().map_err(&copying)?;
            let from = &memory.as_slice().map_err(&copying)?[..length_of(before)];
            if hand_on(from).is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// Reads bytes of a file. `mapped` is the same range, mapped.
fn read_at(file: &File, to: &mut [u8], mapped: &[u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    {
        let _ = mapped;
        std::os::unix::fs::FileExt::read_exact_at(file, to, offset)
    }
    #[cfg(not(unix))]
    {
        let _ = (file, offset);
        to.copy_from_slice(mapped);
        Ok(())
    }
}

/// The error for an input that cannot be read.
fn reading(error: io::Error) -> Error {
    Error::Gpu { doing: "reading the input for it", code: None, message: error.to_string() }
}
