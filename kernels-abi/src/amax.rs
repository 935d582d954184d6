//! A tensor's largest magnitude, and the plan that NVFP4 makes of it.

use crate::launch::{Converts, Launch, THREADS, WARP, WARP_ELEMENTS, kernel, kinds};

/// Pieces of [`WARP_ELEMENTS`] that a warp goes through.
pub const AMAX_PIECES: u32 = 4;

const LAUNCH: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS * AMAX_PIECES, 0);
const ONE_WARP: Launch = (WARP, WARP, 0);

kinds! {
    /// The kernels for the amax and for NVFP4's plan. On an H200, one kernel for all rows was up to
    /// 1 % slower for rows on 16 bytes, and 4 to 6 % slower for others.
    Amax by dtype {
        /// The largest magnitude, every row on 16 bytes.
        Aligned "amax" "_aligned" [LAUNCH, LAUNCH] Nothing;
        /// The largest magnitude, rows anywhere.
        Unaligned "amax" "_unaligned" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4's plan from the amax in a tensor's slot, or from the global scale there.
        Nvfp4Plan "nvfp4_plan" "" [ONE_WARP, ONE_WARP] Nothing;
    }
}
