//! Quantized tensors, amax and reports in device memory, and copies from and to the host.

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use microscale_formats::Format;
use microscale_formats::nvfp4::{Direction, GlobalScale};
use microscale_kernels_abi::{GlobalSlot, NO_POSITION, REPORT_SLOTS, ReportSlot};
use std::fmt;
use std::sync::Arc;

use crate::amax::Amax;
use crate::error::{Error, Result};
use crate::gpu::memory::staging::Staging;
use crate::gpu::memory::tensor_view::{DeviceTensorView, GLOBAL, GLOBAL_WORDS, kernel_bytes};
use crate::gpu::memory::tensor_view_mut::DeviceTensorViewMut;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::runtime::driver::doing;
use crate::report::{Position, Report};
use crate::shape::{QuantizedShape, Shape};
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;

/// A [`QuantizedTensor`] in device memory, laid out the same.
pub struct DeviceTensor {
    shape: QuantizedShape,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
    /// A [`GlobalSlot`]: the global scale, and the amax it may be computed from.
    global: CudaSlice<u32>,
    /// The direction of the global scale, or `None` without one.
    direction: Option<Direction>,
}

/// Shows the shape and direction only: the bytes are in device memory.
impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tensor = f.debug_struct("DeviceTensor");
        tensor.field("shape", &self.shape).field("direction", &self.direction).finish_non_exhaustive()
    }
}

impl DeviceTensor {
    /// Allocates memory for a matrix, and fills it with zeros on the stream.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::NoKernel`] for a comparison format, and [`Error::Gpu`] when
    /// memory is short.
    pub fn zeros(stream: &Arc<CudaStream>, shape: QuantizedShape) -> Result<Self> {
        let (codes, scales) = kernel_bytes(shape)?;
        let allocating = doing("allocating a quantized tensor");
        // cudarc allocates no empty buffers: an empty tensor has one unused byte.
        let bytes = |n: usize| stream.alloc_zeros(n.max(1)).map_err(&allocating);
        let global = stream.alloc_zeros(GLOBAL_WORDS).map_err(&allocating)?;
        Ok(Self { shape, codes: bytes(codes)?, scales: bytes(scales)?, global, direction: None })
    }

    /// Takes codes and block scales that are in device memory.
    ///
    /// A slot for a global scale, less than 1 KiB, is allocated on the stream;
    /// [`Self::with_global_scale`] sets it. The block scales are not checked, as for
    /// [`DeviceTensorView::from_parts`].
    ///
    /// # Errors
    /// [`Error::QuantizedLength`] if codes or scales do not have exactly the bytes that the shape
    /// needs, unless it needs none; [`Error::NoKernel`] for a comparison format, and
    /// [`Error::Gpu`].
    pub fn from_parts(
        stream: &Arc<CudaStream>,
        shape: QuantizedShape,
        codes: CudaSlice<u8>,
        scales: CudaSlice<u8>,
    ) -> Result<Self> {
        // An empty tensor has one byte of each here too.
        if kernel_bytes(shape)? != (0, 0) {
            shape.check(codes.len(), scales.len())?;
        }
        let global = stream.alloc_zeros(GLOBAL_WORDS).map_err(doing("allocating a global scale"))?;
        Ok(Self { shape, codes, scales, global, direction: None })
    }

    /// Returns the codes, the scales and the [slot of the global scale](Self::global_slot).
    pub fn into_parts(self) -> (CudaSlice<u8>, CudaSlice<u8>, CudaSlice<u32>) {
        (self.codes, self.scales, self.global)
    }

