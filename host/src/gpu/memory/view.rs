//! Values in device memory: in cudarc's buffers, or at an address in foreign memory.

use std::fmt;
use std::marker::PhantomData;

use cudarc::driver::sys::{CUdeviceptr, cuMemsetD32Async};
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DeviceRepr, SyncOnDrop};
use cudarc::driver::{DevicePtrMut, DeviceSlice, result};

use crate::error::{Error, Result};
use crate::gpu::runtime::driver::doing;

/// Values in device memory that operations read, like a `&[T]`.
///
/// Made from a `&CudaSlice`, a `&CudaView`, a `&CudaViewMut`, or an address
/// ([`Self::from_raw_parts`]).
///
/// Operations take anything that converts to a view. A view does not outlive its memory:
///
/// ```compile_fail,E0505
/// use microscale::gpu::DeviceView;
/// use microscale::gpu::cudarc::driver::CudaSlice;
///
/// fn dangling(slice: CudaSlice<f32>) -> usize {
///     let view = DeviceView::from(&slice);
///     drop(slice);
///     view.len()
/// }
/// ```
pub struct DeviceView<'a, T>(Memory<'a, T>);

enum Memory<'a, T> {
    /// cudarc's memory. Its events order uses on several streams, if they are tracked.
    Tracked(&'a (dyn DevicePtr<T> + Sync + 'a)),
    /// Foreign memory.
    Foreign(Foreign<&'a [T]>),
}

/// Memory at an address, borrowed like a slice.
#[derive(Clone, Copy)]
struct Foreign<Borrow> {
    address: CUdeviceptr,
    len: usize,
    borrow: PhantomData<Borrow>,
}

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceView<'_, T> {}

impl<T> Clone for Memory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Memory<'_, T> {}

/// Shows the length only: the values are in device memory.
impl<T> fmt::Debug for DeviceView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceView").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<'a, T> DeviceView<'a, T> {
    /// A view of `len` values at an address in device memory.
    ///
    /// The address may be PyTorch's `tensor.data_ptr()`. No value is copied. If `len` is 0, the
    /// address may be anything.
    ///
    /// # Safety
    /// For the lifetime `'a`, and until work on the GPU that was enqueued with the view has ended,
    ///
    /// - the values are allocated, in memory that kernels on the context of the
    ///   [`Gpu`](crate::gpu::Gpu) and of the stream can read at this address, and initialized when
    ///   that work reads them;
    /// - every write to them is ordered with that work, by the same stream or by events. cudarc's
    ///   events do not cover this memory.
    pub const unsafe fn from_raw_parts(address: CUdeviceptr, len: usize) -> Self {
        Self(Memory::Foreign(Foreign { address, len, borrow: PhantomData }))
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Tracked(memory) => memory.len(),
            Memory::Foreign(memory) => memory.len,
        }
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of the values.
    ///
    /// The caller enqueues the work on `stream` that reads them before it drops the guard.
    ///
    /// # Errors
    /// [`Error::OtherContext`], and [`Error::Alignment`] unless the address is a multiple of
    /// `alignment` and of the alignment of `T`.
    pub(in crate::gpu) fn read(
        self,
        stream: &'a CudaStream,
        what: &'static str,
        alignment: usize,
    ) -> Result<(CUdeviceptr, SyncOnDrop<'a>)> {
        let (address, guard) = match self.0 {
            Memory::Tracked(memory) => {
                check_context(what, memory.stream(), stream)?;
                memory.device_ptr(stream)
            }
            Memory::Foreign(memory) => (memory.address, SyncOnDrop::Record(None)),
        };
        check_alignment::<T>(what, address, self.len(), alignment)?;
        Ok((address, guard))
    }

    /// Copies the first `to.len()` values to the host, and waits for them.
    pub(in crate::gpu) fn copy_to_host(
        self,
        stream: &'a CudaStream,
        what: &'static str,
        to: &mut [T],
    ) -> Result<()>
    where
        T: DeviceRepr,
    {
        assert!(self.len() >= to.len(), "{what} are too few");
        if to.is_empty() {
            return Ok(());
        }
        let copying = doing("copying from it");
        stream.context().bind_to_thread().map_err(&copying)?;
        let (from, _read) = self.read(stream, what, 1)?;
        // SAFETY: the source has at least `to.len()` values, checked above. `to` is borrowed until
        // the stream is synchronized below.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }.map_err(&copying)?;
        stream.synchronize().map_err(&copying)
    }
}

/// Values in device memory that operations write, like a `&mut [T]`.
///
/// Made from a `&mut CudaSlice`, a `CudaViewMut`, a `&mut` of one, or an address
/// ([`Self::from_raw_parts`]).
///
/// The view borrows the memory exclusively:
///
/// ```compile_fail,E0499
/// use microscale::gpu::DeviceViewMut;
/// use microscale::gpu::cudarc::driver::CudaSlice;
///
/// fn twice(slice: &mut CudaSlice<f32>) -> usize {
///     let (one, other) = (DeviceViewMut::from(&mut *slice), DeviceViewMut::from(&mut *slice));
///     one.len() + other.len()
/// }
/// ```
pub struct DeviceViewMut<'a, T>(MemoryMut<'a, T>);

