//! The hardware layer: instructions that Rust has no words for, as functions.
//!
//! | file | contents |
//! |---|---|
//! | [`ptx`] | lane-local instructions: inline assembly |
//! | [`shared`] | shared memory: loads, stores, copies that run ahead |
//! | [`warp`] | convergent operations of a warp: LLVM intrinsics |
//! | `warp_group` | `wgmma`, and the registers and barriers of warp groups |
//! | `tcgen05` | `tcgen05`, and tensor memory |
//! | `mbarrier` | barriers in shared memory on which copies arrive |
//! | `cluster` | thread blocks of a cluster: barriers, and each other's shared memory |
//!
//! LLVM does not know that inline assembly can be convergent. So convergent assembly is allowed in
//! this layer only, and only for instructions without an LLVM intrinsic that Rust can call:
//! `warp_group`, `tcgen05` and `cluster`. Kernels call them in uniform control flow. `cargo xtask
//! check-ptx` proves it of the compiled text.

#[cfg(any(microscale_tcgen05, microscale_wgmma))]
pub(crate) mod cluster;
#[cfg(any(microscale_tcgen05, microscale_wgmma))]
pub(crate) mod mbarrier;
pub(crate) mod ptx;
pub(crate) mod shared;
#[cfg(microscale_tcgen05)]
pub(crate) mod tcgen05;
pub(crate) mod warp;
#[cfg(microscale_wgmma)]
pub(crate) mod warp_group;
