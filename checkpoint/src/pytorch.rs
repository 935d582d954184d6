//! PyTorch's files (`.bin`, `.pt`, `.pth`): what `torch.save` writes of a dictionary of tensors, read without running a pickle.
//!
//! A file is a zip archive of stored entries: a pickle, `data.pkl`, and the bytes of each storage, `data/KEY`. A pickle is a
//! program. Of its instructions those are followed that put tensors into dictionaries, and of the functions that it may call a few
//! are known; all else is an error that names it. Nothing is imported, called or looked up.
//!
//! | file | what it knows |
//! |---|---|
//! | `archive` | the entries of a zip archive, and their bytes |
//! | `pickle` | the instructions of a pickle |
//! | `value` | the values that they make, and the names that they may use |
//! | `tensors` | the tensors of a dictionary, and the bytes of each |
//! | `strided` | tensors whose elements do not follow each other |

pub(crate) mod archive;
pub(crate) mod pickle;
pub(crate) mod strided;
pub(crate) mod tensors;
pub(crate) mod value;

/// A result whose error is what is wrong, in words.
type Parsed<T> = Result<T, String>;
