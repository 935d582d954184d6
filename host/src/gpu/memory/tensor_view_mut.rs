//! Writable views of device memory for quantized matrices, owned or foreign.

use std::fmt;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::ScaleLayout;
use microscale_formats::nvfp4::Direction;

use crate::error::{Error, Result};
use crate::gpu::memory::tensor_view::{
    CODES, CODES_ALIGNMENT, DeviceTensorView, GLOBAL, GLOBAL_WORDS, GlobalWord, SCALES, SCALES_ALIGNMENT,
    kernel_bytes,
};
use crate::gpu::memory::view::DeviceViewMut;
use crate::shape::{QuantizedShape, Shape};

/// Device memory for a quantized matrix.
///
/// Operations that write a `&mut `[`DeviceTensor`](crate::gpu::DeviceTensor) write to such a view
/// as well, or to a `&mut` of one, after which [`Self::as_view`] reads the result.
///
/// Codes and scales start on multiples of 16 bytes, as for [`DeviceTensorView`].
///
/// The view borrows the memory exclusively:
///
/// ```compile_fail,E0502
/// use microscale::gpu::DeviceTensorViewMut;
/// use microscale::gpu::cudarc::driver::CudaSlice;
/// use microscale::{QuantizedShape, Result};
///
/// fn shared(
///     shape: QuantizedShape,
///     mut codes: CudaSlice<u8>,
///     mut scales: CudaSlice<u8>,
/// ) -> Result<usize> {
///     let view = DeviceTensorViewMut::from_parts(shape, &mut codes, &mut scales)?;
///     let part = codes.slice(..16);
///     Ok(view.shape().rows + part.len())
/// }
/// ```
pub struct DeviceTensorViewMut<'a> {
    shape: QuantizedShape,
    codes: DeviceViewMut<'a, u8>,
    scales: DeviceViewMut<'a, u8>,
    slot: Option<DeviceViewMut<'a, u32>>,
    direction: DirectionOf<'a>,
}

/// Where the direction of the written global scale is stored.
enum DirectionOf<'a> {
    /// In this view.
    View(Option<Direction>),
    /// In the tensor or view that this one was made from.
    Origin(&'a mut Option<Direction>),
}

/// Shows the shape and the global scale's direction only: the bytes are in device memory.
impl fmt::Debug for DeviceTensorViewMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut view = f.debug_struct("DeviceTensorViewMut");
        view.field("shape", &self.shape).field("direction", &self.direction()).finish_non_exhaustive()
    }
}

impl<'a> DeviceTensorViewMut<'a> {
    /// Words of 32 bits that an NVFP4 output needs for its global scale.
    pub const GLOBAL_SLOT_WORDS: usize = GLOBAL_WORDS;

    /// A view of memory for codes and block scales.
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape
    /// needs, and [`Error::NoKernel`] for a comparison format.
    pub fn from_parts(
        shape: QuantizedShape,
        codes: impl Into<DeviceViewMut<'a, u8>>,
        scales: impl Into<DeviceViewMut<'a, u8>>,
    ) -> Result<Self> {
        let (codes, scales) = (codes.into(), scales.into());
        kernel_bytes(shape)?;
        shape.check(codes.len(), scales.len())?;
        Ok(Self { shape, codes, scales, slot: None, direction: DirectionOf::View(None) })
    }

    /// [`Self::from_parts`] by the addresses of the codes and scales in device memory.
    ///
    /// Both have room for the bytes that [`QuantizedShape::bytes`] gives.
    ///
    /// # Errors
    /// [`Error::TooLarge`], and [`Error::NoKernel`] for a comparison format.
    ///
    /// # Safety
    /// As for [`DeviceViewMut::from_raw_parts`], for the codes and for the scales.
    pub unsafe fn from_raw_parts(
        shape: QuantizedShape,
        codes: CUdeviceptr,
        scales: CUdeviceptr,
    ) -> Result<Self> {
        let (code_bytes, scale_bytes) = kernel_bytes(shape)?;
        // SAFETY: by the caller's contract the codes and scales are `code_bytes` and `scale_bytes`
        // long, outlive `'a`, and are reached by no other view.
        let (codes, scales) = unsafe {
            (
                DeviceViewMut::from_raw_parts(codes, code_bytes),
                DeviceViewMut::from_raw_parts(scales, scale_bytes),
            )
        };
        Ok(Self { shape, codes, scales, slot: None, direction: DirectionOf::View(None) })
    }

