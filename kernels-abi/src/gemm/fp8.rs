//! The kernels that pack FP8 activations.

use microscale_formats::Dtype;
use microscale_formats::activations::GROUP;

use super::packing::{PACK, PACK_RESIDENT};
use super::{PACK_COLUMNS, TILE_COLUMNS};
use crate::activations::{MOST_SHARED, MOST_WARPS};
use crate::launch::{Converts, Family, Kernel, KernelId, Launch, Targets, WARP, kernel, resident};

/// Bytes of a token in a pack: its codes, and an f32 scale.
///
/// The packs of a K-iteration, one or two, follow each other: the codes of each of them for all
/// tokens of a token tile, then the scales. A scale is for all of a token, or for the columns of
/// the pack.
///
/// Weights are decoded eight at a time, and four words are an operand of one multiplication: a word
/// of each of the four chunks of a pack, or all words of one chunk
/// ([`PackParams::by_block`](super::params::PackParams)). A piece of 16 bytes has the even codes of
/// these words, and the next piece has the odd ones. A token's eight pieces follow each other,
/// ordered by multiplication, then parity, and swizzled as `wgmma` reads rows of 128 bytes: the
/// number of a piece is XORed with the token's number in its eight tokens.
pub const TOKEN_BYTES: u32 = PACK_COLUMNS + 4;

/// Warps of a thread block of the kernel that decodes MXFP4: each finds the largest scale of one of
/// eight tokens.
pub const DECODING_WARPS: u32 = 8;
/// Its launch: shared memory has a word per warp.
const DECODE: Launch = (DECODING_WARPS * WARP, 0, DECODING_WARPS * 4);

/// Kernels in this table.
pub(super) const FP8_KERNELS: usize = 4;

/// The kernels. In their family's table, they come after the kernels of FP4.
pub(super) const KERNELS: [Kernel; FP8_KERNELS] = [
    Kernel {
        targets: Targets::WithWgmma,
        ..resident(kernel("fp8_pack", None, PACK, Converts::Nothing), PACK_RESIDENT)
    },
    quantizing_kernel("fp8_quantize_f16", Dtype::F16),
    quantizing_kernel("fp8_quantize_bf16", Dtype::Bf16),
    Kernel { targets: Targets::WithWgmma, ..kernel("fp8_pack_mxfp4", None, DECODE, Converts::E4m3) },
];

const fn quantizing_kernel(name: &'static str, dtype: Dtype) -> Kernel {
    let launch = (MOST_WARPS * WARP, 0, MOST_SHARED);
    let kernel = resident(kernel(name, Some(dtype), launch, Converts::E4m3), 2);
    Kernel { targets: Targets::WithWgmma, ..kernel }
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

/// The kernel that decodes activations in MXFP4, and packs them.
pub const PACK_MXFP4: KernelId = KernelId::new(Family::Gemm, AT + 3);

/// Chunks of a pack's columns.
pub const CHUNKS: u32 = 4;

/// The offset of the codes of pack `pack`, where K-iterations have `each` packs of `tile_tokens`
/// tokens.
#[inline(always)]
pub const fn codes_offset(tile_tokens: u32, each: u32, pack: u32) -> u64 {
    let [iteration, in_iteration] = iteration(each, pack);
    let bytes = (each * tile_tokens * TOKEN_BYTES) as u64;
    iteration as u64 * bytes + (in_iteration * tile_tokens * PACK_COLUMNS) as u64
}

/// The offset of the scales of pack `pack`, as in [`codes_offset`].
#[inline(always)]
pub const fn scales_offset(tile_tokens: u32, each: u32, pack: u32) -> u64 {
    let [iteration, in_iteration] = iteration(each, pack);
    let bytes = (each * tile_tokens * TOKEN_BYTES) as u64;
    iteration as u64 * bytes + (tile_tokens * (each * PACK_COLUMNS + in_iteration * 4)) as u64
}

/// The number of a pack's K-iteration, and the pack's number in it.
#[inline(always)]
const fn iteration(each: u32, pack: u32) -> [u32; 2] {
    if each == 1 { [pack, 0] } else { [pack / 2, pack % 2] }
}

/// Returns the multiplication of a word and its number there, given its chunk in the pack and its
/// number in the chunk. The function is its own inverse.
#[inline(always)]
pub const fn exchanged(by_block: bool, chunk: u32, word: u32) -> [u32; 2] {
    if by_block { [chunk, word] } else { [word, chunk] }
}

/// The offset in a pack's codes of the piece of token `in_tile` of its token tile that has the even
/// (0) or odd (1) codes of multiplication `multiplication`.
#[inline(always)]
pub const fn piece_offset(in_tile: u32, multiplication: u32, parity: u32) -> u32 {
    in_tile * PACK_COLUMNS + ((multiplication * 2 + parity) ^ (in_tile % TILE_COLUMNS)) * 16
}

/// Groups of columns that share a scale are packs.
const _: () = assert!(GROUP == PACK_COLUMNS as usize);
