//! Tensors that are not contiguous in their storage, such as transposes and slices.
//!
//! All code that reads tensors expects them contiguous in a file. So they are copied to a temporary
//! file, which is mapped like the original.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;

use memmap2::Mmap;

/// The elements of a tensor in a file, checked to lie inside it. There is at least one.
pub(crate) struct Elements {
    /// The offset of the first element in bytes.
    pub(super) start: usize,
    /// Bytes per element.
    pub(super) each: usize,
    pub(super) shape: Vec<usize>,
    /// Bytes from one element to the next in each dimension.
    pub(super) strides: Vec<usize>,
}

/// A temporary file of copied elements.
pub(crate) struct Copies {
    file: BufWriter<File>,
    end: usize,
}

impl Copies {
    /// Creates a file without a name. It disappears with the process.
    ///
    /// # Errors
    /// The errors of the operating system.
    pub(crate) fn create() -> io::Result<Self> {
        Ok(Self { file: BufWriter::with_capacity(1 << 20, tempfile::tempfile()?), end: 0 })
    }

    /// Appends a tensor's elements in order. Returns their range in the temporary file.
    ///
    /// # Errors
    /// The errors of the operating system.
    pub(crate) fn append(&mut self, bytes: &[u8], elements: &Elements) -> io::Result<Range<usize>> {
        let (start, Elements { each, shape, strides, .. }) = (self.end, elements);
        let mut index = vec![0usize; shape.len()];
        let mut at = elements.start;
        loop {
            self.file.write_all(bytes.get(at..at + each).unwrap_or_default())?;
            self.end += each;
            // The next index: increment the last dimension that has more elements.
            let Some(dimension) = (0..shape.len()).rfind(|i| index[*i] + 1 < shape[*i]) else { break };
            index[dimension] += 1;
            at += strides[dimension];
            for i in dimension + 1..shape.len() {
                at -= index[i] * strides[i];
                index[i] = 0;
            }
        }
        // Tensors of every dtype start at a multiple of its size.
        let range = start..self.end;
        let padded = self.end.next_multiple_of(64);
        self.file.write_all(&[0; 64][..padded - self.end])?;
        self.end = padded;
        Ok(range)
    }

    /// Maps the file.
    ///
    /// # Errors
    /// The errors of the operating system.
    pub(crate) fn map(self) -> io::Result<Mmap> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        // SAFETY: the map is read-only and owns its pages until it is dropped. No other process can
        // open the file, because it has no name. The bytes are only read as integers and floats,
        // for which every bit pattern is valid.
        unsafe { Mmap::map(&file) }
    }
}
