//! GPUs, and work on the streams of other libraries. Only functions that document it wait.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use microscale::gpu::cudarc::driver::sys::{self, CUcontext, CUpointer_attribute, CUstreamCaptureStatus};
use microscale::gpu::cudarc::driver::{CudaStream, DriverError};
use microscale::gpu::{self, Gpu, Relaxed, doing};
use microscale::{Element, Result};
use pyo3::marker::Ungil;
use pyo3::prelude::*;

use crate::array::{Array, Kind, Place};
use crate::errors::{error, of_tensors, type_error};

/// The GPUs that were asked for, by number. None is let go of: their kernels are compiled once a
/// process.
static GPUS: Mutex<Option<HashMap<usize, &'static Gpu>>> = Mutex::new(None);

/// Set once there is a driver: looking for it takes longer than a call.
static DRIVER: OnceLock<()> = OnceLock::new();

/// Makes sure that the driver can be called.
///
/// # Errors
/// The errors of [`gpu::device_count`].
fn require_driver() -> Result<()> {
    if DRIVER.get().is_none() {
        gpu::device_count()?;
        DRIVER.get_or_init(|| ());
    }
    Ok(())
}

/// A GPU in its primary context, which other libraries use too.
///
/// # Errors
/// The errors of [`gpu::primary_context`] and [`Gpu::from_stream`].
fn gpu_of(number: usize) -> Result<&'static Gpu> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&number) {
        return Ok(gpu);
    }
    let context = gpu::primary_context(number)?;
    // SAFETY: the only memory of cudarc in this context are reports, and each is used on one
    // stream.
    unsafe { context.disable_event_tracking() };
    // A stream of this thread may be being captured, into which nothing of this belongs.
    let _relaxed = Relaxed::new()?;
    let opened = Gpu::from_stream(context.default_stream())?;
    // Memory that was cleared on the default stream is clear on all others from here on.
    opened.stream().synchronize().map_err(doing("making it ready"))?;
    let opened: &'static Gpu = Box::leak(Box::new(opened));
    gpus.insert(number, opened);
    Ok(opened)
}

/// Restores this thread's context when it is dropped. CUDA's runtime takes the current device from
/// it.
struct CurrentContext(CUcontext);

