//! The memory of an array: the device that it is on, and the owner that keeps it until it is
//! dropped.

use std::fmt;

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::dlpack::pack::Pack;

/// The memory that an array is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Memory of the CPU.
    Host,
    /// Memory of the GPU of this number.
    Gpu(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the CPU"),
            Self::Gpu(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// The owner of an array's memory.
pub(crate) enum Owner {
    /// An object of Python: the array itself, or the storage of a tensor.
    Object(Py<PyAny>),
    /// A tensor of DLPack.
    #[expect(dead_code, reason = "held for its drop, which gives the memory back")]
    Pack(Pack),
    /// A copy of the elements, for objects that do not promise to keep their memory.
    #[expect(dead_code, reason = "held for its memory")]
    Copy(Vec<u64>),
}

impl Owner {
    /// Copies `bytes` bytes from an address. Returns the owner of the copy, and the address of its
    /// first byte.
    ///
    /// # Safety
    /// `data` must be valid for reads of `bytes` bytes until the function returns.
    pub(crate) unsafe fn copy(data: *const u8, bytes: usize) -> PyResult<(Self, *mut u8)> {
        let mut copy = Vec::<u64>::new();
        let words = bytes.div_ceil(size_of::<u64>());
        copy.try_reserve_exact(words)
            .map_err(|_| PyMemoryError::new_err(format!("no memory for a copy of {bytes} bytes")))?;
        copy.resize(words, 0);
        let first = copy.as_mut_ptr().cast::<u8>();
        // SAFETY: the caller promises `bytes` bytes at `data`; `copy` has `words` words, which are
        // as long or longer, and is new, so that the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(data, first, bytes) };
        Ok((Self::Copy(copy), first))
    }

    /// The object of Python, if the owner is one.
    #[cfg(feature = "cuda")]
    pub(crate) fn object(&self) -> Option<&Py<PyAny>> {
        match self {
            Self::Object(object) => Some(object),
            Self::Pack(_) | Self::Copy(_) => None,
        }
    }
}
