//! The sums of what quantizing lost.

use microscale_formats::errors::{ERROR_LANES, ERROR_PART};

use crate::launch::{Converts, Launch, THREADS, kernel, kinds};

const LAUNCH: Launch = (THREADS, THREADS / ERROR_LANES * ERROR_PART, 0);

kinds! {
    /// The sums of errors.
    Errors by dtype {
        /// Sums over values and their approximations in f32.
        Errors "errors" "" [LAUNCH, LAUNCH] Nothing;
    }
}
