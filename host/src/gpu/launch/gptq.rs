//! Launches of GPTQ's kernels.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::{Format, Search};
use microscale_kernels_abi::gptq::{BatchParams, GPTQ_BATCH, GptqLoad, LoadParams, UPDATE_TILE};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{Divider, Gptq};

use crate::element::{Dtype, Element};
use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, config, limited};
use crate::gpu::launch::quantize::Options;
use crate::gpu::memory::gptq::{DeviceGptqFactor, GptqPass};
use crate::gpu::memory::tensor::DeviceReport;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;
use crate::recipe::Recipe;
use crate::scheme::NonFinite;
use crate::shape::Shape;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<LoadParams> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<BatchParams> {}

/// The first number of rows or positions that is too large for the kernels.
const LIMIT: u64 = 1 << 24;

/// The rows of a matrix that a pass handles.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct PassRows {
    pub(in crate::gpu) first: usize,
    pub(in crate::gpu) count: usize,
}

/// The codes and scales of a quantized matrix, and the scales of its recipe.
pub(in crate::gpu) struct GptqTarget<'a> {
    pub(in crate::gpu) recipe: &'a Recipe,
    /// The factors of all scales, then their scalings.
    pub(in crate::gpu) table: &'a CudaSlice<f32>,
    pub(in crate::gpu) divides: bool,
    /// Whether the scales are chosen already.
    pub(in crate::gpu) fixed: bool,
    /// `[rows, row bytes]`.
    pub(in crate::gpu) codes: &'a mut CudaSlice<u8>,
    /// `[rows, row blocks]`, linear.
    pub(in crate::gpu) scales: &'a mut CudaSlice<u8>,
    pub(in crate::gpu) report: &'a mut DeviceReport,
}

/// Launches GPTQ's kernels on a stream, for one factor and one format.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct GptqLauncher<'a> {
    pub(in crate::gpu) kernels: &'a Kernels,
    pub(in crate::gpu) stream: &'a Arc<CudaStream>,
    pub(in crate::gpu) factor: &'a DeviceGptqFactor,
    pub(in crate::gpu) format: Format,
}

