//! The error of a quantized matrix in the outputs of its layer.

use super::factor::GptqFactor;
use super::products::{TILE, subtract_products, tile_at};
use super::rows::{BATCH, subtract_earlier};
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// Adds the squared norm of each row times R, in the factor's unit.
///
/// `rows` is `[groups, positions]`, and `norms` has an entry for each row, without padding.
#[inline(always)]
pub(in crate::cpu) fn add_norms<V: Products>(
    simd: V,
    factor: &GptqFactor,
    rows: &[Lanes<f32>],
    norms: &mut [f64],
) {
    let positions = factor.order.len();
    let mut sums = vec![[0.0; LANES]; rows.len() / positions * BATCH];
    for start in (0..positions).step_by(BATCH) {
        let count = BATCH.min(positions - start);
        for (sums, rows) in sums.chunks_mut(BATCH).zip(rows.chunks(positions)) {
            for (sums, values) in sums.iter_mut().zip(&rows[start..][..count]) {
                for lane in 0..LANES {
                    sums[lane] = -values[lane];
                }
            }
        }
        subtract_earlier(simd, factor, rows, &mut sums, start, count);
        let groups = sums.chunks_mut(BATCH).zip(rows.chunks(positions)).zip(norms.chunks_mut(LANES));
        for ((sums, rows), norms) in groups {
            for offset in (0..count).step_by(TILE) {
                let position = start + offset;
                let factors = &factor.feedback.0[position / TILE];
                let sums = tile_at(sums, offset);
                // The tile's own rows are 0 on and below the diagonal.
                subtract_products(simd, sums, &factors[start..], &rows[start..position + TILE]);
                for (sums, pivot) in sums.iter().zip(&factor.pivots[position..]) {
                    for (norm, sum) in norms.iter_mut().zip(sums) {
                        let product = f64::from(*sum) * f64::from(*pivot);
                        *norm += product * product;
                    }
                }
            }
        }
    }
}