enum MemoryMut<'a, T> {
    /// cudarc's memory.
    Tracked(CudaViewMut<'a, T>),
    /// Foreign memory.
    Foreign(Foreign<&'a mut [T]>),
}

/// Shows the length only: the values are in device memory.
impl<T> fmt::Debug for DeviceViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceViewMut").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl<'a, T> DeviceViewMut<'a, T> {
    /// A view of `len` values at an address in device memory, to be written.
    ///
    /// If `len` is 0, the address may be anything.
    ///
    /// # Safety
    /// For the lifetime `'a`, and until work on the GPU that was enqueued with the view has ended,
    ///
    /// - the values are allocated, in memory that kernels on the context of the
    ///   [`Gpu`](crate::gpu::Gpu) and of the stream can read and write at this address;
    /// - every other access to them is ordered with that work, by the same stream or by events.
    ///   cudarc's events do not cover this memory;
    /// - no other view that the same operation takes reaches them: outputs overlap neither inputs
    ///   nor each other.
    pub const unsafe fn from_raw_parts(address: CUdeviceptr, len: usize) -> Self {
        Self(MemoryMut::Foreign(Foreign { address, len, borrow: PhantomData }))
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        match &self.0 {
            MemoryMut::Tracked(memory) => memory.len(),
            MemoryMut::Foreign(memory) => memory.len,
        }
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A view for reading.
    pub fn as_view(&self) -> DeviceView<'_, T>
    where
        T: Sync,
    {
        DeviceView(match &self.0 {
            MemoryMut::Tracked(memory) => Memory::Tracked(memory),
            MemoryMut::Foreign(Foreign { address, len, .. }) => {
                Memory::Foreign(Foreign { address: *address, len: *len, borrow: PhantomData })
            }
        })
    }

    /// A view for a shorter lifetime, after which this one can be used again.
    pub fn reborrow(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut(match &mut self.0 {
            MemoryMut::Tracked(memory) => MemoryMut::Tracked(memory.slice_mut(..)),
            MemoryMut::Foreign(Foreign { address, len, .. }) => {
                MemoryMut::Foreign(Foreign { address: *address, len: *len, borrow: PhantomData })
            }
        })
    }

    /// The address of the values.
    ///
    /// The caller enqueues the work on `stream` that reads and writes them before it drops the
    /// guard.
    ///
    /// # Errors
    /// As for [`DeviceView::read`].
    pub(in crate::gpu) fn write<'b>(
        &'b mut self,
        stream: &'b CudaStream,
        what: &'static str,
        alignment: usize,
    ) -> Result<(CUdeviceptr, SyncOnDrop<'b>)> {
        let len = self.len();
        let (address, guard) = match &mut self.0 {
            MemoryMut::Tracked(memory) => {
                check_context(what, memory.stream(), stream)?;
                memory.device_ptr_mut(stream)
            }
            MemoryMut::Foreign(memory) => (memory.address, SyncOnDrop::Record(None)),
        };
        check_alignment::<T>(what, address, len, alignment)?;
        Ok((address, guard))
    }
}

impl<T: DeviceRepr + Sync> DeviceViewMut<'_, T> {
    /// Enqueues a copy of the bits of the first `count` values of `from` to the first values here.
    pub(in crate::gpu) fn copy_from<S>(
        &mut self,
        stream: &CudaStream,
        what: &'static str,
        from: DeviceView<'_, S>,
        count: usize,
    ) -> Result<()> {
        const { assert!(size_of::<S>() == size_of::<T>()) };
        assert!(self.len() >= count && from.len() >= count, "{what}: too few to copy");
        if count == 0 {
            return Ok(());
        }
        let copying = doing("copying in its memory");
        stream.context().bind_to_thread().map_err(&copying)?;
        let (from, _read) = from.read(stream, what, 1)?;
        let (to, _written) = self.write(stream, what, 1)?;
        // SAFETY: both sides have `count` values, checked above, of the same size. They do not
        // overlap: `self` is borrowed exclusively.
        unsafe { result::memcpy_dtod_async(to, from, count * size_of::<T>(), stream.cu_stream()) }
            .map_err(copying)
    }

    /// Enqueues setting all bytes to zero. The caller guarantees that zeros are a valid `T`.
    pub(in crate::gpu) fn clear(&mut self, stream: &CudaStream, what: &'static str) -> Result<()> {
        let bytes = self.len() * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let clearing = doing("clearing memory");
        stream.context().bind_to_thread().map_err(&clearing)?;
        let (to, _written) = self.write(stream, what, 1)?;
        // SAFETY: the view has `bytes` bytes, and `self` is borrowed exclusively.
        unsafe { result::memset_d8_async(to, 0, bytes, stream.cu_stream()) }.map_err(clearing)
    }
}

