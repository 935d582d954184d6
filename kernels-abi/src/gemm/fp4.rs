//! The kernels before a product of FP4 weights and FP4 activations.
//!
//! Where tensor cores multiply FP4 (`mma.sync` with block scales, `tcgen05`), a kernel packs the
//! activations. Elsewhere it decodes them to f16 or bf16, which is exact, and a product of 16-bit
//! activations follows: it packs them, too, for products that need packed activations. All these
//! kernels also write the factor of the sums: alpha times both global scales.

use microscale_formats::{Dtype, Format, fp4_dot};

use super::PACK_COLUMNS;
use super::packing::{PACK, PACK_RESIDENT};
use crate::epilogue::ELEMENTWISE;
use crate::grid::ScaleGrid;
use crate::launch::{Converts, Family, Kernel, KernelId, Targets, kernel, resident};
use crate::memory::ApplyGlobal;

/// Bytes of a token's scales in a pack: a word per k-step of 64.
pub const TOKEN_SCALE_BYTES: u32 = 8;

/// Bytes of a token in a pack: its codes, and its scales.
///
/// A pack has the codes of all tokens of a token tile, then their scales. A token's codes are four
/// chunks of 16 bytes. Chunk `c` of token `t` lies in place `c ^ (t / 2 % 4)` (swizzled), so that
/// the eight rows of a matrix of `ldmatrix` lie in different banks. A scale word has the scales of
/// 64 elements, in order, the first in the lowest byte: four in NVFP4, two in MXFP4. Scales of
/// elements after the end are zeros.
///
/// For `tcgen05`, the packs of a K-iteration lie in one: first a row of 128 bytes of codes per
/// token, whose chunk `c` lies in place `c ^ t % 8`, then atoms of scales. An atom has 512 bytes:
/// 16 for each of 32 tokens, a word for each of four columns of tensor memory. With `n` tokens in a
/// token tile, column `j` of all atoms has the scale words of k-step `j / (n / 32)`, of 32 tokens
/// from `j % (n / 32) * 32` on. In MXFP4, such a word has the scales of two k-steps, and the second
/// half of the atoms is unused.
pub const TOKEN_BYTES: u32 = PACK_COLUMNS / 2 + TOKEN_SCALE_BYTES;

/// Bytes of an atom of scales.
pub const ATOM_BYTES: u32 = 512;
/// Rows or tokens of an atom of scales, with a word for each of the atom's columns.
pub const ATOM_ROWS: u32 = 32;

/// Kernels in this table.
pub(super) const FP4_KERNELS: usize = 10;

const fn packing(name: &'static str, targets: Targets) -> Kernel {
    let kernel = resident(kernel(name, None, PACK, Converts::Nothing), PACK_RESIDENT);
    Kernel { targets, ..kernel }
}

const fn decoding(name: &'static str, dtype: Dtype) -> Kernel {
    kernel(name, Some(dtype), ELEMENTWISE, Converts::Nothing)
}

const fn decoding_packed(name: &'static str, dtype: Dtype) -> Kernel {
    kernel(name, Some(dtype), PACK, Converts::Nothing)
}

pub(super) const KERNELS: [Kernel; FP4_KERNELS] = [
    packing("fp4_pack_nvfp4", Targets::WithBlockScale),
    packing("fp4_pack_mxfp4", Targets::WithBlockScale),
    packing("fp4_pack_nvfp4_tcgen05", Targets::WithTcgen05),
    packing("fp4_pack_mxfp4_tcgen05", Targets::WithTcgen05),
    decoding("fp4_decode_nvfp4_f16", Dtype::F16),
    decoding("fp4_decode_nvfp4_bf16", Dtype::Bf16),
    decoding("fp4_decode_mxfp4_bf16", Dtype::Bf16),
    decoding_packed("fp4_decode_pack_nvfp4_f16", Dtype::F16),
    decoding_packed("fp4_decode_pack_nvfp4_bf16", Dtype::Bf16),
    decoding_packed("fp4_decode_pack_mxfp4_bf16", Dtype::Bf16),
];

/// The place of the table in its family's.
const FIRST: usize = super::packing::PACKING_KERNELS;

/// The kernel that packs activations in a format for `mma.sync` with block scales, or for
/// `tcgen05`; `None` if tensor cores do not multiply the format.
pub(super) const fn pack(format: Format, tcgen05: bool) -> Option<KernelId> {
    let of_format = match format {
        Format::Nvfp4 => 0,
        Format::Mxfp4 => 1,
        _ => return None,
    };
    Some(KernelId::new(Family::Gemm, FIRST + of_format + if tcgen05 { 2 } else { 0 }))
}

/// The kernels that decode activations to 16 bits.
#[derive(Clone, Copy, Debug)]
pub struct Decoders {
    /// The dtype that they decode to.
    pub dtype: Dtype,
    /// The kernel that writes rows.
    pub rows: KernelId,
    /// The kernel that packs them.
    pub packed: KernelId,
}

/// The kernels that decode activations in a format for a product with results in a dtype. MXFP4 has
/// a wider range than f16, and becomes bf16. `None` for formats that are not multiplied.
pub const fn decoders(format: Format, results: Dtype) -> Option<Decoders> {
    let (index, dtype) = match (format, results) {
        (Format::Nvfp4, Dtype::F16) => (0, Dtype::F16),
        (Format::Nvfp4, _) => (1, Dtype::Bf16),
        (Format::Mxfp4, _) => (2, Dtype::Bf16),
        _ => return None,
    };
    let rows = KernelId::new(Family::Gemm, FIRST + 4 + index);
    let packed = KernelId::new(Family::Gemm, FIRST + 7 + index);
    Some(Decoders { dtype, rows, packed })
}

/// Parameters of these kernels besides the sizes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Fp4Params {
    /// Positions of the activations' scales.
    pub scales: ScaleGrid,
    /// Eights of activations in all rows: one per thread of the kernels that decode.
    pub eights: u64,
    /// Factor of the results.
    pub alpha: f32,
    /// Matrices of weights, each with a global scale and a factor: 1, or the number of experts.
    pub matrices: u32,
    /// Global scales of activations: one for all matrices, or one for each.
    pub activation_slots: u32,
    /// How the global scales of the weights are applied.
    pub weights: ApplyGlobal,
    /// How the global scales of the activations are applied.
    pub activations: ApplyGlobal,
    /// Always 0. Without it, there would be four bytes of padding.
    pub reserved: u32,
}

impl Fp4Params {
    /// The factor of a matrix' sums, given the global scales of its activations and its weights.
    #[inline(always)]
    pub fn factor(&self, activations: f32, weights: f32) -> f32 {
        let globals = [self.activations.global_scale(activations), self.weights.global_scale(weights)];
        fp4_dot::factor(self.alpha, globals)
    }
}
