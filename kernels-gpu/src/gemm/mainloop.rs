//! The mainloops: one file each.
//!
//! | file | contents |
//! |---|---|
//! | `mma` | every warp copies ahead, decodes and multiplies by `mma.sync`: every GPU |
//! | `block_scale` | every warp copies ahead and multiplies FP4 by FP4: RTX Blackwell |
//! | `tcgen05` | producer warps copy; one thread issues products of FP4 and FP4: B200 |
//! | `wgmma` | producer warps copy and pack; consumer warp groups decode and multiply by `wgmma` |
//! | `fp8` | the same with FP8 activations: weights are decoded to E4M3 |
//! | `fp8_block` | `fp8` with the sum of each block times its scale: few tokens, MXFP4 weights |
//! | `fp8_shared` | `fp8` with decoded weights that warp groups share: many tokens |
//! | `fp8_fast` | `fp8` with sums of all of K in the tensor cores (fast accumulation) |
//! | `warp_specialized` | producer warps, and the loop over work tiles of the last five |
//!
//! A target has `mma` or `wgmma`. Targets with `wgmma` load `mma` kernels from an older target's
//! file.

#[cfg(microscale_block_scale)]
pub(super) mod block_scale;
#[cfg(microscale_wgmma)]
pub(super) mod fp8;
#[cfg(microscale_wgmma)]
pub(super) mod fp8_block;
#[cfg(microscale_wgmma)]
pub(super) mod fp8_fast;
#[cfg(microscale_wgmma)]
pub(super) mod fp8_shared;
#[cfg(not(microscale_wgmma))]
pub(super) mod mma;
#[cfg(microscale_tcgen05)]
pub(super) mod tcgen05;
#[cfg(microscale_wgmma)]
mod warp_specialized;
#[cfg(microscale_wgmma)]
pub(super) mod wgmma;
