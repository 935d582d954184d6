//! GPTQ on a GPU: the bytes of [`crate::quantize_gptq`].

use cudarc::driver::CudaSlice;
use microscale_formats::{GlobalScale, ScaleLayout};
use microscale_kernels_abi::gptq::GptqLoad;

use crate::cpu::{GptqFactor, ScaleFactors};
use crate::element::Element;
use crate::error::{Error, GptqFault, Result};
use crate::gptq::{GptqQuantized, GptqScales, OutputLoss};
use crate::gpu::handle::Gpu;
use crate::gpu::launch::{GptqLauncher, GptqTarget, PassRows};
use crate::gpu::memory::gptq::{DeviceGptqFactor, GptqPass, scale_table};
use crate::gpu::memory::tensor::{DeviceReport, DeviceTensor};
use crate::gpu::ops::loaded::{LoadedOnGpu, QuantizedOnGpu};
use crate::gpu::runtime::driver::doing;
use crate::options::QuantizeOptions;
use crate::recipe::Recipe;
use crate::report::Report;
use crate::scheme::{Global, NonFinite, Scheme};
use crate::shape::{QuantizedShape, Shape};

impl Gpu {
    /// Quantizes a layer's weights in host memory by GPTQ. See [`crate::quantize_gptq`].
    ///
    /// `values` holds the weights `[outputs, columns]` of `shape`. Codes, scales, report and error
    /// are the CPU's, bit for bit. The GPU keeps a copy of the factor until the factor is dropped:
    /// 2·K² bytes for K columns. Besides the weights and the result, it needs 8 bytes for each
    /// weight, and at most 1 GiB: with more weights, it works on some rows after the other.
    ///
    /// # Errors
    /// The errors of [`crate::quantize_gptq`], [`GptqFault::GpuMemory`], and [`Error::Gpu`].
    pub fn quantize_gptq<T: Element>(
        &self,
        values: &[T],
        shape: Shape,
        recipe: &Recipe,
        factor: &GptqFactor,
        scales: GptqScales,
    ) -> Result<GptqQuantized> {
        shape.check("the input", values.len())?;
        let loaded = LoadedOnGpu::new(self, values, shape, None)?;
        let (quantized, output_error) = loaded.quantize_gptq(recipe, factor, scales)?;
        Ok(GptqQuantized { tensor: quantized.to_host()?, report: quantized.report, output_error })
    }
}