impl DeviceViewMut<'_, u32> {
    /// Enqueues copies of the first `count` numbers' bits to every `apart`-th word.
    ///
    /// The first number goes to the first word.
    pub(in crate::gpu) fn spread(
        &mut self,
        stream: &CudaStream,
        what: &'static str,
        from: DeviceView<'_, f32>,
        [count, apart]: [usize; 2],
    ) -> Result<()> {
        assert!(self.len() >= count * apart && from.len() >= count, "{what}: too few to copy");
        let copying = doing("copying in its memory");
        stream.context().bind_to_thread().map_err(&copying)?;
        let (from, _read) = from.read(stream, what, 1)?;
        let (to, _written) = self.write(stream, what, 1)?;
        for i in 0..count {
            let (from, to) =
                (from + (i * size_of::<f32>()) as u64, to + (i * apart * size_of::<u32>()) as u64);
            // SAFETY: both words are in range, checked above, and `self` is borrowed exclusively.
            unsafe { result::memcpy_dtod_async(to, from, size_of::<u32>(), stream.cu_stream()) }
                .map_err(&copying)?;
        }
        Ok(())
    }

    /// Enqueues setting the first word to `word`.
    ///
    /// That needs no host memory, which the caller would have to keep until the copy ends.
    pub(in crate::gpu) fn set_first(
        &mut self,
        stream: &CudaStream,
        what: &'static str,
        word: u32,
    ) -> Result<()> {
        assert!(!self.is_empty(), "{what}: there is no first word");
        let setting = doing("setting a word of its memory");
        stream.context().bind_to_thread().map_err(&setting)?;
        let (to, _written) = self.write(stream, what, 1)?;
        // SAFETY: the first word exists, checked above, is aligned, and `self` is borrowed
        // exclusively.
        unsafe { cuMemsetD32Async(to, word, 1, stream.cu_stream()) }.result().map_err(setting)
    }
}

impl<'a, T: Sync> From<&'a CudaSlice<T>> for DeviceView<'a, T> {
    fn from(slice: &'a CudaSlice<T>) -> Self {
        Self(Memory::Tracked(slice))
    }
}

impl<'a, T: Sync> From<&'a CudaView<'_, T>> for DeviceView<'a, T> {
    fn from(view: &'a CudaView<'_, T>) -> Self {
        Self(Memory::Tracked(view))
    }
}

impl<'a, T: Sync> From<&'a CudaViewMut<'_, T>> for DeviceView<'a, T> {
    fn from(view: &'a CudaViewMut<'_, T>) -> Self {
        Self(Memory::Tracked(view))
    }
}

impl<'a, T> From<&DeviceView<'a, T>> for DeviceView<'a, T> {
    fn from(view: &DeviceView<'a, T>) -> Self {
        *view
    }
}

impl<'a, T> From<&'a mut CudaSlice<T>> for DeviceViewMut<'a, T> {
    fn from(slice: &'a mut CudaSlice<T>) -> Self {
        Self(MemoryMut::Tracked(slice.as_view_mut()))
    }
}

impl<'a, T> From<CudaViewMut<'a, T>> for DeviceViewMut<'a, T> {
    fn from(view: CudaViewMut<'a, T>) -> Self {
        Self(MemoryMut::Tracked(view))
    }
}

impl<'a, T> From<&'a mut CudaViewMut<'_, T>> for DeviceViewMut<'a, T> {
    fn from(view: &'a mut CudaViewMut<'_, T>) -> Self {
        Self(MemoryMut::Tracked(view.slice_mut(..)))
    }
}

impl<'a, T> From<&'a mut DeviceViewMut<'_, T>> for DeviceViewMut<'a, T> {
    fn from(view: &'a mut DeviceViewMut<'_, T>) -> Self {
        view.reborrow()
    }
}

/// Refuses memory of a context other than the stream's.
fn check_context(what: &'static str, memory: &CudaStream, stream: &CudaStream) -> Result<()> {
    if memory.context() == stream.context() { Ok(()) } else { Err(Error::OtherContext { what }) }
}

/// Refuses a misaligned address of values.
fn check_alignment<T>(what: &'static str, address: CUdeviceptr, len: usize, alignment: usize) -> Result<()> {
    let needed = alignment.max(align_of::<T>());
    if len == 0 || address.is_multiple_of(needed as u64) {
        return Ok(());
    }
    Err(Error::Alignment { what, address, needed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_start_on_their_size_and_where_kernels_need_them() {
        let found = |address, len, alignment| check_alignment::<f32>("the input", address, len, alignment);
        assert!(found(4, 1, 1).is_ok() && found(32, 1, 16).is_ok());
        let refused = found(6, 1, 1).unwrap_err().to_string();
        assert!(refused.starts_with("the address of the input, 0x6, is not a multiple of 4"), "{refused}");
        assert!(matches!(found(40, 1, 16), Err(Error::Alignment { address: 40, needed: 16, .. })));
        // Without values any address is aligned.
        assert!(found(1, 0, 16).is_ok());
    }
}
