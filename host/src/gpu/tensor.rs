//! Quantized tensors, amax and reports in device memory, and their copies from and to the host.

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use microscale_formats::nvfp4::{Direction, GlobalScale};
use microscale_formats::{Format, ScaleLayout};
use microscale_kernels_abi::{GlobalSlot, NO_POSITION, REPORT_SLOTS, ReportSlot};
use std::fmt;
use std::sync::Arc;

use super::driver::doing;
use super::staging::Staging;
use crate::amax::Amax;
use crate::error::{Error, Result};
use crate::report::{Position, Report};
use crate::shape::{QuantizedShape, Shape};
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;

/// A [`QuantizedTensor`] in device memory, laid out the same.
pub struct DeviceTensor {
    shape: QuantizedShape,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
    /// A [`GlobalSlot`]: the global scale, and the amax that it may be computed from.
    global: CudaSlice<u32>,
    /// The direction in which the global scale is to be read, if there is one.
    direction: Option<Direction>,
}

/// Shows the shape. The bytes are the GPU's.
impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tensor = f.debug_struct("DeviceTensor");
        tensor.field("shape", &self.shape).field("direction", &self.direction).finish_non_exhaustive()
    }
}

/// Words of a slot.
const GLOBAL_WORDS: usize = size_of::<GlobalSlot>() / size_of::<u32>();

impl DeviceTensor {
    /// Room for a matrix, filled with zeros on the stream.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::NoKernel`] for a format to compare with, and [`Error::Gpu`] when memory
    /// is short.
    pub fn zeros(stream: &Arc<CudaStream>, shape: QuantizedShape) -> Result<Self> {
        if let Format::Comparison(_) = shape.format {
            return Err(Error::NoKernel { format: shape.format });
        }
        let (codes, scales) = shape.bytes()?;
        let allocating = doing("allocating a quantized tensor");
        // cudarc allocates no empty buffers: an empty tensor keeps a byte that is never used.
        let bytes = |n: usize| stream.alloc_zeros(n.max(1)).map_err(&allocating);
        let global = stream.alloc_zeros(GLOBAL_WORDS).map_err(&allocating)?;
        Ok(Self { shape, codes: bytes(codes)?, scales: bytes(scales)?, global, direction: None })
    }

    /// A copy of a tensor in host memory, made on the stream.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for a format to compare with, and [`Error::Gpu`].
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

    /// A copy in host memory. Waits for the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn to_host(&self, stream: &Arc<CudaStream>) -> Result<QuantizedTensor> {
        let mut host = QuantizedTensor::zeros(self.shape)?;
        let (codes, scales) = host.parts_mut();
        let copying = doing("copying a quantized tensor back");
        if !scales.is_empty() {
            stream.memcpy_dtoh(&self.codes, codes).map_err(&copying)?;
            stream.memcpy_dtoh(&self.scales, scales).map_err(&copying)?;
        }
        host.set_global_scale(self.read_global(stream)?);
        Ok(host)
    }

    /// The same, through pinned memory.
    pub(super) fn to_host_through(
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
    pub(super) fn read_global(&self, stream: &Arc<CudaStream>) -> Result<Option<GlobalScale>> {
        let copying = doing("copying a global scale back");
        let mut global = [0; GLOBAL_WORDS];
        stream.memcpy_dtoh(&self.global, &mut global).map_err(&copying)?;
        stream.synchronize().map_err(&copying)?;
        let value = f32::from_bits(global[0]);
        Ok(self.direction.and_then(|direction| GlobalScale::new(direction, value)))
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

    /// Elements in a row, padding not counted.
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

    /// The direction in which NVFP4's global scale is written down; none if the tensor has no global scale.
    /// The number itself is in device memory: the first word of [`Self::global_slot`], as the bits of an f32.
    pub fn direction(&self) -> Option<Direction> {
        self.direction
    }

    /// The global scale and the amax that it was computed from, both as bits of an f32, and 1 for each of NaN
    /// and infinity if the input had one; the rest are the kernels' own notes.
    pub fn global_slot(&self) -> &CudaSlice<u32> {
        &self.global
    }

    pub(super) fn parts_mut(&mut self) -> (&mut CudaSlice<u8>, &mut CudaSlice<u8>, &mut CudaSlice<u32>) {
        (&mut self.codes, &mut self.scales, &mut self.global)
    }

    /// Returns whether there are scale bytes that belong to no block.
    pub(super) fn has_padded_scales(&self) -> bool {
        self.shape.scale_layout == ScaleLayout::Swizzled
            && self.scales.len() > self.shape.rows * self.shape.blocks_per_row()
    }

    /// Gives it a global scale, or takes it away.
    pub(super) fn set_global_scale(
        &mut self,
        stream: &Arc<CudaStream>,
        global: Option<GlobalScale>,
    ) -> Result<()> {
        self.direction = global.map(|global| global.direction());
        if let Some(global) = global {
            let copying = doing("copying a global scale to it");
            let word = [global.value().to_bits()];
            stream.memcpy_htod(&word, &mut self.global.slice_mut(..1)).map_err(&copying)?;
            // The word is on the stack.
            stream.synchronize().map_err(&copying)?;
        }
        Ok(())
    }

    pub(super) fn set_direction(&mut self, direction: Option<Direction>) {
        self.direction = direction;
    }
}

/// The largest magnitude of matrices in device memory, to which [`super::Gpu::amax_on`] adds.
pub struct DeviceAmax {
    slot: CudaSlice<u32>,
}

impl fmt::Debug for DeviceAmax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceAmax").finish_non_exhaustive()
    }
}

