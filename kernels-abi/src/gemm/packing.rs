//! The kernels before and after a product: packing activations, and parts of activations in f32.

use microscale_formats::Dtype;

use crate::epilogue::ELEMENTWISE;
use crate::launch::{Converts, Family, Kernel, KernelId, Launch, kernel, resident};

/// Kernels in this table.
pub(super) const PACKING_KERNELS: usize = 4;

/// They come first in their family's table.
pub(super) const KERNELS: [Kernel; PACKING_KERNELS] = [
    resident(kernel("pack_f16", Some(Dtype::F16), PACK, Converts::Nothing), PACK_RESIDENT),
    resident(kernel("pack_bf16", Some(Dtype::Bf16), PACK, Converts::Nothing), PACK_RESIDENT),
    kernel("split_f32", Some(Dtype::F32), ELEMENTWISE, Converts::Nothing),
    kernel("merge_f32", Some(Dtype::F32), ELEMENTWISE, Converts::Nothing),
];

/// The kernel that packs activations in f16 or bf16; `None` for f32.
pub const fn pack(dtype: Dtype) -> Option<KernelId> {
    match dtype {
        Dtype::F32 => None,
        Dtype::F16 => Some(KernelId::new(Family::Gemm, 0)),
        Dtype::Bf16 => Some(KernelId::new(Family::Gemm, 1)),
    }
}

/// The kernel that splits activations in f32 into parts in bf16
/// ([`SplitGrid`](crate::epilogue::SplitGrid)).
pub const SPLIT: KernelId = KernelId::new(Family::Gemm, 2);

/// The kernel that adds up the products of such parts ([`MergeGrid`](crate::epilogue::MergeGrid)).
pub const MERGE: KernelId = KernelId::new(Family::Gemm, 3);

/// Threads per thread block of the packing kernels.
pub const PACK_THREADS: u32 = 96;
/// Thread blocks of the packing kernels that a multiprocessor has registers for, 40 per thread: 12
/// warps on each of its four schedulers.
pub(super) const PACK_RESIDENT: u32 = 16;
/// The launch of the packing kernels. Their parameters say the number of thread blocks.
pub(super) const PACK: Launch = (PACK_THREADS, 0, 0);
