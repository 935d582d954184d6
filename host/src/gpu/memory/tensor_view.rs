//! Read-only views of quantized matrices in foreign device memory.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::Format;
use microscale_formats::nvfp4::{Direction, GlobalScale};
use microscale_kernels_abi::GlobalSlot;

use crate::error::{Error, Result};
use crate::gpu::memory::view::DeviceView;
use crate::shape::{QuantizedShape, Shape};
use crate::tensor::QuantizedTensor;

/// Alignment of the codes' address in bytes: the width of the products' loads.
pub(in crate::gpu) const CODES_ALIGNMENT: usize = 16;
/// Alignment of the scales' address in bytes: the width of the products' copies.
pub(in crate::gpu) const SCALES_ALIGNMENT: usize = 16;

pub(in crate::gpu) const CODES: &str = "the codes";
pub(in crate::gpu) const SCALES: &str = "the scales";
pub(in crate::gpu) const GLOBAL: &str = "the global scale";

/// A quantized matrix in device memory, laid out as a [`QuantizedTensor`].
///
/// Operations that read a `&`[`DeviceTensor`](crate::gpu::DeviceTensor) read a view as well, and
/// copy nothing.
///
/// Codes and scales start on multiples of 16 bytes. Operations refuse others
/// ([`Error::Alignment`]).
///
/// ```no_run
/// use microscale::formats::nvfp4::Direction;
/// use microscale::gpu::cudarc::driver::CudaSlice;
/// use microscale::gpu::{DeviceTensorView, GemmWorkspaceMut, Gpu};
/// use microscale::{Format, QuantizedShape, Result};
///
/// /// NVFP4 weights stored in one buffer, times the activations of a token.
/// fn multiply(
///     gpu: &Gpu,
///     file: &CudaSlice<u8>,
///     global: &CudaSlice<f32>,
///     x: &CudaSlice<half::bf16>,
/// ) -> Result<()> {
///     let shape = QuantizedShape::new(Format::Nvfp4, 4096, 4096);
///     let (codes, scales) = file.split_at(4096 * 2048);
///     let weights = DeviceTensorView::from_parts(shape, &codes, &scales)?
///         .with_global_scale(Direction::Multiplier, global)?;
///     let mut out = gpu.stream().alloc_zeros::<half::bf16>(4096).expect("memory for the output");
///     let plan = gpu.linear(weights).plan(1)?;
///     plan.run(gpu.stream(), x, GemmWorkspaceMut::none(), &mut out)
/// }
/// ```
///
/// A view does not outlive its memory:
///
/// ```compile_fail,E0505
/// use microscale::gpu::DeviceTensorView;
/// use microscale::gpu::cudarc::driver::CudaSlice;
/// use microscale::{QuantizedShape, Result};
///
/// fn dangling(
///     shape: QuantizedShape,
///     codes: CudaSlice<u8>,
///     scales: CudaSlice<u8>,
/// ) -> Result<usize> {
///     let view = DeviceTensorView::from_parts(shape, &codes, &scales)?;
///     drop(codes);
///     Ok(view.rows())
/// }
/// ```
#[derive(Clone, Copy)]
pub struct DeviceTensorView<'a> {
    shape: QuantizedShape,
    codes: DeviceView<'a, u8>,
    scales: DeviceView<'a, u8>,
    global: Option<(Direction, GlobalWord<'a>)>,
}

/// The word that holds a global scale.
#[derive(Clone, Copy)]
pub(in crate::gpu) enum GlobalWord<'a> {
    /// A word of its own.
    Value(DeviceView<'a, f32>),
    /// The first word of a slot.
    Slot(DeviceView<'a, u32>),
}

/// Shows the shape and the global scale's direction only: the bytes are in device memory.
impl fmt::Debug for DeviceTensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut view = f.debug_struct("DeviceTensorView");
        view.field("shape", &self.shape).field("direction", &self.direction()).finish_non_exhaustive()
    }
}

impl<'a> DeviceTensorView<'a> {
    /// A view of codes and block scales. [`Self::with_global_scale`] adds a global scale.
    ///
    /// The block scales are not checked: results are unspecified if a scale has its sign bit set in
    /// a format with unsigned scales, such as NVFP4.
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape
    /// needs, and [`Error::NoKernel`] for a comparison format.
    pub fn from_parts(
        shape: QuantizedShape,
        codes: impl Into<DeviceView<'a, u8>>,
        scales: impl Into<DeviceView<'a, u8>>,
    ) -> Result<Self> {
        let (codes, scales) = (codes.into(), scales.into());
        kernel_bytes(shape)?;
        shape.check(codes.len(), scales.len())?;
        Ok(Self { shape, codes, scales, global: None })
    }

