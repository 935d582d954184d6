//! A tensor's largest magnitude, and the plan that NVFP4 makes of it.

use crate::launch::{Converts, Launch, THREADS, WARP, WARP_ELEMENTS, kernel, kinds};

/// Pieces of [`WARP_ELEMENTS`] that a warp goes through.
pub const AMAX_PIECES: u32 = 4;

const LAUNCH: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS * AMAX_PIECES, 0);
const ONE_WARP: Launch = (WARP, WARP, 0);

kinds! {
    /// The kernels for amax and what follows from it. Rows may start anywhere.
    Amax by dtype {
        /// The largest magnitude.
        Amax "amax" "" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4's plan from the amax in a tensor's slot.
        Nvfp4Plan "nvfp4_plan" "" [ONE_WARP, ONE_WARP] Nothing;
    }
}