impl CurrentContext {
    /// The driver must be loaded.
    fn keep() -> std::result::Result<Self, DriverError> {
        let mut context = null_mut();
        // SAFETY: the driver is loaded, and writes the context, or null.
        unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result()?;
        Ok(Self(context))
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        // SAFETY: it was this thread's context before, and primary contexts stay as long as a
        // library that works in them.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

/// The memory that an address is in, which some object calls a GPU's.
pub(crate) fn place_of(py: Python<'_>, address: usize, what: &'static str) -> PyResult<Place> {
    require_driver().map_err(|error| of_tensors(py, error))?;
    if address == 0 {
        // No elements are anywhere.
        return Ok(Place::Gpu(0));
    }
    let mut number = -1i32;
    let asked = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the driver is loaded, and writes a number of 32 bits.
    let found =
        unsafe { sys::cuPointerGetAttribute((&raw mut number).cast::<c_void>(), asked, address as u64) };
    match (found.result(), usize::try_from(number)) {
        (Ok(()), Ok(number)) => Ok(Place::Gpu(number)),
        _ => Err(type_error(format!("{what} has an address, {address:#x}, in no GPU's memory"))),
    }
}

/// Work on a stream of a GPU, with arrays that are there.
pub(crate) struct Work {
    pub(crate) gpu: &'static Gpu,
    pub(crate) stream: Arc<CudaStream>,
    /// Streams of the arrays' owners, which are others.
    others: Vec<Arc<CudaStream>>,
    _current: CurrentContext,
}

impl Work {
    /// Gets ready to work on a stream. All arrays must be on the GPU of the first; the stream waits
    /// for what their owners' streams have to do.
    pub(crate) fn with(py: Python<'_>, arrays: &[&Array], stream: usize) -> PyResult<Self> {
        let place = arrays[0].place();
        let Place::Gpu(number) = place else {
            return Err(type_error(format!("{} is not in the memory of a GPU", arrays[0].what())));
        };
        if let Some(other) = arrays.iter().find(|array| array.place() != place) {
            let (first, what, there) = (arrays[0].what(), other.what(), other.place());
            return Err(error(
                py,
                format!("{first} is on {place} and {what} on {there}; move them to one device"),
            ));
        }
        let failed = |why| of_tensors(py, why);
        require_driver().map_err(failed)?;
        let current =
            CurrentContext::keep().map_err(doing("asking for the current context")).map_err(failed)?;
        let gpu = py.detach(|| gpu_of(number)).map_err(failed)?;
        // SAFETY: the caller's library has this stream, in the primary context, and keeps it while
        // this function works.
        let wrapped = |stream: usize| unsafe { gpu.context().wrap_borrowed_stream(stream as sys::CUstream) };
        let mut work = Self { gpu, stream: wrapped(stream), others: Vec::new(), _current: current };
        for other in arrays.iter().filter_map(|array| array.stream()) {
            // 0 and 1 are both the legacy default stream.
            let known = work.others.iter().any(|known| known.cu_stream().addr() == other);
            if other.max(1) != stream.max(1) && !known {
                let other = wrapped(other);
                work.stream.join(&other).map_err(doing("waiting for another stream")).map_err(failed)?;
                work.others.push(other);
            }
        }
        Ok(work)
    }

    /// Enqueues work, while other threads of Python run. The streams of the arrays' owners wait for
    /// it: memory may be written, or used for something else, there.
    pub(crate) fn enqueue<R: Send + Ungil>(
        &self,
        py: Python<'_>,
        enqueue: impl FnOnce(&'static Gpu, &Arc<CudaStream>) -> Result<R> + Send + Ungil,
    ) -> PyResult<R> {
        let Self { gpu, stream, others, .. } = self;
        let (gpu, others): (&'static Gpu, &[Arc<CudaStream>]) = (gpu, others);
        let done = py.detach(|| {
            let done = enqueue(gpu, stream);
            for other in others {
                other.join(stream).map_err(doing("having another stream wait"))?;
            }
            done
        });
        done.map_err(|why| of_tensors(py, why))
    }

    /// Makes sure that one may wait for the stream.
    pub(crate) fn require_waiting(&self, py: Python<'_>) -> PyResult<()> {
        if capturing(&self.stream).map_err(|why| of_tensors(py, why))? {
            return Err(error(
                py,
                "a graph is being captured, and non_finite=\"error\" and report=True wait for the GPU; choose non_finite=\"propagate\" \
                 or \"saturate\" and leave the report out",
            ));
        }
        Ok(())
    }
}

/// Whether a graph is being captured on a stream.
fn capturing(stream: &CudaStream) -> Result<bool> {
    let status = stream.capture_status().map_err(doing("asking for a capture"))?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The number of the capture on a stream of a GPU, unique in this process, or `None`.
///
/// # Errors
/// The errors of [`gpu_of`], and an error of drivers without such numbers.
pub(crate) fn capture(number: usize, stream: usize) -> Result<Option<u64>> {
    require_driver()?;
    let asking = doing("asking for a capture");
    let _current = CurrentContext::keep().map_err(&asking)?;
    let gpu = gpu_of(number)?;
    // The legacy default stream has no number but in contexts.
    gpu.context().bind_to_thread().map_err(&asking)?;
    // SAFETY: as of `Work::with`.
    let wrapped = unsafe { gpu.context().wrap_borrowed_stream(stream as sys::CUstream) };
    if !capturing(&wrapped)? {
        return Ok(None);
    }
    let missing = || asking(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND));
    let info = CAPTURE_INFO.get_or_init(capture_info).as_ref().ok_or_else(missing)?;
    let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let none = null_mut();
    // SAFETY: the function is the driver's of this type; it writes the status and the number, and
    // null asks for no more.
    let asked = unsafe { info(stream as sys::CUstream, &raw mut status, &raw mut id, none, none, none) };
    asked.result().map_err(&asking)?;
    Ok(Some(id))
}

/// The driver's `cuStreamGetCaptureInfo_v2`, by the header of CUDA 12.
type CaptureInfo = unsafe extern "C" fn(
    sys::CUstream,
    *mut CUstreamCaptureStatus,
    *mut u64,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> sys::CUresult;

static CAPTURE_INFO: OnceLock<Option<CaptureInfo>> = OnceLock::new();

/// Looks for it in the driver: cudarc's is for drivers from CUDA 12.3 on.
fn capture_info() -> Option<CaptureInfo> {
    let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
    // SAFETY: the driver is loaded already, so that no code of its runs now.
    let driver = unsafe { libloading::Library::new(name) }.ok()?;
    // SAFETY: the driver's function of this name has this type, its pointers to handles taken for
    // untyped ones.
    let found = unsafe { driver.get::<CaptureInfo>(b"cuStreamGetCaptureInfo_v2\0") }.map(|found| *found).ok();
    // The driver stays, with the function.
    std::mem::forget(driver);
    found
}

/// The elements of an array of a GPU, from the first to the last, gaps included.
pub(crate) fn view<T: Element>(array: &Array) -> gpu::DeviceView<'_, T> {
    assert!(array.kind().bytes() == size_of::<T>(), "the type is the kind's");
    // SAFETY: see `bytes`.
    unsafe { gpu::DeviceView::from_raw_parts(array.address(), array.span()) }
}

/// Memory for elements of an array of a GPU without gaps. [`Array::require_output`] comes first.
pub(crate) fn view_mut<T: Element>(array: &mut Array) -> gpu::DeviceViewMut<'_, T> {
    assert!(array.kind().bytes() == size_of::<T>(), "the type is the kind's");
    // SAFETY: see `bytes_mut`.
    unsafe { gpu::DeviceViewMut::from_raw_parts(array.address(), array.span()) }
}

/// Bytes of a GPU's without gaps: codes or scales.
pub(crate) fn bytes<'a>(py: Python<'_>, array: &'a Array) -> PyResult<gpu::DeviceView<'a, u8>> {
    array.require(py, Kind::Bytes)?;
    // SAFETY: who made the array promises that its elements are where its shape and strides say.
    // `owner` keeps them while work is enqueued, and from then on the order of the stream does:
    // libraries give memory to others on the stream that it was allocated on, or wait, and streams
    // that are not ours were told to wait for ours. Strides do not go backwards: `require` and
    // `Array::rows` look.
    Ok(unsafe { gpu::DeviceView::from_raw_parts(array.address(), array.span()) })
}

/// Memory for bytes of a GPU's without gaps. [`Array::require_output`] comes first.
pub(crate) fn bytes_mut(array: &mut Array) -> gpu::DeviceViewMut<'_, u8> {
    assert!(array.kind() == Kind::Bytes, "outputs are looked at first");
    // SAFETY: as of `bytes`; and it can be written to and shares no memory with what else the
    // operation uses, which `require_output` found.
    unsafe { gpu::DeviceViewMut::from_raw_parts(array.address(), array.span()) }
}

/// The words of a slot, of an amax or of a global scale: an array of float32 that holds other
/// words, too.
pub(crate) fn words_mut(array: &mut Array) -> gpu::DeviceViewMut<'_, u32> {
    assert!(array.kind() == Kind::F32, "outputs are looked at first");
    // SAFETY: as of `bytes_mut`. Words and floats have the same size and alignment, and all bits
    // are values of both.
    unsafe { gpu::DeviceViewMut::from_raw_parts(array.address(), array.span()) }
}

/// The words of an amax. [`Array::require`] comes first.
pub(crate) fn words(array: &Array) -> gpu::DeviceView<'_, u32> {
    assert!(array.kind() == Kind::F32, "inputs are looked at first");
    // SAFETY: as of `words_mut` and `bytes`.
    unsafe { gpu::DeviceView::from_raw_parts(array.address(), array.span()) }
}

