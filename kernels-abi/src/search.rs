//! Quantizing with searched block scales.

use crate::launch::{Converts, Launch, THREADS, kernel, kinds};

/// Elements that a lane has.
pub const SEARCH_EACH: u32 = 16;

const LAUNCH: Launch = (THREADS, THREADS * SEARCH_EACH, 0);

kinds! {
    /// The quantizers that search scales. Rows may start anywhere.
    Search by dtype {
        /// MXFP4 with ties to even.
        Mxfp4Even "mxfp4_search" "_even" [LAUNCH, LAUNCH] Nothing;
        /// MXFP4 with ties away from zero or toward it, as the options say.
        Mxfp4OtherTies "mxfp4_search" "_other_ties" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4 by the plan in the options.
        Nvfp4Given "nvfp4_search" "_given" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4 by the plan in the tensor's slot.
        Nvfp4Planned "nvfp4_search" "_planned" [LAUNCH, LAUNCH] Nothing;
    }
}
