//! The kernels that pack FP8 activations.

use microscale_formats::Dtype;
use microscale_formats::activations::GROUP;

use super::PACK_COLUMNS;
use super::packing::{PACK, PACK_RESIDENT};
use crate::launch::{Converts, Family, Kernel, KernelId, Targets, WARP, kernel, resident};

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

/// Kernels in this table.
pub(super) const FP8_KERNELS: usize = 3;

/// The kernels. In their family's table, they come after the kernels of FP4.
pub(super) const KERNELS: [Kernel; FP8_KERNELS] = [
    Kernel {
        targets: Targets::WithWgmma,
        ..resident(kernel("fp8_pack", None, PACK, Converts::Nothing), PACK_RESIDENT)
    },
    quantizing("fp8_quantize_f16", Dtype::F16),
    quantizing("fp8_quantize_bf16", Dtype::Bf16),
];

const fn quantizing(name: &'static str, dtype: Dtype) -> Kernel {
    let launch = (QUANTIZE_THREADS, 0, QUANTIZE_SHARED);
    Kernel { targets: Targets::WithWgmma, ..kernel(name, Some(dtype), launch, Converts::E4m3) }
}

/// The first one's number in its family's table.
pub(super) const AT: usize = super::packing::PACKING_KERNELS + super::fp4::FP4_KERNELS;

/// The kernel that packs activations.
pub const PACK_FP8: KernelId = KernelId::new(Family::Gemm, AT);

/// The kernel that quantizes activations in f16 or bf16, and packs them; `None` for f32.
pub const fn quantize(dtype: Dtype) -> Option<KernelId> {
    match dtype {
        Dtype::F32 => None,
        Dtype::F16 => Some(KernelId::new(Family::Gemm, AT + 1)),
        Dtype::Bf16 => Some(KernelId::new(Family::Gemm, AT + 2)),
    }
}

/// Threads per thread block of the kernels that quantize.
pub const QUANTIZE_THREADS: u32 = 8 * WARP;
/// Thread blocks per cluster of these kernels. A cluster has eight tokens, and its warps take turns
/// with their packs.
pub const QUANTIZE_CLUSTER: u32 = 8;
/// Shared memory of these kernels: the amax of each token, by warp and of the thread block.
pub const QUANTIZE_SHARED: u32 = (QUANTIZE_THREADS / WARP + 1) * 8 * 4;

/// Groups of columns that share a scale are packs.
const _: () = assert!(GROUP == PACK_COLUMNS as usize);
