//! Device memory from the driver, without cudarc's buffers.

use std::sync::Arc;

use microscale::formats::nvfp4::Direction;
use microscale::gpu::cudarc::driver::sys::CUdeviceptr;
use microscale::gpu::cudarc::driver::{CudaStream, result};
use microscale::gpu::{DeviceTensorView, DeviceTensorViewMut, DeviceView, DeviceViewMut};
use microscale::{Format, GlobalScale, QuantizedShape, QuantizedTensor};

/// Size of the guard areas on both sides of an allocation, and their contents.
const GUARD: usize = 64;
const UNTOUCHED: u8 = 0xA5;

/// Device memory from the driver.
pub(super) struct Raw {
    start: CUdeviceptr,
    bytes: usize,
    stream: Arc<CudaStream>,
}

impl Raw {
    pub(super) fn of(stream: &Arc<CudaStream>, bytes: &[u8]) -> Self {
        stream.context().bind_to_thread().unwrap();
        let guarded = [&[UNTOUCHED; GUARD], bytes, &[UNTOUCHED; GUARD]].concat();
        // SAFETY: `start` is a new allocation of `guarded.len()` bytes. The stream is synchronized
        // before `guarded` is dropped.
        unsafe {
            let start = result::malloc_sync(guarded.len()).unwrap();
            result::memcpy_htod_async(start, &guarded, stream.cu_stream()).unwrap();
            stream.synchronize().unwrap();
            Self { start, bytes: bytes.len(), stream: stream.clone() }
        }
    }

    /// Allocates memory with contents that are neither zero nor a result.
    pub(super) fn used(stream: &Arc<CudaStream>, bytes: usize) -> Self {
        Self::of(stream, &vec![0x5B; bytes])
    }

    pub(super) fn zeros(stream: &Arc<CudaStream>, bytes: usize) -> Self {
        Self::of(stream, &vec![0; bytes])
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.start + GUARD as u64
    }

    /// Returns the bytes, after a check of the guard areas.
    pub(super) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes + 2 * GUARD];
        // SAFETY: the allocation and `bytes` both have `self.bytes + 2 * GUARD` bytes. The stream
        // is synchronized before `bytes` is read.
        unsafe { result::memcpy_dtoh_async(&mut bytes, self.start, self.stream.cu_stream()) }.unwrap();
        self.stream.synchronize().unwrap();
        let (before, behind) = (&bytes[..GUARD], &bytes[GUARD + self.bytes..]);
        assert!(before.iter().chain(behind).all(|byte| *byte == UNTOUCHED), "wrote beside its memory");
        bytes[GUARD..][..self.bytes].to_vec()
    }

    pub(super) fn read_as<T: bytemuck::Pod>(&self) -> Vec<T> {
        bytemuck::pod_collect_to_vec(&self.read())
    }

    pub(super) fn view<T>(&self) -> DeviceView<'_, T> {
        // SAFETY: the allocation has `self.bytes` bytes from this address on and lives as long as
        // `self`, which is borrowed. Each test uses one stream for it.
        unsafe { DeviceView::from_raw_parts(self.address(), self.bytes / size_of::<T>()) }
    }

    pub(super) fn view_mut<T>(&mut self) -> DeviceViewMut<'_, T> {
        // SAFETY: as for `view`, and `self` is borrowed mutably for the view's lifetime.
        unsafe { DeviceViewMut::from_raw_parts(self.address(), self.bytes / size_of::<T>()) }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: `self.start` comes from `malloc_sync` and is freed only here. `free_sync` waits
        // for work that uses it.
        let _ = unsafe { result::free_sync(self.start) };
    }
}

/// Codes, scales and the slot of a global scale, by address.
pub(super) struct RawTensor {
    pub(super) shape: QuantizedShape,
    pub(super) codes: Raw,
    pub(super) scales: Raw,
    pub(super) slot: Raw,
}

impl RawTensor {
    pub(super) fn used(stream: &Arc<CudaStream>, shape: QuantizedShape) -> Self {
        let (codes, scales) = shape.bytes().unwrap();
        let [codes, scales, slot] =
            [codes, scales, 4 * DeviceTensorViewMut::GLOBAL_SLOT_WORDS].map(|bytes| Raw::used(stream, bytes));
        Self { shape, codes, scales, slot }
    }

    pub(super) fn view_mut(&mut self) -> DeviceTensorViewMut<'_> {
        let (codes, scales) = (self.codes.address(), self.scales.address());
        // SAFETY: `self.codes` and `self.scales` have the sizes of `self.shape`, and `self` is
        // borrowed mutably for the view's lifetime.
        let view = unsafe { DeviceTensorViewMut::from_raw_parts(self.shape, codes, scales) }.unwrap();
        if self.shape.format == Format::Nvfp4 {
            return view.with_global_slot(self.slot.view_mut()).unwrap();
        }
        view
    }
}

/// A read-only tensor by address, with a separate global scale.
pub(super) struct RawOperand {
    shape: QuantizedShape,
    codes: Raw,
    scales: Raw,
    global: Option<(Direction, Raw)>,
}

impl RawOperand {
    pub(super) fn of(stream: &Arc<CudaStream>, tensor: &QuantizedTensor) -> Self {
        let [codes, scales] = [tensor.codes(), tensor.scales()].map(|bytes| Raw::of(stream, bytes));
        let global = |global: GlobalScale| {
            (global.direction(), Raw::of(stream, &global.value().to_bits().to_le_bytes()))
        };
        Self { shape: tensor.shape(), codes, scales, global: tensor.global_scale().map(global) }
    }

    pub(super) fn view(&self) -> DeviceTensorView<'_> {
        let (codes, scales) = (self.codes.address(), self.scales.address());
        // SAFETY: `self.codes` and `self.scales` have the sizes of `self.shape`, and `self` is
        // borrowed for the view's lifetime.
        let view = unsafe { DeviceTensorView::from_raw_parts(self.shape, codes, scales) }.unwrap();
        match &self.global {
            Some((direction, value)) => view.with_global_scale(*direction, value.view()).unwrap(),
            None => view,
        }
    }
}
