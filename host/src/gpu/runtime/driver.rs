//! Errors of the driver, and its capture mode: needed wherever the driver is called.

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUstreamCaptureMode};

use crate::error::{Error, OUT_OF_MEMORY, Result};

const _: () = assert!(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32 == OUT_OF_MEMORY);

/// Turns a driver's error into ours, saying what was being done.
pub fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Gpu { doing, code: Some(error.0 as i32), message: format!("{error:?}") }
}

/// While it lives, this thread may do what a capture of one of its streams would forbid, such as loading a
/// module: none of it is captured.
#[doc(hidden)]
#[derive(Debug)]
pub struct Relaxed {
    before: CUstreamCaptureMode,
}

impl Relaxed {
    /// The driver must be loaded.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new() -> Result<Self> {
        Ok(Self { before: exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)? })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // The driver took this mode before. An error that it has meanwhile comes back from the next call.
        let _ = exchange(self.before);
    }
}

/// Sets this thread's capture mode and returns the one before.
fn exchange(mut mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode> {
    // SAFETY: the driver is loaded, for there is a context, and writes the mode before to where it reads the
    // new one.
    let done = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    done.result().map_err(doing("setting what a capture forbids"))?;
    Ok(mode)
}