impl GptqLauncher<'_> {
    /// Enqueues loading rows of a matrix. The caller has checked that `values` hold the shape, that
    /// its columns are the factor's, that the rows exist, and that the pass has room for them.
    ///
    /// # Errors
    /// [`Error::Operands`](crate::Error::Operands) for too many rows or columns, and
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub(in crate::gpu) fn load<T: Element>(
        &self,
        (values, shape): (&CudaSlice<T>, Shape),
        rows: PassRows,
        (to, policy): (GptqLoad, NonFinite),
        pass: &mut GptqPass,
        report: Option<&mut DeviceReport>,
    ) -> Result<()> {
        let Self { kernels, stream, factor, .. } = *self;
        limited("rows", pass.rows, LIMIT)?;
        limited("columns", factor.positions, LIMIT)?;
        let kernel = match T::DTYPE {
            Dtype::F32 => Gptq::LoadF32,
            Dtype::F16 => Gptq::LoadF16,
            Dtype::Bf16 => Gptq::LoadBf16,
        };
        let ready = kernels.ready(kernel.id())?;
        let params = self.load_params(shape, rows, to, policy, pass.pitch);
        let (base, _read) = values.device_ptr(stream);
        let address = base + (rows.first * shape.row_stride * size_of::<T>()) as u64;
        let unread = kernels.unread_report();
        let mut launch = stream.launch_builder(&ready.function);
        launch.arg(&address).arg(&factor.position_of).arg(&mut pass.weights).arg(&mut pass.updated);
        match report {
            Some(report) => launch.arg(report.slots_mut()),
            None => launch.arg(&unread),
        };
        launch.arg(&params);
        let threads = params.0.row_warps.divisor * u64::from(WARP) * rows.count as u64;
        // SAFETY: the arguments are the kernel's, in order. The caller checked that the rows are in
        // `values` and fit the pass. The factor has a position for each column, below the pitch.
        // The report has whole slots. The borrows, held past the launch, keep buffers apart.
        unsafe { launch.launch(config(&ready.kernel, threads)?) }.map_err(doing("loading weights"))?;
        Ok(())
    }

    /// Enqueues quantizing the loaded rows, batch by batch, and encoding them. The caller has
    /// checked that the target has the rows, and that it has the factor's format and columns.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub(in crate::gpu) fn quantize(
        &self,
        shape: Shape,
        rows: PassRows,
        pass: &mut GptqPass,
        target: &mut GptqTarget<'_>,
    ) -> Result<()> {
        let Self { kernels, stream, factor, format } = *self;
        // Weights are f32 in the loop.
        let options = Options::of::<f32>(target.recipe)?;
        let (columns, encode) = match options {
            Options::Mx(_) => (Gptq::Mxfp4Columns, Gptq::Mxfp4Encode),
            Options::Nv(_) => (Gptq::Nvfp4Columns, Gptq::Nvfp4Encode),
        };
        let row_blocks = factor.positions / format.block();
        let (codes, _codes) = target.codes.device_ptr_mut(stream);
        let codes = codes + (rows.first * row_blocks * format.block_bytes()) as u64;
        let (scales, _scales) = target.scales.device_ptr_mut(stream);
        let scales = scales + (rows.first * row_blocks) as u64;
        let ready = kernels.ready(columns.id())?;
        for start in (0..factor.positions).step_by(GPTQ_BATCH as usize) {
            let mut params = self.batch(rows, pass.pitch, start);
            params.0.search = target.recipe.search as u32;
            (params.0.fixed, params.0.divides) = (target.fixed.into(), target.divides.into());
            let mut launch = stream.launch_builder(&ready.function);
            launch.arg(&mut pass.weights).arg(&mut pass.updated).arg(&factor.feedback).arg(&factor.pivots);
            launch.arg(&factor.bounds).arg(target.table).arg(&factor.block_at).arg(&scales);
            launch.arg(&mut pass.errors).arg(target.report.slots_mut()).arg(&params);
            match &options {
                Options::Mx(options) => launch.arg(options),
                Options::Nv(options) => launch.arg(options),
            };
            // SAFETY: the arguments are the kernel's, in order. The matrices have rows up to a
            // multiple of 128, and the factor's parts an entry for each position. The caller
            // checked that the scales of the rows exist. The borrows, held past the launch, keep
            // buffers apart.
            unsafe { launch.launch(config(&ready.kernel, rows.count as u64)?) }
                .map_err(doing("quantizing columns"))?;
            self.update(rows, pass, start)?;
        }
        let ready = kernels.ready(encode.id())?;
        let to = (GptqLoad::Weights, target.recipe.non_finite);
        let params = self.load_params(shape, rows, to.0, to.1, pass.pitch);
        let mut launch = stream.launch_builder(&ready.function);
        launch.arg(&pass.updated).arg(&factor.position_of).arg(&codes).arg(&scales);
        launch.arg(target.report.slots_mut()).arg(&params);
        match &options {
            Options::Mx(options) => launch.arg(options),
            Options::Nv(options) => launch.arg(options),
        };
        let threads = params.0.row_warps.divisor * u64::from(WARP) * rows.count as u64;
        // SAFETY: the arguments are the kernel's, in order. The caller checked that the codes and
        // scales of the rows exist. The borrows, held past the launch, keep buffers apart.
        unsafe { launch.launch(config(&ready.kernel, threads)?) }.map_err(doing("encoding blocks"))?;
        Ok(())
    }

    /// Enqueues the squared norm of each loaded row times the factor, added to the pass' sums.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub(in crate::gpu) fn norms(&self, rows: PassRows, pass: &mut GptqPass) -> Result<()> {
        let Self { kernels, stream, factor, .. } = *self;
        let ready = kernels.ready(Gptq::Norms.id())?;
        for start in (0..factor.positions).step_by(GPTQ_BATCH as usize) {
            let params = self.batch(rows, pass.pitch, start);
            let mut launch = stream.launch_builder(&ready.function);
            launch.arg(&mut pass.weights).arg(&mut pass.updated).arg(&factor.feedback).arg(&factor.pivots);
            launch.arg(&mut pass.errors).arg(&params);
            // SAFETY: the arguments are the kernel's, in order. The matrices and the sums have the
            // rows. The borrows, held past the launch, keep buffers apart.
            unsafe { launch.launch(config(&ready.kernel, rows.count as u64)?) }
                .map_err(doing("computing norms"))?;
            self.update(rows, pass, start)?;
        }
        Ok(())
    }

    /// Enqueues applying a batch to all later ones.
    fn update(&self, rows: PassRows, pass: &mut GptqPass, start: usize) -> Result<()> {
        let Self { kernels, stream, factor, .. } = *self;
        let params = self.batch(rows, pass.pitch, start);
        let later = factor.positions.saturating_sub(start + GPTQ_BATCH as usize);
        let tiles = later.div_ceil(UPDATE_TILE as usize) as u64 * u64::from(params.0.row_tiles);
        if tiles == 0 {
            return Ok(());
        }
        let ready = kernels.ready(Gptq::Update.id())?;
        let mut launch = stream.launch_builder(&ready.function);
        launch.arg(&mut pass.weights).arg(&mut pass.updated).arg(&factor.feedback).arg(&params);
        // SAFETY: the arguments are the kernel's, in order. There are later columns, so the batch
        // is whole. The matrices have whole tiles of rows and of columns. The borrows, held past
        // the launch, keep buffers apart.
        unsafe { launch.launch(config(&ready.kernel, tiles)?) }.map_err(doing("applying residuals"))?;
        Ok(())
    }

    fn load_params(
        &self,
        shape: Shape,
        rows: PassRows,
        to: GptqLoad,
        policy: NonFinite,
        pitch: usize,
    ) -> Argument<LoadParams> {
        let positions = self.factor.positions as u32;
        Argument(LoadParams {
            row_warps: Divider::new(u64::from(positions.div_ceil(WARP))),
            row_stride: shape.row_stride as u64,
            first_row: rows.first as u64,
            rows: rows.count as u32,
            cols: shape.cols as u32,
            positions,
            pitch: pitch as u32,
            block: self.format.block() as u32,
            to: to as u32,
            saturate_non_finite: (policy == NonFinite::Saturate).into(),
            padding: 0,
        })
    }

    fn batch(&self, rows: PassRows, pitch: usize, start: usize) -> Argument<BatchParams> {
        let positions = self.factor.positions;
        Argument(BatchParams {
            rows: rows.count as u32,
            pitch: pitch as u32,
            start: start as u32,
            count: (positions - start).min(GPTQ_BATCH as usize) as u32,
            positions: positions as u32,
            row_blocks: (positions / self.format.block()) as u32,
            search: Search::None as u32,
            fixed: 0,
            divides: 0,
            row_tiles: rows.count.div_ceil(UPDATE_TILE as usize) as u32,
        })
    }
}