/// The 32-bit integers of an array of a GPU. [`Array::require`] comes first.
pub(crate) fn indices(array: &Array) -> gpu::DeviceView<'_, u32> {
    assert!(array.kind() == Kind::Indices, "inputs are looked at first");
    // SAFETY: as of `bytes`. All bits are values of 32-bit integers.
    unsafe { gpu::DeviceView::from_raw_parts(array.address(), array.span()) }
}

/// The integers of an array of a GPU, of 32 or 64 bits. [`Array::require`] comes first.
pub(crate) fn integers(array: &Array) -> gpu::DeviceIntegers<'_> {
    let (address, count) = (array.address(), array.span());
    match array.kind() {
        // SAFETY: as of `bytes`. All bits are values of 64-bit integers.
        Kind::Longs => gpu::DeviceIntegers::I64(unsafe { gpu::DeviceView::from_raw_parts(address, count) }),
        kind => {
            assert!(kind == Kind::Indices, "inputs are looked at first");
            // SAFETY: as of `bytes`. All bits are values of 32-bit integers.
            gpu::DeviceIntegers::I32(unsafe { gpu::DeviceView::from_raw_parts(address, count) })
        }
    }
}

/// The bytes of an array of a GPU, gaps between pages included.
/// [`Array::entry_stride`] comes first.
pub(crate) fn spanned(array: &Array) -> gpu::DeviceView<'_, u8> {
    assert!(array.kind() == Kind::Bytes, "inputs are looked at first");
    // SAFETY: as of `bytes`. Gaps between pages are memory of the same allocation.
    unsafe { gpu::DeviceView::from_raw_parts(array.address(), array.span()) }
}

/// Memory for the bytes of an array of a GPU, gaps between pages included. Of these, work writes
/// only pages. [`Array::require_writable`] and [`Array::entries_apart`] come first.
pub(crate) fn spanned_mut(array: &mut Array) -> gpu::DeviceViewMut<'_, u8> {
    assert!(array.kind() == Kind::Bytes, "outputs are looked at first");
    // SAFETY: as of `spanned`; it can be written to. Its pages share no memory with others of the
    // operation, which reaches nothing between them: see `gpu::DeviceKvCacheMut`.
    unsafe { gpu::DeviceViewMut::from_raw_parts(array.address(), array.span()) }
}

/// A view without bytes.
pub(crate) fn empty<'a>(address: u64) -> gpu::DeviceView<'a, u8> {
    // SAFETY: the view has no elements.
    unsafe { gpu::DeviceView::from_raw_parts(address, 0) }
}

/// Memory without bytes.
pub(crate) fn empty_mut<'a>(address: u64) -> gpu::DeviceViewMut<'a, u8> {
    // SAFETY: the view has no elements.
    unsafe { gpu::DeviceViewMut::from_raw_parts(address, 0) }
}
