//! Input: files, tensors, typed views.
//!
//! | file | contents |
//! |---|---|
//! | `checkpoint` | a file or a directory as a list of mapped tensors |
//! | `shard` | a mapped file of tensors, in any container |
//! | `header` | the header of a safetensors file; GGUF's is in `gguf` |
//! | `index`, `indexed`, `index_warnings` | the index; shards that follow it; where loaders differ |
//! | `tensor`, `values` | a stored tensor; its values as typed slices |
//! | `position`, `input` | where a tensor is stored; a tensor that several threads read band by band |
//! | `columns`, `transposed` | columns and transposes of matrices, and of a tensor's matrices |
//! | `experts` | splitting a tensor of all experts into one tensor per expert |
//! | `scale_grid`, `nibble_order` | codes under a grid of scales, and their values; codes in a byte |
//! | `bands`, `memory` | the parts of a tensor that are in memory at once, and the memory that they take |
//! | `config`, `description`, `json` | the JSON files, and how they describe the weights |
//! | `layer_words` | words for the formats of layers |

pub(crate) mod bands;
pub(crate) mod checkpoint;
pub(crate) mod columns;
pub(crate) mod config;
pub(crate) mod description;
pub(crate) mod experts;
pub(crate) mod header;
pub(crate) mod index;
pub(crate) mod index_warnings;
pub(crate) mod indexed;
pub(crate) mod input;
pub(crate) mod json;
pub(crate) mod layer_words;
pub(crate) mod memory;
pub(crate) mod nibble_order;
pub(crate) mod position;
pub(crate) mod scale_grid;
pub(crate) mod shard;
pub(crate) mod tensor;
pub(crate) mod transposed;
pub(crate) mod values;
