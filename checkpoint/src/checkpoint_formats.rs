//! Conventions of files: what a quantized tensor becomes in a file, and which config goes with it.
//!
//! A convention is a file with its [`Convention`](spec::FormatSpec), and a row of the [table](table):
//! writing, reading, converting and the doctor go by that. This is about files and not about arithmetic:
//! codes and scales of any [`microscale::Convention`] are stored so, to the byte. Only a global scale may
//! change, by a rounding: [`Storage::stored_global_scale`](storage::Storage::stored_global_scale).
//!
//! | file | what it knows |
//! |---|---|
//! | `table` | all conventions |
//! | `compressed_tensors`, `modelopt`, `gpt_oss`, `gguf`, `comfyui` | one each: names, dtypes, config |
//! | `deepseek`, `quark` | one each that is read alone |
//! | `fp8_block` | one that converting alone writes, exactly |
//! | `convention`, `storage`, `group` | a convention; the storage of a format; layers stored alike |
//! | `ignored`, `targets` | the layers that a config must exempt, and those of each format |
//! | `packed` | quantized tensors in files: what belongs together, and in which format |
//! | `tiles` | block scales in tiles of 128×4 |
//! | `scaled` | codes of eight bits under scales, which are read alone |

pub(crate) mod comfyui;
pub(crate) mod compressed_tensors;
pub(crate) mod deepseek;
pub(crate) mod fp8_block;
pub(crate) mod gguf;
pub(crate) mod gpt_oss;
pub(crate) mod group;
pub(crate) mod ignored;
pub(crate) mod modelopt;
pub(crate) mod packed;
pub(crate) mod quark;
pub(crate) mod scaled;
pub(crate) mod spec;
pub(crate) mod storage;
pub(crate) mod table;
pub(crate) mod targets;
pub(crate) mod tiles;