    /// The same with memory for a global scale, which NVFP4 outputs need.
    ///
    /// The slot has [`Self::GLOBAL_SLOT_WORDS`] words, which may have any values. Operations write
    /// the global scale to the first word, as the bits of an f32; kernels use the others.
    ///
    /// # Errors
    /// [`Error::Length`] with fewer words.
    pub fn with_global_slot(self, slot: impl Into<DeviceViewMut<'a, u32>>) -> Result<Self> {
        let slot = slot.into();
        Shape::new(1, GLOBAL_WORDS).check("the slot of the global scale", slot.len())?;
        Ok(Self { slot: Some(slot), ..self })
    }

    /// The view of a tensor's parts.
    pub(in crate::gpu) fn of_tensor(
        shape: QuantizedShape,
        codes: impl Into<DeviceViewMut<'a, u8>>,
        scales: impl Into<DeviceViewMut<'a, u8>>,
        slot: impl Into<DeviceViewMut<'a, u32>>,
        direction: &'a mut Option<Direction>,
    ) -> Self {
        let (codes, scales, slot) = (codes.into(), scales.into(), Some(slot.into()));
        Self { shape, codes, scales, slot, direction: DirectionOf::Origin(direction) }
    }

    /// Format, rows, columns and scale layout.
    pub const fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// The direction of the global scale that the last operation wrote, or `None` without one.
    pub fn direction(&self) -> Option<Direction> {
        match &self.direction {
            DirectionOf::View(direction) => *direction,
            DirectionOf::Origin(direction) => **direction,
        }
    }

