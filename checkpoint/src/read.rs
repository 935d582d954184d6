//! Input: which files, which tensors, typed views.
//!
//! | file | what it knows |
//! |---|---|
//! | `checkpoint` | a file or a directory as a list of mapped tensors |
//! | `shard` | a file of tensors, mapped, in either container |
//! | `header` | the header of a safetensors file; GGUF's is in `gguf` |
//! | `index` | which shard has which tensor |
//! | `tensor`, `values` | a tensor as it is stored; its values as typed slices |
//! | `columns`, `transposed` | columns of matrices, and their transposes; those of a tensor |
//! | `experts` | experts that lie in one tensor, taken for tensors of their own |
//! | `scale_grid`, `nibble_order` | codes under a grid of scales, and their values; codes in a byte |
//! | `bands`, `memory` | the parts of a tensor that are in memory at once; the memory that they take |
//! | `config`, `description`, `json` | the JSON files, and what they say about weights |
//! | `layer_words` | words for the formats of layers |

pub(crate) mod bands;
pub(crate) mod checkpoint;
pub(crate) mod columns;
pub(crate) mod config;
pub(crate) mod description;
pub(crate) mod experts;
pub(crate) mod header;
pub(crate) mod index;
pub(crate) mod json;
pub(crate) mod layer_words;
pub(crate) mod memory;
pub(crate) mod nibble_order;
pub(crate) mod scale_grid;
pub(crate) mod shard;
pub(crate) mod tensor;
pub(crate) mod transposed;
pub(crate) mod values;
