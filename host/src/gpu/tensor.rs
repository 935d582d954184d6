//! Quantized tensors and reports in device memory.

use cudarc::driver::{CudaSlice, CudaStream};
use microscale_kernels_abi::{NO_POSITION, REPORT_SLOTS, ReportSlot};
use std::sync::Arc;

use super::doing;
use crate::error::Result;
use crate::recipe::Format;
use crate::report::{Position, Report};
use crate::tensor::{QuantizedTensor, Shape};

/// A [`QuantizedTensor`] in device memory, laid out the same.
pub struct DeviceTensor {
    format: Format,
    rows: usize,
    cols: usize,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
}

impl DeviceTensor {
    /// Room for a matrix, filled with zeros on the stream.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`], and [`crate::Error::Gpu`] when memory is short.
    pub fn zeros(stream: &Arc<CudaStream>, format: Format, rows: usize, cols: usize) -> Result<Self> {
        Shape::new(rows, cols).span()?;
        // cudarc allocates no empty buffers: an empty tensor keeps a byte that is never used.
        let blocks = rows * cols.div_ceil(format.block());
        let bytes = |n: usize| stream.alloc_zeros(n.max(1)).map_err(doing("allocating a quantized tensor"));
        Ok(Self { format, rows, cols, codes: bytes(blocks * format.block_bytes())?, scales: bytes(blocks)? })
    }

    /// A copy of a tensor in host memory, made on the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn from_host(stream: &Arc<CudaStream>, tensor: &QuantizedTensor) -> Result<Self> {
        let mut device = Self::zeros(stream, tensor.format(), tensor.rows(), tensor.cols())?;
        if !tensor.scales().is_empty() {
            let copying = doing("copying a quantized tensor to it");
            stream.memcpy_htod(tensor.codes(), &mut device.codes).map_err(&copying)?;
            stream.memcpy_htod(tensor.scales(), &mut device.scales).map_err(&copying)?;
        }
        Ok(device)
    }

    /// A copy in host memory. Waits for the stream.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn to_host(&self, stream: &Arc<CudaStream>) -> Result<QuantizedTensor> {
        let mut host = QuantizedTensor::zeros(self.format, self.rows, self.cols)?;
        let (codes, scales) = host.parts_mut();
        if !scales.is_empty() {
            let copying = doing("copying a quantized tensor back");
            stream.memcpy_dtoh(&self.codes, codes).map_err(&copying)?;
            stream.memcpy_dtoh(&self.scales, scales).map_err(&copying)?;
            stream.synchronize().map_err(&copying)?;
        }
        Ok(host)
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row, padding not counted.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The packed codes.
    pub fn codes(&self) -> &CudaSlice<u8> {
        &self.codes
    }

    /// The block scales.
    pub fn scales(&self) -> &CudaSlice<u8> {
        &self.scales
    }

    pub(super) fn parts_mut(&mut self) -> (&mut CudaSlice<u8>, &mut CudaSlice<u8>) {
        (&mut self.codes, &mut self.scales)
    }

    /// Checks that this is a tensor of a format and shape.
    pub(super) fn check_shape(&self, format: Format, shape: Shape) -> Result<()> {
        QuantizedTensor::require_shape((self.format, self.rows, self.cols), self.codes.len(), format, shape)
    }
}

/// A report in device memory, to which quantizations add.
pub struct DeviceReport {
    slots: CudaSlice<u64>,
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

    /// The report of what was quantized on the stream so far, which it waits for. The position of the first non-finite
    /// element means something if that was one matrix, of this shape.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`].
    pub fn read(&self, stream: &Arc<CudaStream>, shape: Shape) -> Result<Report> {
        let reading = doing("reading a report");
        let mut words = [0u64; REPORT_SLOTS * FIELDS];
        stream.memcpy_dtoh(&self.slots, &mut words).map_err(&reading)?;
        stream.synchronize().map_err(&reading)?;
        let mut report = Report::default();
        let mut first = NO_POSITION;
        for slot in words.as_chunks::<FIELDS>().0 {
            let [nan, infinite, clipped, flushed, saturated, position, ..] = *slot;
            report.nan += nan;
            report.infinite += infinite;
            report.clipped_blocks += clipped;
            report.flushed_blocks += flushed;
            report.saturated_scales += saturated;
            first = first.max(position);
        }
        report.first_non_finite = (first != NO_POSITION).then(|| position(!first, shape));
        Ok(report)
    }

    pub(super) fn slots_mut(&mut self) -> &mut CudaSlice<u64> {
        &mut self.slots
    }
}

/// Where element 32 · block + index stands.
fn position(index: u64, shape: Shape) -> Position {
    let row_elements = shape.cols.div_ceil(32) as u64 * 32;
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
};