    /// A view of the whole tensor.
    pub fn view(&self) -> DeviceTensorView<'_> {
        let [codes, scales] = [&self.codes, &self.scales].map(DeviceView::from);
        DeviceTensorView::of_tensor(self.shape, codes, scales, self.direction, Some((&self.global).into()))
    }

    /// The same blocks with a global scale, written on the stream without waiting.
    ///
    /// # Errors
    /// [`Error::GlobalScale`] if the number is out of range, [`Error::NoGlobalScale`] if the format
    /// has none, and [`Error::Gpu`].
    pub fn with_global_scale(mut self, stream: &Arc<CudaStream>, given: GlobalScale) -> Result<Self> {
        if !self.shape.format.has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.shape.format });
        }
        if !given.in_range() {
            return Err(Error::GlobalScale { given });
        }
        self.set_global_scale(stream, Some(given))?;
        Ok(self)
    }

    /// Copies a tensor from host memory, on the stream.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for a comparison format, and [`Error::Gpu`].
    pub fn from_host<'a>(stream: &Arc<CudaStream>, tensor: impl Into<QuantizedView<'a>>) -> Result<Self> {
        let tensor = tensor.into();
        let mut device = Self::zeros(stream, tensor.shape())?;
        if !tensor.scales().is_empty() {
            let copying = doing("copying a quantized tensor to it");
            stream.memcpy_htod(tensor.codes(), &mut device.codes).map_err(&copying)?;
            stream.memcpy_htod(tensor.scales(), &mut device.scales).map_err(&copying)?;
        }
        device.set_global_scale(stream, tensor.global_scale())?;
        Ok(device)
    }

    /// Copies the tensor to host memory. Waits for the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn to_host(&self, stream: &Arc<CudaStream>) -> Result<QuantizedTensor> {
        self.view().to_host(stream)
    }

    /// [`Self::to_host`] through pinned memory.
    pub(in crate::gpu) fn to_host_through(
        &self,
        stream: &Arc<CudaStream>,
        staging: &Staging,
    ) -> Result<QuantizedTensor> {
        let mut host = QuantizedTensor::zeros(self.shape)?;
        let (codes, scales) = host.parts_mut();
        if !scales.is_empty() {
            staging.copy_to_host(stream, &self.codes, codes)?;
            staging.copy_to_host(stream, &self.scales, scales)?;
        }
        host.set_global_scale(self.read_global(stream)?);
        Ok(host)
    }

    /// The global scale. Waits for the stream.
    pub(in crate::gpu) fn read_global(&self, stream: &Arc<CudaStream>) -> Result<Option<GlobalScale>> {
        self.view().read_global(stream)
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.shape.format
    }

    /// Format, rows, columns and scale layout.
    pub fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Elements per row, without padding.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// The packed codes.
    pub fn codes(&self) -> &CudaSlice<u8> {
        &self.codes
    }

    /// The block scales, in the order of the scale layout.
    pub fn scales(&self) -> &CudaSlice<u8> {
        &self.scales
    }

    /// The direction of NVFP4's global scale, or `None` if the tensor has no global scale.
    ///
    /// The number is in device memory: the first word of [`Self::global_slot`], as the bits of an
    /// f32.
    pub fn direction(&self) -> Option<Direction> {
        self.direction
    }

    /// The global scale's slot: words of 32 bits.
    ///
    /// The first word is the global scale as the bits of an f32. If quantizing computed it, three
    /// words follow: the amax it was computed from, as the bits of an f32, and 1 for each of NaN
    /// and infinity if the input had one. The kernels use the other words.
    pub fn global_slot(&self) -> &CudaSlice<u32> {
        &self.global
    }

    /// The codes and the scales, to be written.
    pub(in crate::gpu) fn codes_and_scales_mut(&mut self) -> (&mut CudaSlice<u8>, &mut CudaSlice<u8>) {
        (&mut self.codes, &mut self.scales)
    }

    /// Sets or removes the global scale.
    pub(in crate::gpu) fn set_global_scale(
        &mut self,
        stream: &CudaStream,
        global: Option<GlobalScale>,
    ) -> Result<()> {
        self.direction = global.map(|global| global.direction());
        let Some(global) = global else { return Ok(()) };
        DeviceViewMut::from(&mut self.global).set_first(stream, GLOBAL, global.value().to_bits())
    }
}

impl<'a> From<&'a DeviceTensor> for DeviceTensorView<'a> {
    fn from(tensor: &'a DeviceTensor) -> Self {
        tensor.view()
    }
}

impl<'a> From<&'a mut DeviceTensor> for DeviceTensorViewMut<'a> {
    fn from(tensor: &'a mut DeviceTensor) -> Self {
        let DeviceTensor { shape, codes, scales, global, direction } = tensor;
        Self::of_tensor(*shape, codes, scales, global, direction)
    }
}

/// The largest magnitude of matrices, in device memory.
///
/// [`Gpu::amax_on`](crate::gpu::Gpu::amax_on) updates it. Foreign device memory serves as well:
/// [`Self::WORDS`] words, which are zeros for the amax of no elements.
pub struct DeviceAmax {
    slot: CudaSlice<u32>,
}

impl fmt::Debug for DeviceAmax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceAmax").finish_non_exhaustive()
    }
}

impl DeviceAmax {
    /// Words of 32 bits per amax.
    ///
    /// An unused word, the amax as the bits of an f32, and 1 for each of NaN and infinity if there
    /// is one.
    pub const WORDS: usize = 4;