impl<T: Element> LoadedOnGpu<'_, T> {
    /// Quantizes by GPTQ. Returns the error in the layer's outputs, too.
    pub(crate) fn quantize_gptq(
        &self,
        recipe: &Recipe,
        factor: &GptqFactor,
        scales: GptqScales,
    ) -> Result<(QuantizedOnGpu, f64)> {
        let (gpu, shape, stream) = (self.gpu(), self.shape(), &self.gpu().stream);
        factor.check_request(recipe, shape.cols, scales)?;
        let linear = Recipe { scale_layout: ScaleLayout::Linear, ..*recipe };
        let (mut quantized, chosen) = match (self.input(), scales) {
            (Some(_), GptqScales::Static) => {
                let plain = self.quantize(&linear, QuantizeOptions::new())?;
                let report = plain.report;
                (plain, Some(report))
            }
            (input, _) => {
                let tensor = DeviceTensor::zeros(stream, QuantizedShape::of(&linear, shape))?;
                let mut quantized = QuantizedOnGpu::new(gpu, tensor, Report::default());
                if let Some(global) = input.map(|_| self.global_scale(recipe)).transpose()?.flatten() {
                    quantized.set_global_scale(global)?;
                }
                (quantized, None)
            }
        };
        let mut error = 0.0;
        if let Some(input) = self.input() {
            let (report, errors) =
                self.gptq_passes(input, &linear, factor, chosen.is_some(), &mut quantized)?;
            quantized.report = match chosen {
                None => report,
                Some(Report { saturated_scales, rescaled_blocks, tried_scales, .. }) => {
                    Report { saturated_scales, rescaled_blocks, tried_scales, ..report }
                }
            };
            error = errors.iter().sum();
        }
        quantized.report = recipe.accept(quantized.report)?;
        if recipe.scale_layout != ScaleLayout::Linear {
            let shape = quantized.tensor.shape().with_scale_layout(recipe.scale_layout);
            let mut laid_out = DeviceTensor::zeros(stream, shape)?;
            gpu.convert_layout_on(stream, &quantized.tensor, &mut laid_out)?;
            quantized.tensor = laid_out;
        }
        Ok((quantized, error * factor.unit()))
    }

    /// The global scale of plain quantization.
    fn global_scale(&self, recipe: &Recipe) -> Result<Option<GlobalScale>> {
        Ok(match recipe.scheme {
            Scheme::Nvfp4(arithmetic, Global::FromAmax) => {
                Some(self.amax()?.global_scale::<T>(&arithmetic, recipe.non_finite))
            }
            Scheme::Nvfp4(_, Global::Given(given)) => Some(given),
            _ => None,
        })
    }

    /// Quantizes the rows to the codes of a tensor, and to its scales unless they are `fixed`.
    /// Returns the error of each row in the factor's unit.
    fn gptq_passes(
        &self,
        input: &CudaSlice<T>,
        recipe: &Recipe,
        factor: &GptqFactor,
        fixed: bool,
        quantized: &mut QuantizedOnGpu,
    ) -> Result<(Report, Vec<f64>)> {
        let (gpu, shape, stream) = (self.gpu(), self.shape(), &self.gpu().stream);
        let scale_factors = ScaleFactors::of(recipe.scheme, quantized.global_scale);
        let table = scale_table(stream, &scale_factors)?;
        // The loop's kernels take the global scale as given.
        let mut given = *recipe;
        if let (Scheme::Nvfp4(arithmetic, Global::FromAmax), Some(global)) =
            (recipe.scheme, quantized.global_scale)
        {
            given.scheme = Scheme::Nvfp4(arithmetic, Global::Given(global));
        }
        let mut report = DeviceReport::zeros(stream)?;
        let (codes, scales) = quantized.tensor.codes_and_scales_mut();
        let mut target = GptqTarget {
            recipe: &given,
            table: &table,
            divides: scale_factors.divides,
            fixed,
            codes,
            scales,
            report: &mut report,
        };
        let factor = DeviceGptqFactor::of(stream, factor)?;
        let launcher =
            GptqLauncher { kernels: &gpu.kernels, stream, factor: &factor, format: recipe.format() };
        let mut pass = GptqPass::new(stream, shape, factor.positions)?;
        let mut errors = Vec::with_capacity(shape.rows);
        for rows in passes(shape.rows, pass.rows) {
            if rows.first > 0 {
                pass.clear(stream)?;
            }
            let to = (GptqLoad::Weights, recipe.non_finite);
            launcher.load((input, shape), rows, to, &mut pass, Some(&mut *target.report))?;
            launcher.quantize(shape, rows, &mut pass, &mut target)?;
            errors.extend(read_sums(stream, &pass, rows)?);
        }
        Ok((report.read(stream, shape, recipe.format())?, errors))
    }

    /// The error of a quantized matrix in the outputs of its layer, as
    /// [`GptqFactor::output_loss`] returns it.
    pub(crate) fn output_loss(&self, tensor: &DeviceTensor, factor: &GptqFactor) -> Result<OutputLoss> {
        let (gpu, shape, stream) = (self.gpu(), self.shape(), &self.gpu().stream);
        factor.check_quantized(tensor.format(), shape.cols)?;
        factor.check_quantized(tensor.format(), tensor.cols())?;
        if tensor.rows() != shape.rows {
            let (expected, found) = (shape.rows, tensor.rows());
            return Err(Error::Gptq(GptqFault::Rows { expected, found }));
        }
        let Some(input) = self.input() else { return Ok(OutputLoss::default()) };
        let dense = Shape::new(shape.rows, shape.cols);
        // SAFETY: the dequantize kernel writes all values before later work on the stream reads
        // them.
        let back = unsafe { stream.alloc::<f32>(dense.elements()) };
        let mut back = back.map_err(doing("allocating values"))?;
        gpu.dequantize_on(stream, tensor, &mut back, shape.cols)?;
        let unit = factor.unit();
        let factor = DeviceGptqFactor::of(stream, factor)?;
        let launcher =
            GptqLauncher { kernels: &gpu.kernels, stream, factor: &factor, format: tensor.format() };
        let mut pass = GptqPass::new(stream, shape, factor.positions)?;
        let [mut error, mut energy] = [Vec::new(), Vec::new()];
        for rows in passes(shape.rows, pass.rows) {
            pass.clear(stream)?;
            let policy = NonFinite::Propagate;
            launcher.load((input, shape), rows, (GptqLoad::Values, policy), &mut pass, None)?;
            launcher.norms(rows, &mut pass)?;
            energy.extend(read_sums(stream, &pass, rows)?);
            stream.memset_zeros(&mut pass.errors).map_err(doing("clearing norms"))?;
            launcher.load((&back, dense), rows, (GptqLoad::Differences, policy), &mut pass, None)?;
            launcher.norms(rows, &mut pass)?;
            error.extend(read_sums(stream, &pass, rows)?);
        }
        let [error, energy] = [error, energy].map(|norms| norms.iter().fold(0.0, |sum, norm| sum + norm));
        Ok(OutputLoss { error: error * unit, energy: energy * unit })
    }
}

/// Cuts rows into passes of at most `most` rows.
fn passes(rows: usize, most: usize) -> impl Iterator<Item = PassRows> {
    (0..rows).step_by(most).map(move |first| PassRows { first, count: (rows - first).min(most) })
}

/// Copies the sums of a pass' rows to the host. Waits for the stream.
fn read_sums(
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    pass: &GptqPass,
    rows: PassRows,
) -> Result<Vec<f64>> {
    let copying = doing("copying errors of rows back");
    let mut sums = stream.clone_dtoh(&pass.errors).map_err(&copying)?;
    stream.synchronize().map_err(&copying)?;
    sums.truncate(rows.count);
    Ok(sums)
}