    /// [`Self::from_parts`] by the addresses of the codes and scales in device memory.
    ///
    /// Both have the bytes that [`QuantizedShape::bytes`] gives. The global scale can be in foreign
    /// memory too:
    ///
    /// ```no_run
    /// use microscale::formats::nvfp4::Direction;
    /// use microscale::gpu::{DeviceTensorView, DeviceView};
    /// use microscale::{QuantizedShape, Result};
    ///
    /// /// # Safety
    /// /// `codes`, `scales`, `global` (a multiplier) point to memory that outlives the view.
    /// unsafe fn weights<'a>(
    ///     shape: QuantizedShape,
    ///     [codes, scales, global]: [u64; 3],
    /// ) -> Result<DeviceTensorView<'a>> {
    ///     // SAFETY: by the caller's contract all three outlive the view.
    ///     let (view, global) = unsafe {
    ///         (
    ///             DeviceTensorView::from_raw_parts(shape, codes, scales)?,
    ///             DeviceView::from_raw_parts(global, 1),
    ///         )
    ///     };
    ///     view.with_global_scale(Direction::Multiplier, global)
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`], and [`Error::NoKernel`] for a comparison format.
    ///
    /// # Safety
    /// As for [`DeviceView::from_raw_parts`], for the codes and for the scales.
    pub unsafe fn from_raw_parts(
        shape: QuantizedShape,
        codes: CUdeviceptr,
        scales: CUdeviceptr,
    ) -> Result<Self> {
        let (code_bytes, scale_bytes) = kernel_bytes(shape)?;
        // SAFETY: by the caller's contract the codes and scales are `code_bytes` and `scale_bytes`
        // long and outlive `'a`.
        let (codes, scales) = unsafe {
            (DeviceView::from_raw_parts(codes, code_bytes), DeviceView::from_raw_parts(scales, scale_bytes))
        };
        Ok(Self { shape, codes, scales, global: None })
    }

    /// The same blocks with a global scale in device memory: the first of the values.
    ///
    /// The value is not checked: it should be [in range](GlobalScale::in_range). To use a number of
    /// the host, copy it once with `stream.clone_htod(&[number])`.
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`] if the format has none, and [`Error::Length`] without a value.
    pub fn with_global_scale(
        self,
        direction: Direction,
        value: impl Into<DeviceView<'a, f32>>,
    ) -> Result<Self> {
        let value = value.into();
        if !self.shape.format.has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.shape.format });
        }
        Shape::new(1, 1).check(GLOBAL, value.len())?;
        Ok(Self { global: Some((direction, GlobalWord::Value(value))), ..self })
    }

    /// The view of a tensor's parts. `slot` holds the global scale if there is a `direction`.
    pub(in crate::gpu) fn of_tensor(
        shape: QuantizedShape,
        codes: DeviceView<'a, u8>,
        scales: DeviceView<'a, u8>,
        direction: Option<Direction>,
        slot: Option<DeviceView<'a, u32>>,
    ) -> Self {
        let global = direction.zip(slot.map(GlobalWord::Slot));
        Self { shape, codes, scales, global }
    }

    /// The word that holds the global scale, if there is one.
    pub(in crate::gpu) fn global_word(&self) -> Option<GlobalWord<'a>> {
        self.global.map(|(_, word)| word)
    }

    /// The format.
    pub const fn format(&self) -> Format {
        self.shape.format
    }

    /// Format, rows, columns and scale layout.
    pub const fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// Rows.
    pub const fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Elements per row, without padding.
    pub const fn cols(&self) -> usize {
        self.shape.cols
    }

    /// The packed codes.
    pub const fn codes(&self) -> DeviceView<'a, u8> {
        self.codes
    }

    /// The block scales, in the order of the scale layout.
    pub const fn scales(&self) -> DeviceView<'a, u8> {
        self.scales
    }

    /// The direction of NVFP4's global scale, or `None` if there is no global scale.
    pub fn direction(&self) -> Option<Direction> {
        self.global.map(|(direction, _)| direction)
    }

    /// Copies the matrix to host memory. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`], as for every read, and [`Error::Gpu`].
    pub fn to_host(&self, stream: &Arc<CudaStream>) -> Result<QuantizedTensor> {
        let mut host = QuantizedTensor::zeros(self.shape)?;
        let (codes, scales) = host.parts_mut();
        self.codes.copy_to_host(stream, CODES, codes)?;
        self.scales.copy_to_host(stream, SCALES, scales)?;
        host.set_global_scale(self.read_global(stream)?);
        Ok(host)
    }

    /// The global scale. Waits for the stream.
    pub(in crate::gpu) fn read_global(&self, stream: &CudaStream) -> Result<Option<GlobalScale>> {
        let Some((direction, word)) = self.global else { return Ok(None) };
        let mut bits = [0];
        match word {
            GlobalWord::Slot(slot) => slot.copy_to_host(stream, GLOBAL, &mut bits)?,
            GlobalWord::Value(value) => {
                let mut number = [0.0];
                value.copy_to_host(stream, GLOBAL, &mut number)?;
                bits = number.map(f32::to_bits);
            }
        }
        Ok(GlobalScale::new(direction, f32::from_bits(bits[0])))
    }

    /// The addresses of the codes, scales and global scale.
    ///
    /// The caller enqueues the work on `stream` that reads them before it drops the guards. Without
    /// a global scale, the last address points to an arbitrary word.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    pub(in crate::gpu) fn read(
        self,
        stream: &'a CudaStream,
    ) -> Result<([CUdeviceptr; 3], [SyncOnDrop<'a>; 3])> {
        let (codes, codes_read) = self.codes.read(stream, CODES, CODES_ALIGNMENT)?;
        let (scales, scales_read) = self.scales.read(stream, SCALES, SCALES_ALIGNMENT)?;
        let (global, global_read) = match self.global {
            Some((_, GlobalWord::Value(value))) => value.read(stream, GLOBAL, 1)?,
            Some((_, GlobalWord::Slot(slot))) => slot.read(stream, GLOBAL, 1)?,
            None => (codes, SyncOnDrop::Record(None)),
        };
        Ok(([codes, scales, global], [codes_read, scales_read, global_read]))
    }
}

