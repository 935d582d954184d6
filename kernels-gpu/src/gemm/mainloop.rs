//! The mainloops: one file each.
//!
//! | file | contents |
//! |---|---|
//! | `mma` | every warp copies ahead, decodes and multiplies by `mma.sync`: every GPU |
//! | `block_scale` | every warp copies ahead and multiplies FP4 by FP4: RTX Blackwell |
//! | `wgmma` | producer warps copy; consumer warp groups decode and multiply by `wgmma` |
//! | `fp8` | the same with FP8 activations: weights are decoded to E4M3 |
//! | `warp_specialized` | producer warps, and what `wgmma` and `fp8` share |
//!
//! A target has `mma` or `wgmma`. Targets with `wgmma` load `mma` kernels from an older target's
//! file.

#[cfg(microscale_block_scale)]
pub(super) mod block_scale;
#[cfg(microscale_wgmma)]
pub(super) mod fp8;
#[cfg(not(microscale_wgmma))]
pub(super) mod mma;
#[cfg(microscale_wgmma)]
mod warp_specialized;
#[cfg(microscale_wgmma)]
pub(super) mod wgmma;
