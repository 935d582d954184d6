//! Scale bytes from one layout to the other.

use crate::launch::{Converts, Launch, THREADS, kernel, kinds};

/// Four bytes of the swizzled side a thread.
const LAUNCH: Launch = (THREADS, THREADS * 4, 0);

kinds! {
    /// The conversions of scale layouts.
    Layout {
        /// From linear to swizzled.
        ToSwizzled "scales_to_swizzled" LAUNCH Nothing;
        /// From swizzled to linear.
        ToLinear "scales_to_linear" LAUNCH Nothing;
    }
}
