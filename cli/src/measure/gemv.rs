//! Measuring matrix–vector products.

use microscale::cpu::{self, Isa};
use microscale::{
    Batch, Device, Element, Format, GlobalScale, QuantizedShape, QuantizedTensor, Recipe, Result, Shape,
};
use rayon::prelude::*;

use super::cpu::measure_product;
use super::{Op, Size, Times, require_equal};

/// What to multiply.
pub(super) struct Product {
    pub(super) matrix: QuantizedTensor,
    pub(super) vectors: QuantizedTensor,
    pub(super) batch: Batch,
    /// Bytes of the matrices' codes and scales.
    pub(super) bytes: u64,
}

impl Product {
    fn new(recipe: &Recipe, size: Size) -> Result<Self> {
        let batch = Batch::of(size.batches);
        let matrix = matrix(recipe, size)?;
        let vectors = random(QuantizedShape::of(recipe, Shape::new(size.batches, size.cols)), 2)?;
        let bytes = matrix_bytes(&matrix) as u64;
        Ok(Self { matrix, vectors, batch, bytes })
    }

    /// As many results as there are rows.
    pub(super) fn results<T: Element>(&self) -> Vec<T> {
        vec![T::default(); self.matrix.rows()]
    }

    /// What the definition makes of it.
    pub(super) fn expected<T: Element>(&self) -> Result<Vec<T>> {
        let mut expected = self.results::<T>();
        cpu::gemv_with(Isa::Reference, &self.matrix, &self.vectors, self.batch, &mut expected)?;
        Ok(expected)
    }
}

/// [`microscale::Error::Wrong`] unless results are the expected ones, to the bit.
pub(super) fn verify<T: Element>(what: &'static str, found: &[T], expected: &[T]) -> Result<()> {
    require_equal(what, bytemuck::cast_slice::<T, u8>(found), bytemuck::cast_slice(expected))
}

/// Bytes of a matrix' codes and scales, as many as are copied beside a product.
pub(super) fn matrix_bytes(matrix: &QuantizedTensor) -> usize {
    matrix.codes().len() + matrix.scales().len()
}

/// Random matrices.
pub(super) fn matrix(recipe: &Recipe, size: Size) -> Result<QuantizedTensor> {
    random(QuantizedShape::of(recipe, size.all_rows()), 1)
}

/// Every code, both signs, and scales over a wide range: in MXFP4 from 2^−20 to ½, as those of weights are, under which results in f16
/// are finite, or all would look alike.
fn random(shape: QuantizedShape, seed: u64) -> Result<QuantizedTensor> {
    let (codes, scales) = shape.bytes()?;
    let mut bytes = [vec![0; codes], vec![0; scales]];
    for (i, bytes) in (0..).zip(&mut bytes) {
        bytes.par_chunks_mut(1 << 16).enumerate().for_each(|(part, chunk)| {
            let mut rng = fastrand::Rng::with_seed((seed * 2 + i) << 32 | part as u64);
            match (i, shape.format) {
                (0, _) => rng.fill(chunk),
                (_, Format::Nvfp4) => chunk.fill_with(|| rng.u8(..0x7F)),
                _ => chunk.fill_with(|| rng.u8(107..127)),
            }
        });
    }
    let [codes, scales] = bytes;
    let tensor = QuantizedTensor::from_parts(shape, codes, scales)?;
    if shape.format == Format::Nvfp4 {
        tensor.with_global_scale(GlobalScale::Multiplier(1e-4))
    } else {
        Ok(tensor)
    }
}

/// The bytes of the matrices, and times.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only GPUs have several kernels"))]
pub(super) fn measure<T: Element>(
    op: Op,
    recipe: &Recipe,
    size: Size,
    device: &Device,
) -> Result<(u64, Times)> {
    let product = Product::new(recipe, size)?;
    let times = match device {
        Device::Cpu => on_cpu::<T>(&product)?,
        #[cfg(feature = "cuda")]
        Device::Gpus(gpus) => super::gpu::measure_product::<T>(op, &product, gpus.first())?,
    };
    Ok((product.bytes, times))
}

fn on_cpu<T: Element>(product: &Product) -> Result<Times> {
    let mut out = product.results::<T>();
    let times = measure_product(&product.matrix, |matrix| {
        cpu::gemv(matrix, &product.vectors, product.batch, &mut out)
    })?;
    verify("gemv", &out, &product.expected()?)?;
    Ok(times)
}

/// Measures which kernel is the fastest, over the sizes of a table of choices, for results in f16: the table as a file.
///
/// # Errors
/// Those of [`super::measure`], at the first measurement that fails.
#[cfg(feature = "cuda")]
pub(crate) fn tune(
    recipe: &Recipe,
    device: &Device,
    mut measured: impl FnMut(super::Measurement),
) -> Result<String> {
    use microscale::gpu::{GemvChoices, GemvKernel};

    let choices = GemvChoices::new(|rows, cols| {
        let size = Size { rows, cols, batches: 1, tokens: None };
        let mut fastest = (f64::INFINITY, None);
        for op in Op::GEMV_KERNELS {
            let measurement = super::measure(op, recipe, microscale::Dtype::F16, size, device)?;
            if measurement.median_seconds < fastest.0 {
                fastest = (measurement.median_seconds, op.gemv_kernel());
            }
            measured(measurement);
        }
        Ok(fastest.1.unwrap_or(GemvKernel::Rows4))
    })?;
    Ok(choices.text(&format!("{device}, {}", recipe.format())))
}
