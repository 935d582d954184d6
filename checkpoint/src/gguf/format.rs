//! The numbers and keys of the container.

/// The first bytes of every file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// The version that is written. Version 2 differs in nothing that is read here.
pub(crate) const VERSION: u32 = 3;

/// The alignment of the data, and of each tensor in it, if the metadata gives none.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

/// A name's most bytes: ggml's 64, with a zero at the end.
pub(crate) const MAX_NAME: usize = 63;

/// The keys with a meaning here.
pub(crate) const ALIGNMENT: &str = "general.alignment";
pub(crate) const ARCHITECTURE: &str = "general.architecture";
pub(crate) const FILE_TYPE: &str = "general.file_type";
/// The number of files that a model was split into, and of the tensors in all of them.
pub(crate) const SPLIT_COUNT: &str = "split.count";
pub(crate) const SPLIT_TENSORS: &str = "split.tensors.count";
pub(crate) const QUANTIZATION_VERSION: &str = "general.quantization_version";

/// The result of parsing. The error is a sentence about the defect, to which callers add the file, and the
/// tensor or key.
pub(crate) type Parsed<T> = Result<T, String>;
