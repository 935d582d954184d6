//! Read-only views of experts' weights in foreign device memory.

use std::fmt;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::nvfp4::Direction;
use microscale_kernels_abi::GlobalSlot;
use microscale_kernels_abi::experts::EXPERT_LIMIT;

use crate::error::{Error, OperandFault, Result};
use crate::gemv::check_weights_shape;
use crate::gpu::memory::tensor_view::{CODES, CODES_ALIGNMENT, GLOBAL_WORDS, SCALES, SCALES_ALIGNMENT};
use crate::gpu::memory::view::DeviceView;
use crate::shape::{QuantizedShape, Shape};

pub(in crate::gpu) const SLOTS: &str = "the experts' global scales";

/// The weights of a mixture's experts in device memory.
///
/// Laid out as [`DeviceExperts`](crate::gpu::DeviceExperts): the codes of all experts one after
/// another, and likewise the scales. Products take a view or a `&DeviceExperts`, and copy nothing.
///
/// Codes and scales start on multiples of 16 bytes. Products refuse others ([`Error::Alignment`]).
///
/// ```no_run
/// use microscale::gpu::DeviceExpertsView;
/// use microscale::gpu::cudarc::driver::CudaSlice;
/// use microscale::{Format, QuantizedShape, Result};
///
/// /// The 32 experts of gpt-oss-20b as a checkpoint stores them.
/// fn weights<'a>(
///     blocks: &'a CudaSlice<u8>,
///     scales: &'a CudaSlice<u8>,
/// ) -> Result<DeviceExpertsView<'a>> {
///     let shape = QuantizedShape::new(Format::Mxfp4, 5760, 2880);
///     DeviceExpertsView::from_parts(shape, 32, blocks, scales)
/// }
/// ```
///
/// A view does not outlive its memory:
///
/// ```compile_fail,E0505
/// use microscale::gpu::DeviceExpertsView;
/// use microscale::gpu::cudarc::driver::CudaSlice;
/// use microscale::{QuantizedShape, Result};
///
/// fn dangling(
///     shape: QuantizedShape,
///     codes: CudaSlice<u8>,
///     scales: CudaSlice<u8>,
/// ) -> Result<usize> {
///     let view = DeviceExpertsView::from_parts(shape, 8, &codes, &scales)?;
///     drop(scales);
///     Ok(view.count())
/// }
/// ```
#[derive(Clone, Copy)]
pub struct DeviceExpertsView<'a> {
    shape: QuantizedShape,
    count: usize,
    codes: DeviceView<'a, u8>,
    scales: DeviceView<'a, u8>,
    slots: Option<(Direction, DeviceView<'a, u32>)>,
}

