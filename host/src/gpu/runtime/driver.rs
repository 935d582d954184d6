//! Driver errors and the driver's capture mode, for all code that calls the driver.

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUstreamCaptureMode};

use crate::error::{Error, OUT_OF_MEMORY, Result};

const _: () = assert!(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32 == OUT_OF_MEMORY);

/// Converts a driver error. `doing` names the operation that failed.
pub fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Gpu { doing, code: Some(error.0 as i32), message: format!("{error:?}") }
}

/// While it lives, this thread may make calls that a capture of one of its streams would forbid.
///
/// Loading a module is one such call. None of these calls is captured.
#[doc(hidden)]
#[derive(Debug)]
pub struct Relaxed {
    before: CUstreamCaptureMode,
}

impl Relaxed {
    /// Relaxes this thread's capture mode. The driver must be loaded.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new() -> Result<Self> {
        Ok(Self { before: exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)? })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // The driver accepted this mode before. If the driver fails now, its next call returns the
        // error.
        let _ = exchange(self.before);
    }
}

/// Sets this thread's capture mode and returns the previous one.
fn exchange(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode> {
    // SAFETY: the driver is loaded, because there is a context. The driver reads the new mode from
    // `mode` and writes the previous one to it; `mode` outlives the call.
    let done = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    done.result().map_err(doing("setting what a capture forbids"))?;
    Ok(mode)
}