impl<'a> From<&DeviceTensorView<'a>> for DeviceTensorView<'a> {
    fn from(view: &DeviceTensorView<'a>) -> Self {
        *view
    }
}

/// Bytes of codes and of scales, for a format that has kernels.
///
/// # Errors
/// [`Error::TooLarge`] and [`Error::NoKernel`].
pub(in crate::gpu) fn kernel_bytes(shape: QuantizedShape) -> Result<(usize, usize)> {
    match shape.format {
        Format::Comparison(_) => Err(Error::NoKernel { format: shape.format }),
        _ => shape.bytes(),
    }
}

/// Words of a [`GlobalSlot`].
pub(in crate::gpu) const GLOBAL_WORDS: usize = size_of::<GlobalSlot>() / size_of::<u32>();

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_formats::ComparisonFormat;

    const SHAPE: QuantizedShape = QuantizedShape::new(Format::Nvfp4, 4, 32);

    /// A view of an address without memory, which no test reads.
    fn reading<'a, T>(len: usize) -> DeviceView<'a, T> {
        // SAFETY: no work is enqueued with the view.
        unsafe { DeviceView::from_raw_parts(256, len) }
    }

    #[test]
    fn lengths_are_the_shapes() {
        let view = DeviceTensorView::from_parts(SHAPE, reading(64), reading(8)).unwrap();
        assert_eq!((view.codes().len(), view.scales().len(), view.direction()), (64, 8, None));
        for (codes, scales) in [(63, 8), (65, 8), (64, 7), (64, 9)] {
            let refused = DeviceTensorView::from_parts(SHAPE, reading(codes), reading(scales));
            assert!(matches!(refused, Err(Error::QuantizedLength { .. })), "{refused:?}");
        }
        // SAFETY: no work is enqueued with the view.
        let view = unsafe { DeviceTensorView::from_raw_parts(SHAPE, 256, 512) }.unwrap();
        assert_eq!((view.codes().len(), view.scales().len()), (64, 8));
    }

    #[test]
    fn formats_without_kernels_have_no_views() {
        let shape = QuantizedShape { format: Format::Comparison(ComparisonFormat::Nf4), ..SHAPE };
        let (codes, scales) = shape.bytes().unwrap();
        let refused = DeviceTensorView::from_parts(shape, reading(codes), reading(scales));
        assert!(matches!(refused, Err(Error::NoKernel { .. })), "{refused:?}");
        // SAFETY: no work is enqueued with the view.
        let refused = unsafe { DeviceTensorView::from_raw_parts(shape, 256, 512) };
        assert!(matches!(refused, Err(Error::NoKernel { .. })), "{refused:?}");
    }

    #[test]
    fn global_scales_go_with_formats_that_have_them() {
        let view = DeviceTensorView::from_parts(SHAPE, reading(64), reading(8)).unwrap();
        let under = view.with_global_scale(Direction::Divisor, reading(1)).unwrap();
        assert_eq!(under.direction(), Some(Direction::Divisor));
        let refused = view.with_global_scale(Direction::Divisor, reading(0));
        assert!(matches!(refused, Err(Error::Length { found: 0, .. })), "{refused:?}");
        let shape = QuantizedShape::new(Format::Mxfp4, 4, 32);
        let view = DeviceTensorView::from_parts(shape, reading(64), reading(4)).unwrap();
        let refused = view.with_global_scale(Direction::Divisor, reading(1));
        assert!(matches!(refused, Err(Error::NoGlobalScale { .. })), "{refused:?}");
    }
}
