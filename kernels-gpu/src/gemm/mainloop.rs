//! The mainloops: one file each.
//!
//! | file | contents |
//! |---|---|
//! | `mma` | every warp copies ahead, decodes and multiplies by `mma.sync`: every GPU |
//! | `wgmma` | producer warps copy; consumer warp groups decode and multiply by `wgmma` |
//!
//! A target has one of them. Targets with `wgmma` load `mma` kernels from an older target's file.

#[cfg(not(microscale_wgmma))]
pub(super) mod mma;
#[cfg(microscale_wgmma)]
pub(super) mod wgmma;