    /// A view for reading the result.
    pub fn as_view(&self) -> DeviceTensorView<'_> {
        let (codes, scales) = (self.codes.as_view(), self.scales.as_view());
        let slot = self.slot.as_ref().map(DeviceViewMut::as_view);
        DeviceTensorView::of_tensor(self.shape, codes, scales, self.direction(), slot)
    }

    pub(in crate::gpu) fn set_direction(&mut self, direction: Option<Direction>) {
        match &mut self.direction {
            DirectionOf::View(place) => *place = direction,
            DirectionOf::Origin(place) => **place = direction,
        }
    }

    /// The slot of an NVFP4 output.
    ///
    /// # Errors
    /// [`Error::NoGlobalSlot`].
    pub(in crate::gpu) fn slot_mut(&mut self) -> Result<&mut DeviceViewMut<'a, u32>> {
        let missing = Error::NoGlobalSlot { format: self.shape.format, words: GLOBAL_WORDS };
        self.slot.as_mut().ok_or(missing)
    }

    /// The memory for the scales.
    pub(in crate::gpu) fn scales_mut(&mut self) -> &mut DeviceViewMut<'a, u8> {
        &mut self.scales
    }

    /// Enqueues clearing of all scale bytes, if some of them belong to no block.
    pub(in crate::gpu) fn clear_padding(&mut self, stream: &CudaStream) -> Result<()> {
        let blocks = self.shape.rows * self.shape.blocks_per_row();
        if self.shape.scale_layout == ScaleLayout::Swizzled && self.scales.len() > blocks {
            self.scales.clear(stream, SCALES)?;
        }
        Ok(())
    }

    /// Enqueues copies of another tensor's codes and global scale, and of its scales.
    ///
    /// The scales are copied if both tensors have the same scale layout.
    pub(in crate::gpu) fn copy_from(
        &mut self,
        stream: &CudaStream,
        source: DeviceTensorView<'_>,
    ) -> Result<()> {
        let (codes, scales) = self.shape.bytes()?;
        self.set_direction(source.direction());
        self.codes.copy_from(stream, CODES, source.codes(), codes)?;
        if source.shape().scale_layout == self.shape.scale_layout {
            self.scales.copy_from(stream, SCALES, source.scales(), scales)?;
        }
        match source.global_word() {
            Some(GlobalWord::Slot(slot)) => self.slot_mut()?.copy_from(stream, GLOBAL, slot, 1),
            Some(GlobalWord::Value(value)) => self.slot_mut()?.copy_from(stream, GLOBAL, value, 1),
            None => Ok(()),
        }
    }

    /// The addresses of the codes, scales and slot.
    ///
    /// The caller enqueues the work on `stream` that writes them before it drops the guards.
    /// Without a slot the last address is 0: only NVFP4's kernels take one, and their outputs have
    /// a slot.
    ///
    /// # Errors
    /// [`Error::Alignment`], [`Error::OtherContext`], and [`Error::NoGlobalSlot`].
    pub(in crate::gpu) fn write<'b>(
        &'b mut self,
        stream: &'b CudaStream,
    ) -> Result<([CUdeviceptr; 3], [SyncOnDrop<'b>; 3])> {
        if self.shape.format.has_global_scale() {
            self.slot_mut()?;
        }
        let (codes, codes_written) = self.codes.write(stream, CODES, CODES_ALIGNMENT)?;
        let (scales, scales_written) = self.scales.write(stream, SCALES, SCALES_ALIGNMENT)?;
        let (slot, slot_written) = match &mut self.slot {
            Some(slot) => slot.write(stream, GLOBAL, 1)?,
            None => (0, SyncOnDrop::Record(None)),
        };
        Ok(([codes, scales, slot], [codes_written, scales_written, slot_written]))
    }
}

impl<'a> From<&'a mut DeviceTensorViewMut<'_>> for DeviceTensorViewMut<'a> {
    fn from(view: &'a mut DeviceTensorViewMut<'_>) -> Self {
        Self {
            shape: view.shape,
            codes: view.codes.reborrow(),
            scales: view.scales.reborrow(),
            slot: view.slot.as_mut().map(DeviceViewMut::reborrow),
            direction: DirectionOf::Origin(match &mut view.direction {
                DirectionOf::View(direction) => direction,
                DirectionOf::Origin(direction) => direction,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_formats::Format;

    const SHAPE: QuantizedShape = QuantizedShape::new(Format::Nvfp4, 4, 32);

    /// A view of an address without memory, which no test accesses.
    fn writing<'a, T>(len: usize) -> DeviceViewMut<'a, T> {
        // SAFETY: no work is enqueued with the view.
        unsafe { DeviceViewMut::from_raw_parts(256, len) }
    }

    #[test]
    fn outputs_keep_the_direction_that_was_written() {
        let refused = DeviceTensorViewMut::from_parts(SHAPE, writing(64), writing(9));
        assert!(matches!(refused, Err(Error::QuantizedLength { .. })), "{refused:?}");
        let mut view = DeviceTensorViewMut::from_parts(SHAPE, writing(64), writing(8)).unwrap();
        assert!(matches!(view.slot_mut(), Err(Error::NoGlobalSlot { .. })));
        let mut view = view.with_global_slot(writing(GLOBAL_WORDS)).unwrap();
        DeviceTensorViewMut::from(&mut view).set_direction(Some(Direction::Multiplier));
        let _ = DeviceTensorViewMut::from(&mut DeviceTensorViewMut::from(&mut view));
        assert_eq!(view.as_view().direction(), Some(Direction::Multiplier));
        let short = DeviceTensorViewMut::from_parts(SHAPE, writing(64), writing(8)).unwrap();
        let refused = short.with_global_slot(writing(GLOBAL_WORDS - 1));
        assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
    }
}