/// Shows the number of experts and their shape only: the bytes are in device memory.
impl fmt::Debug for DeviceExpertsView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut view = f.debug_struct("DeviceExpertsView");
        view.field("count", &self.count).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl<'a> DeviceExpertsView<'a> {
    /// Words of 32 bits from one expert's global scale to the next.
    pub const GLOBAL_SLOT_WORDS: usize = GLOBAL_WORDS;

    /// A view of the codes and block scales of `count` experts of M rows and K columns each.
    ///
    /// [`Self::with_global_slots`] adds global scales. The block scales are not checked, as for
    /// [`DeviceTensorView::from_parts`](crate::gpu::DeviceTensorView::from_parts).
    ///
    /// # Errors
    /// [`OperandFault::Experts`] if `count` is 0 or more than 65535, [`OperandFault::Weights`] for
    /// formats other than NVFP4 and MXFP4, [`OperandFault::Layout`] for swizzled scales, and
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that all experts
    /// need.
    pub fn from_parts(
        shape: QuantizedShape,
        count: usize,
        codes: impl Into<DeviceView<'a, u8>>,
        scales: impl Into<DeviceView<'a, u8>>,
    ) -> Result<Self> {
        let (codes, scales) = (codes.into(), scales.into());
        stacked(shape, count)?.check(codes.len(), scales.len())?;
        Ok(Self { shape, count, codes, scales, slots: None })
    }

    /// [`Self::from_parts`] by the addresses of the codes and scales in device memory.
    ///
    /// Codes and scales have the bytes that [`QuantizedShape::bytes`] gives for `count` times the
    /// rows.
    ///
    /// # Errors
    /// As for [`Self::from_parts`], and [`Error::TooLarge`].
    ///
    /// # Safety
    /// As for [`DeviceView::from_raw_parts`], for the codes and for the scales.
    pub unsafe fn from_raw_parts(
        shape: QuantizedShape,
        count: usize,
        codes: CUdeviceptr,
        scales: CUdeviceptr,
    ) -> Result<Self> {
        let (code_bytes, scale_bytes) = stacked(shape, count)?.bytes()?;
        // SAFETY: by the caller's contract the codes and scales are `code_bytes` and `scale_bytes`
        // long and outlive `'a`.
        let (codes, scales) = unsafe {
            (DeviceView::from_raw_parts(codes, code_bytes), DeviceView::from_raw_parts(scales, scale_bytes))
        };
        Ok(Self { shape, count, codes, scales, slots: None })
    }

    /// The same experts with global scales in device memory.
    ///
    /// Each expert has [`Self::GLOBAL_SLOT_WORDS`] words; the first holds the bits of an f32. The
    /// global scales are not checked: they should be [in
    /// range](microscale_formats::GlobalScale::in_range). In PyTorch, `torch.zeros(count,
    /// GLOBAL_SLOT_WORDS)` holds them, with the global scales in its first column.
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`] if the format has none, and [`Error::Length`] with fewer words.
    pub fn with_global_slots(
        self,
        direction: Direction,
        slots: impl Into<DeviceView<'a, u32>>,
    ) -> Result<Self> {
        let slots = slots.into();
        if !self.shape.format.has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.shape.format });
        }
        Shape::new(self.count, GLOBAL_WORDS).check(SLOTS, slots.len())?;
        Ok(Self { slots: Some((direction, slots)), ..self })
    }

    /// The view of parts that were already checked to be experts' weights.
    pub(in crate::gpu) fn of_experts(
        (shape, count): (QuantizedShape, usize),
        codes: DeviceView<'a, u8>,
        scales: DeviceView<'a, u8>,
        slots: Option<(Direction, DeviceView<'a, u32>)>,
    ) -> Self {
        Self { shape, count, codes, scales, slots }
    }

    /// The shape of an expert's weights: M rows, K columns.
    pub const fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// The number of experts.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// The direction of the global scales, or `None` if there are none.
    pub fn direction(&self) -> Option<Direction> {
        self.slots.map(|(direction, _)| direction)
    }

    /// The addresses of the codes, scales and, if there are any, slots of global scales.
    ///
    /// The caller enqueues the work on `stream` that reads them before it drops the guards.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    #[expect(clippy::type_complexity, reason = "three addresses, and as many guards")]
    pub(in crate::gpu) fn read(
        self,
        stream: &'a CudaStream,
    ) -> Result<((CUdeviceptr, CUdeviceptr, Option<CUdeviceptr>), [SyncOnDrop<'a>; 3])> {
        let (codes, codes_read) = self.codes.read(stream, CODES, CODES_ALIGNMENT)?;
        let (scales, scales_read) = self.scales.read(stream, SCALES, SCALES_ALIGNMENT)?;
        let (slots, slots_read) = match self.slots {
            Some((_, slots)) => {
                let (slots, read) = slots.read(stream, SLOTS, align_of::<GlobalSlot>())?;
                (Some(slots), read)
            }
            None => (None, SyncOnDrop::Record(None)),
        };
        Ok(((codes, scales, slots), [codes_read, scales_read, slots_read]))
    }
}

impl<'a> From<&DeviceExpertsView<'a>> for DeviceExpertsView<'a> {
    fn from(view: &DeviceExpertsView<'a>) -> Self {
        *view
    }
}

/// The shape of the weights of `count` experts, stacked by rows.
///
/// # Errors
/// [`OperandFault::Experts`], [`OperandFault::Weights`], [`OperandFault::Layout`] and
/// [`Error::TooLarge`].
pub(in crate::gpu) fn stacked(shape: QuantizedShape, count: usize) -> Result<QuantizedShape> {
    if count == 0 || count as u64 >= EXPERT_LIMIT {
        return Err(Error::Operands(OperandFault::Experts { what: "as many as 1 to 65535" }));
    }
    check_weights_shape(shape)?;
    let QuantizedShape { rows, cols, .. } = shape;
    let too_large = Error::TooLarge { rows, cols, row_stride: cols };
    Ok(QuantizedShape { rows: rows.checked_mul(count).ok_or(too_large)?, ..shape })
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_formats::{Format, ScaleLayout};

    const SHAPE: QuantizedShape = QuantizedShape::new(Format::Nvfp4, 4, 32);

    /// A view of an address without memory, which no test reads.
    fn reading<'a, T>(len: usize) -> DeviceView<'a, T> {
        // SAFETY: no work is enqueued with the view.
        unsafe { DeviceView::from_raw_parts(256, len) }
    }

    #[test]
    fn lengths_are_those_of_all_experts() {
        let view = DeviceExpertsView::from_parts(SHAPE, 3, reading(3 * 64), reading(3 * 8)).unwrap();
        assert_eq!((view.count(), view.shape(), view.direction()), (3, SHAPE, None));
        for (codes, scales) in [(64, 8), (191, 24), (193, 24), (192, 23), (192, 25)] {
            let refused = DeviceExpertsView::from_parts(SHAPE, 3, reading(codes), reading(scales));
            assert!(matches!(refused, Err(Error::QuantizedLength { .. })), "{refused:?}");
        }
        // SAFETY: no work is enqueued with the view.
        let view = unsafe { DeviceExpertsView::from_raw_parts(SHAPE, 3, 256, 512) }.unwrap();
        assert_eq!((view.codes.len(), view.scales.len()), (192, 24));
    }

    #[test]
    fn experts_are_some_that_are_multiplied() {
        let of = |shape, count| {
            // SAFETY: no work is enqueued with the view.
            unsafe { DeviceExpertsView::from_raw_parts(shape, count, 256, 512) }.unwrap_err().to_string()
        };
        assert!(of(SHAPE, 0).contains("1 to 65535") && of(SHAPE, 1 << 16).contains("1 to 65535"));
        assert!(of(SHAPE.with_scale_layout(ScaleLayout::Swizzled), 2).contains("convert_layout"));
        assert!(of(QuantizedShape::new(Format::Mxfp8E4m3, 4, 32), 2).contains("nvfp4 or mxfp4"));
        let large = QuantizedShape::new(Format::Mxfp4, usize::MAX / 8, 32);
        assert!(of(large, 16).contains("more elements than can be addressed"));
    }

    #[test]
    fn global_scales_are_as_many_as_experts() {
        let view = DeviceExpertsView::from_parts(SHAPE, 3, reading(3 * 64), reading(3 * 8)).unwrap();
        let under = view.with_global_slots(Direction::Divisor, reading(3 * GLOBAL_WORDS)).unwrap();
        assert_eq!(under.direction(), Some(Direction::Divisor));
        let refused = view.with_global_slots(Direction::Divisor, reading(3 * GLOBAL_WORDS - 1));
        assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
        let shape = QuantizedShape::new(Format::Mxfp4, 4, 32);
        let view = DeviceExpertsView::from_parts(shape, 1, reading(64), reading(4)).unwrap();
        let refused = view.with_global_slots(Direction::Divisor, reading(GLOBAL_WORDS));
        assert!(matches!(refused, Err(Error::NoGlobalScale { .. })), "{refused:?}");
    }
}
