//! Checkpoint formats: the stored tensors that a quantized tensor becomes, and the config for them.
//!
//! A checkpoint format is a file with its [`FormatSpec`](spec::FormatSpec), and a row of the
//! [table]. Writing, reading, converting and the doctor go by that. This module is about
//! files and not about arithmetic: it stores codes and scales of any [`microscale::Numerics`]
//! unchanged. Only a global scale may be rounded, by
//! [`Storage::stored_global_scale`](storage::Storage::stored_global_scale).
//!
//! | file | contents |
//! |---|---|
//! | `table` | all checkpoint formats |
//! | `compressed_tensors`, `modelopt`, `gpt_oss`, `gguf`, `comfyui` | one checkpoint format each |
//! | `deepseek`, `quark` | read-only checkpoint formats |
//! | `fp8_block` | a checkpoint format that only `convert` writes |
//! | `spec`, `storage`, `part_name` | a row of the table; the storage of a format; names of parts |
//! | `group` | layers with the same storage |
//! | `inputs` | the quantization of inputs that a config declares |
//! | `ignored`, `targets` | layers that a config must exempt, and the layers of each format |
//! | `not_converted`, `patterns` | layers that a config exempts; names and patterns in such lists |
//! | `packed`, `ownership` | quantized tensors in files; the owner of each stored part |
//! | `strays` | codes without scales, and scales without codes |
//! | `tiles` | block scales in tiles of 128×4 |
//! | `hadamard` | the transforms that are written and undone: block Hadamard, of layers' inputs |
//! | `undone` | checks that transforms are undone or run |
//! | `transforms` | rotations that weights and activations are stored or computed with |
//! | `w8_sources` | FP8 and INT8 weights under scales, which are read-only |
//! | `open` | `Checkpoint::open` |

pub(crate) mod comfyui;
pub(crate) mod compressed_tensors;
pub(crate) mod deepseek;
pub(crate) mod fp8_block;
pub(crate) mod gguf;
pub(crate) mod gpt_oss;
pub(crate) mod group;
pub(crate) mod hadamard;
pub(crate) mod ignored;
pub(crate) mod inputs;
pub(crate) mod modelopt;
pub(crate) mod not_converted;
pub(crate) mod open;
pub(crate) mod ownership;
pub(crate) mod packed;
pub(crate) mod part_name;
pub(crate) mod patterns;
pub(crate) mod quark;
pub(crate) mod spec;
pub(crate) mod storage;
pub(crate) mod strays;
pub(crate) mod table;
pub(crate) mod targets;
pub(crate) mod tiles;
pub(crate) mod transforms;
pub(crate) mod undone;
pub(crate) mod w8_sources;
