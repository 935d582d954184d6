//! PyTorch files (`.bin`, `.pt`, `.pth`): dictionaries of tensors from `torch.save`, read without
//! executing the pickle.
//!
//! A file is a zip archive of uncompressed entries: a pickle, `data.pkl`, and the bytes of each
//! storage, `data/KEY`. A pickle is a program. The interpreter here supports only the instructions
//! and the few functions that put tensors into dictionaries. Anything else is an error that names
//! it. Nothing is imported, called or looked up.
//!
//! | file | contents |
//! |---|---|
//! | `archive` | the entries of a zip archive, and their bytes |
//! | `pickle` | the interpreter of pickle instructions |
//! | `value` | the values that instructions make, and the names that they may use |
//! | `tensors` | the tensors of a dictionary, and the bytes of each |
//! | `strided` | tensors that are not contiguous |

pub(crate) mod archive;
pub(crate) mod pickle;
pub(crate) mod strided;
pub(crate) mod tensors;
pub(crate) mod value;

/// The result of parsing. The error is a sentence about the defect.
type Parsed<T> = Result<T, String>;
