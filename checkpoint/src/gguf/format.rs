//! The numbers and keys of the container.

/// The first bytes of every file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// The version to write. Version 2 does not differ in anything that microscale reads.
pub(crate) const VERSION: u32 = 3;

/// The alignment of the data section and of each tensor, if the metadata has none.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

/// The longest tensor name in bytes: ggml's 64 minus the terminating zero.
pub(crate) const MAX_NAME: usize = 63;

/// The metadata keys that microscale uses.
pub(crate) const ALIGNMENT: &str = "general.alignment";
pub(crate) const ARCHITECTURE: &str = "general.architecture";
pub(crate) const FILE_TYPE: &str = "general.file_type";
/// The number of files that a model was split into, and the number of tensors in all of them.
pub(crate) const SPLIT_COUNT: &str = "split.count";
pub(crate) const SPLIT_TENSORS: &str = "split.tensors.count";
pub(crate) const QUANTIZATION_VERSION: &str = "general.quantization_version";

/// The result of parsing. The error is a sentence about the defect; callers add file, tensor and
/// key.
pub(crate) type Parsed<T> = Result<T, String>;
