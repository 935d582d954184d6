//! Tensors whose elements do not follow each other in their storages: transposed ones, or parts of others. Everything that reads
//! tensors takes them as they lie in a file, so they are put into a temporary one, which is mapped like their own.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;

use memmap2::Mmap;

/// The elements of a tensor in a file, checked to be there. There is one at least.
pub(crate) struct Elements {
    /// The offset of the first one.
    pub(super) start: usize,
    /// Bytes of each.
    pub(super) each: usize,
    pub(super) shape: Vec<usize>,
    /// Bytes from one to the next, in each dimension.
    pub(super) strides: Vec<usize>,
}

/// A temporary file of elements.
pub(crate) struct Copies {
    file: BufWriter<File>,
    end: usize,
}

impl Copies {
    /// A file without a name, which is gone with the process.
    ///
    /// # Errors
    /// The errors of the system.
    pub(crate) fn create() -> io::Result<Self> {
        Ok(Self { file: BufWriter::with_capacity(1 << 20, tempfile::tempfile()?), end: 0 })
    }

    /// Writes a tensor's elements one after the other, and returns their place.
    ///
    /// # Errors
    /// The errors of the system.
    pub(crate) fn append(&mut self, bytes: &[u8], elements: &Elements) -> io::Result<Range<usize>> {
        let (start, Elements { each, shape, strides, .. }) = (self.end, elements);
        let mut index = vec![0usize; shape.len()];
        let mut at = elements.start;
        loop {
            self.file.write_all(bytes.get(at..at + each).unwrap_or_default())?;
            self.end += each;
            // The next index: the last dimension that has more of them.
            let Some(dimension) = (0..shape.len()).rfind(|i| index[*i] + 1 < shape[*i]) else { break };
            index[dimension] += 1;
            at += strides[dimension];
            for i in dimension + 1..shape.len() {
                at -= index[i] * strides[i];
                index[i] = 0;
            }
        }
        // Tensors of any dtype begin at a multiple of its size.
        let range = start..self.end;
        let padded = self.end.next_multiple_of(64);
        self.file.write_all(&[0; 64][..padded - self.end])?;
        self.end = padded;
        Ok(range)
    }

    /// Maps what was written.
    ///
    /// # Errors
    /// The errors of the system.
    pub(crate) fn map(self) -> io::Result<Mmap> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        // SAFETY: the map is private and read-only, and nobody else can open the file, which has no name; the bytes are only
        // ever read as integers and floats, for which every bit pattern is valid.
        unsafe { Mmap::map(&file) }
    }
}