    /// The amax of no elements.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn zeros(stream: &Arc<CudaStream>) -> Result<Self> {
        let slot = stream.alloc_zeros(Self::WORDS).map_err(doing("allocating an amax"))?;
        Ok(Self { slot })
    }

    /// Resets it to the amax of no elements, on the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        stream.memset_zeros(&mut self.slot).map_err(doing("clearing an amax"))
    }

    /// The amax of all matrices added on the stream so far. Waits for the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<Amax> {
        let reading = doing("reading an amax");
        let mut words = [0; Self::WORDS];
        stream.memcpy_dtoh(&self.slot, &mut words).map_err(&reading)?;
        stream.synchronize().map_err(&reading)?;
        let [_, amax, nan, infinite] = words;
        Ok(Amax { finite: f32::from_bits(amax), nan: nan != 0, infinite: infinite != 0 })
    }
}

impl<'a> From<&'a DeviceAmax> for DeviceView<'a, u32> {
    fn from(amax: &'a DeviceAmax) -> Self {
        (&amax.slot).into()
    }
}

impl<'a> From<&'a mut DeviceAmax> for DeviceViewMut<'a, u32> {
    fn from(amax: &'a mut DeviceAmax) -> Self {
        (&mut amax.slot).into()
    }
}

/// A report in device memory. Quantizations add to it.
pub struct DeviceReport {
    slots: CudaSlice<u64>,
}

impl fmt::Debug for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceReport").finish_non_exhaustive()
    }
}

/// u64 fields per slot.
const FIELDS: usize = size_of::<ReportSlot>() / size_of::<u64>();

impl DeviceReport {
    /// An empty report.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn zeros(stream: &Arc<CudaStream>) -> Result<Self> {
        let slots = stream.alloc_zeros(REPORT_SLOTS * FIELDS).map_err(doing("allocating a report"))?;
        Ok(Self { slots })
    }

    /// Resets the report, on the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        stream.memset_zeros(&mut self.slots).map_err(doing("clearing a report"))
    }

    /// The report of everything quantized on the stream so far. Waits for the stream.
    ///
    /// The position of the first non-finite element is valid if only one matrix was quantized, of
    /// this shape and to this format.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn read(&self, stream: &Arc<CudaStream>, shape: Shape, format: Format) -> Result<Report> {
        let reading = doing("reading a report");
        let mut words = [0u64; REPORT_SLOTS * FIELDS];
        stream.memcpy_dtoh(&self.slots, &mut words).map_err(&reading)?;
        stream.synchronize().map_err(&reading)?;
        let mut report = Report::default();
        let mut first = NO_POSITION;
        for slot in words.as_chunks::<FIELDS>().0 {
            let [nan, infinite, clipped, flushed, saturated, position, rescaled, tried] = *slot;
            report.nan += nan;
            report.infinite += infinite;
            report.clipped_blocks += clipped;
            report.flushed_blocks += flushed;
            report.saturated_scales += saturated;
            report.rescaled_blocks += rescaled;
            report.tried_scales += tried;
            first = first.max(position);
        }
        report.first_non_finite = (first != NO_POSITION).then(|| position(!first, shape, format));
        Ok(report)
    }

    pub(in crate::gpu) fn slots_mut(&mut self) -> &mut CudaSlice<u64> {
        &mut self.slots
    }

    /// The address of the slots. cudarc does not order uses by address with other uses.
    pub(in crate::gpu) fn address(&self) -> u64 {
        self.slots.device_ptr(self.slots.stream()).0
    }
}

/// The position of element B · block + index, in a format with blocks of B elements.
fn position(index: u64, shape: Shape, format: Format) -> Position {
    let row_elements = shape.cols.next_multiple_of(format.block()) as u64;
    Position { row: (index / row_elements) as usize, col: (index % row_elements) as usize }
}

const _: () = {
    // `read` takes the fields by position.
    assert!(std::mem::offset_of!(ReportSlot, nan) == 0);
    assert!(std::mem::offset_of!(ReportSlot, infinite) == 8);
    assert!(std::mem::offset_of!(ReportSlot, clipped) == 16);
    assert!(std::mem::offset_of!(ReportSlot, flushed) == 24);
    assert!(std::mem::offset_of!(ReportSlot, scale_saturated) == 32);
    assert!(std::mem::offset_of!(ReportSlot, first_non_finite) == 40);
    assert!(std::mem::offset_of!(ReportSlot, rescaled) == 48);
    assert!(std::mem::offset_of!(ReportSlot, tried) == 56);
    // Views of slots start at any word.
    assert!(align_of::<GlobalSlot>() == align_of::<u32>());
    // The first word of a slot is the global scale. In an amax slot kernels touch only these
    // fields, and `DeviceAmax::read` takes them by position.
    assert!(std::mem::offset_of!(GlobalSlot, scale) == 0);
    assert!(std::mem::offset_of!(GlobalSlot, amax_bits) == 4);
    assert!(std::mem::offset_of!(GlobalSlot, nan) == 8);
    assert!(std::mem::offset_of!(GlobalSlot, infinite) == 12);
};
