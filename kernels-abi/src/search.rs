//! Quantizing with searched block scales.

use crate::launch::{Converts, Launch, THREADS, kernel, kinds};

/// Elements that a lane has.
pub const SEARCH_EACH: u32 = 16;

const LAUNCH: Launch = (THREADS, THREADS * SEARCH_EACH, 0);

kinds! {
    /// The quantizers that search scales. Rows may start anywhere.
    Search by dtype {
        /// MXFP4.
        Mxfp4 "mxfp4_search" "" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4 by the plan in the options.
        Nvfp4Given "nvfp4_search" "_given" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4 by the plan in the tensor's slot.
        Nvfp4Planned "nvfp4_search" "_planned" [LAUNCH, LAUNCH] Nothing;
    }
}
