//! The kernel that packs FP8 activations.

use microscale_formats::activations::GROUP;

use super::PACK_COLUMNS;
use super::packing::{PACK, PACK_RESIDENT};
use crate::launch::{Converts, Family, Kernel, KernelId, Targets, kernel, resident};

/// Bytes of a token in a pack: its codes, and an f32 scale.
///
/// A pack has the codes of all tokens of a token tile, then their scales. A scale is for all of a
/// token, or for the columns of the pack.
///
/// Weights are decoded eight at a time: a word of each of the four chunks of a pack is an operand
/// of one multiplication. A piece of 16 bytes has the even codes of a word of each chunk, in the
/// order of chunks, and the next piece has the odd ones. The pieces of eight tokens make a core
/// matrix of `wgmma`. Core matrices are ordered by word, then parity, within eight tokens, so that
/// the first tokens come first.
pub const TOKEN_BYTES: u32 = PACK_COLUMNS + 4;

/// The kernel. In its family's table, it comes after the kernels of FP4.
pub(super) const KERNEL: Kernel = Kernel {
    targets: Targets::WithWgmma,
    ..resident(kernel("fp8_pack", None, PACK, Converts::Nothing), PACK_RESIDENT)
};

/// The kernel that packs activations.
pub const PACK_FP8: KernelId =
    KernelId::new(Family::Gemm, super::packing::PACKING_KERNELS + super::fp4::FP4_KERNELS);

/// Groups of columns that share a scale are packs.
const _: () = assert!(GROUP == PACK_COLUMNS as usize);
