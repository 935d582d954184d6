//! Random operands for products of quantized tensors, and the check against the reference.

use microscale::cpu::{self, Isa};
use microscale::formats::ScaleType;
use microscale::{
    Batch, Element, GlobalScale, QuantizedShape, QuantizedTensor, QuantizedView, Recipe, Result, Shape,
};
use rayon::prelude::*;

#[cfg(feature = "internals")]
use super::contest;
use super::size::Size;
use super::workload::require_equal;

/// The operands of a measured product.
pub(super) struct Product {
    pub(super) matrix: QuantizedTensor,
    pub(super) vectors: QuantizedTensor,
    pub(super) batch: Batch,
    /// Returns the bytes of the matrices' codes and scales.
    pub(super) bytes: u64,
}

impl Product {
    pub(super) fn new(recipe: &Recipe, size: Size) -> Result<Self> {
        let batch = Batch::of(size.batches);
        let matrix = matrix(recipe, size)?;
        let vectors = random(QuantizedShape::of(recipe, Shape::new(size.batches, size.cols)), 2)?;
        let bytes = matrix_bytes(&matrix) as u64;
        Ok(Self { matrix, vectors, batch, bytes })
    }

    /// Returns a buffer with one result per row.
    pub(super) fn results<T: Element>(&self) -> Vec<T> {
        vec![T::default(); self.matrix.rows()]
    }

    /// Returns the results of the reference.
    pub(super) fn expected<T: Element>(&self) -> Result<Vec<T>> {
        let mut expected = self.results::<T>();
        cpu::gemv_with(Isa::Reference, &self.matrix, &self.vectors, self.batch, &mut expected)?;
        Ok(expected)
    }
}

/// Returns [`microscale::Error::Wrong`] unless the results equal the expected ones bit for bit.
pub(super) fn verify<T: Element>(what: &'static str, found: &[T], expected: &[T]) -> Result<()> {
    require_equal(what, bytemuck::cast_slice::<T, u8>(found), bytemuck::cast_slice(expected))
}

/// Returns the bytes of a matrix's codes and scales, which are also the bytes of the copy.
pub(super) fn matrix_bytes(matrix: &QuantizedTensor) -> usize {
    matrix.codes().len() + matrix.scales().len()
}

/// Returns one of `count` matrices that are stacked by rows, with linear scales.
pub(super) fn matrix_of(all: QuantizedView<'_>, count: usize, index: usize) -> Result<QuantizedView<'_>> {
    let shape = QuantizedShape { rows: all.rows() / count, ..all.shape() };
    let (codes, scales) = shape.bytes()?;
    let (codes, scales) = (&all.codes()[index * codes..][..codes], &all.scales()[index * scales..][..scales]);
    let view = QuantizedView::from_parts(shape, codes, scales)?;
    all.global_scale().map_or(Ok(view), |scale| view.with_global_scale(scale))
}

/// Returns the experts of each token, in order. They are random except for the contest's sizes.
pub(super) fn chosen(size: Size) -> Vec<u32> {
    #[cfg(feature = "internals")]
    if let Some(counts) = contest::counts(size) {
        let of_expert = |(expert, count): (u32, &usize)| std::iter::repeat_n(expert, *count);
        return (0..).zip(counts).flat_map(of_expert).collect();
    }
    let (tokens, experts) = (size.tokens.map_or(1, usize::from), size.batches);
    let mut rng = fastrand::Rng::with_seed(3);
    let of_token = || rng.choose_multiple(0..experts as u32, size.top_k.min(experts));
    std::iter::repeat_with(of_token).take(tokens).flatten().collect()
}

/// Returns the bytes of the codes and scales of the experts that are chosen.
pub(super) fn experts_bytes(weights: &QuantizedTensor, experts: usize, chosen: &[u32]) -> u64 {
    let used = (0..experts as u32).filter(|expert| chosen.contains(expert)).count();
    (matrix_bytes(weights) / experts * used) as u64
}

/// Returns random matrices.
pub(super) fn matrix(recipe: &Recipe, size: Size) -> Result<QuantizedTensor> {
    random(QuantizedShape::of(recipe, size.all_rows()), 1)
}

/// Returns a random matrix with all codes and a wide range of scales.
///
/// Scales of MXFP4 are from 2^−12 to ½, as in weights. With larger ones all f16 results are
/// infinite.
fn random(shape: QuantizedShape, seed: u64) -> Result<QuantizedTensor> {
    let (codes, scales) = shape.bytes()?;
    let mut bytes = [vec![0; codes], vec![0; scales]];
    for (i, bytes) in (0..).zip(&mut bytes) {
        bytes.par_chunks_mut(1 << 16).enumerate().for_each(|(part, chunk)| {
            let mut rng = fastrand::Rng::with_seed((seed * 2 + i) << 32 | part as u64);
            match (i, shape.format.facts().scale) {
                (0, _) => rng.fill(chunk),
                (_, ScaleType::E8m0) => chunk.fill_with(|| rng.u8(115..127)),
                _ => chunk.fill_with(|| rng.u8(..0x7F)),
            }
        });
    }
    let [codes, scales] = bytes;
    let tensor = QuantizedTensor::from_parts(shape, codes, scales)?;
    if shape.format.has_global_scale() {
        tensor.with_global_scale(GlobalScale::Multiplier(1e-4))
    } else {
        Ok(tensor)
    }
}
