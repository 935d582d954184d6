//! The mainloops: one file each.
//!
//! | file | contents |
//! |---|---|
//! | `mma` | every warp copies ahead, decodes and multiplies by `mma.sync`: every GPU |
//! | `block_scale` | every warp copies ahead and multiplies FP4 by FP4: RTX Blackwell |
//! | `wgmma` | producer warps copy; consumer warp groups decode and multiply by `wgmma` |
//!
//! A target has `mma` or `wgmma`. Targets with `wgmma` load `mma` kernels from an older target's
//! file.

#[cfg(microscale_block_scale)]
pub(super) mod block_scale;
#[cfg(not(microscale_wgmma))]
pub(super) mod mma;
#[cfg(microscale_wgmma)]
pub(super) mod wgmma;