impl DeviceAmax {
    /// An amax of nothing.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn zeros(stream: &Arc<CudaStream>) -> Result<Self> {
        let slot = stream.alloc_zeros(GLOBAL_WORDS).map_err(doing("allocating an amax"))?;
        Ok(Self { slot })
    }

    /// Makes it that of nothing again, on the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        stream.memset_zeros(&mut self.slot).map_err(doing("clearing an amax"))
    }

    /// The amax of what was added on the stream so far, which it waits for.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<Amax> {
        let reading = doing("reading an amax");
        let mut words = [0; GLOBAL_WORDS];
        stream.memcpy_dtoh(&self.slot, &mut words).map_err(&reading)?;
        stream.synchronize().map_err(&reading)?;
        let [_, amax, nan, infinite, ..] = words;
        Ok(Amax { finite: f32::from_bits(amax), nan: nan != 0, infinite: infinite != 0 })
    }

    pub(super) fn slot_mut(&mut self) -> &mut CudaSlice<u32> {
        &mut self.slot
    }
}

/// A report in device memory, to which quantizations add.
pub struct DeviceReport {
    slots: CudaSlice<u64>,
}

impl fmt::Debug for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceReport").finish_non_exhaustive()
    }
}

/// u64 fields of a slot.
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

    /// Empties it, on the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        stream.memset_zeros(&mut self.slots).map_err(doing("clearing a report"))
    }

    /// The report of everything quantized on the stream so far, which it waits for. The position of the first
    /// non-finite element means something if that was one matrix, of this shape, to this format.
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

    pub(super) fn slots_mut(&mut self) -> &mut CudaSlice<u64> {
        &mut self.slots
    }

    /// The address of the slots. Uses by address are not ordered with others.
    pub(super) fn address(&self) -> u64 {
        self.slots.device_ptr(self.slots.stream()).0
    }
}

/// The position of element B · block + index, in a format with blocks of B.
fn position(index: u64, shape: Shape, format: Format) -> Position {
    let row_elements = shape.cols.next_multiple_of(format.block()) as u64;
    Position { row: (index / row_elements) as usize, col: (index % row_elements) as usize }
}

const _: () = {
    // `read` takes a slot apart by position.
    assert!(std::mem::offset_of!(ReportSlot, nan) == 0);
    assert!(std::mem::offset_of!(ReportSlot, infinite) == 8);
    assert!(std::mem::offset_of!(ReportSlot, clipped) == 16);
    assert!(std::mem::offset_of!(ReportSlot, flushed) == 24);
    assert!(std::mem::offset_of!(ReportSlot, scale_saturated) == 32);
    assert!(std::mem::offset_of!(ReportSlot, first_non_finite) == 40);
    assert!(std::mem::offset_of!(ReportSlot, rescaled) == 48);
    assert!(std::mem::offset_of!(ReportSlot, tried) == 56);
    // `to_host` and `DeviceAmax::read` do the same.
    assert!(std::mem::offset_of!(GlobalSlot, scale) == 0);
    assert!(std::mem::offset_of!(GlobalSlot, amax_bits) == 4);
    assert!(std::mem::offset_of!(GlobalSlot, nan) == 8);
    assert!(std::mem::offset_of!(GlobalSlot, infinite) == 12);
};
