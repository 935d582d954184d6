//! The product that takes nearly all time: a tile of sums minus a tile of products.

use crate::cpu::simd::Lanes;
use crate::cpu::simd::products::Products;

/// Columns in a tile.
pub(super) const TILE: usize = 8;

/// Rows of terms per pass over a group: 256 rows of both operands fit the L1 cache.
pub(super) const CHUNK: usize = 256;

/// Columns of f64 sums that registers hold. Eight spill on AVX2, and are no faster on AVX-512.
const AT_ONCE: usize = 4;

/// Subtracts `factors[k][j] · terms[k][lane]` from `sums[j][lane]`, with k ascending.
///
/// Each product and its difference are one fused operation, on every instruction set, so all give
/// the same bits, and so does every way to cut the range of k. The compiler vectorizes the loops.
#[inline(always)]
pub(super) fn subtract_products_f64(
    sums: &mut [[f64; TILE]; TILE],
    factors: &[[f64; TILE]],
    terms: &[[f64; TILE]],
) {
    for (part, sums) in sums.as_chunks_mut::<AT_ONCE>().0.iter_mut().enumerate() {
        let mut kept = *sums;
        for (factors, terms) in factors.iter().zip(terms) {
            for j in 0..AT_ONCE {
                let factor = -factors[part * AT_ONCE + j];
                for lane in 0..TILE {
                    kept[j][lane] = factor.mul_add(terms[lane], kept[j][lane]);
                }
            }
        }
        *sums = kept;
    }
}

/// [`subtract_products_f64`] in f32, for sixteen rows.
#[inline(always)]
pub(super) fn subtract_products<V: Products>(
    simd: V,
    sums: &mut [Lanes<f32>; TILE],
    factors: &[[f32; TILE]],
    terms: &[Lanes<f32>],
) {
    if V::MANY_REGISTERS {
        subtract_columns::<V, TILE>(simd, sums, factors, terms);
    } else {
        subtract_columns::<V, { TILE / 2 }>(simd, sums, factors, terms);
    }
}

/// Subtracts products from `COLUMNS` columns of sums at once, which stay in registers.
#[inline(always)]
fn subtract_columns<V: Products, const COLUMNS: usize>(
    simd: V,
    sums: &mut [Lanes<f32>; TILE],
    factors: &[[f32; TILE]],
    terms: &[Lanes<f32>],
) {
    for (part, sums) in sums.as_chunks_mut::<COLUMNS>().0.iter_mut().enumerate() {
        let mut kept = [simd.splat(0.0); COLUMNS];
        for j in 0..COLUMNS {
            kept[j] = simd.load(&sums[j]);
        }
        for (factors, terms) in factors.iter().zip(terms) {
            let terms = simd.load(terms);
            for j in 0..COLUMNS {
                kept[j] = simd.fnma(simd.splat(factors[part * COLUMNS + j]), terms, kept[j]);
            }
        }
        for j in 0..COLUMNS {
            sums[j] = simd.store(kept[j]);
        }
    }
}

/// The tile of sums that starts at a row.
#[inline(always)]
pub(super) fn tile_at<T, const LANES: usize>(rows: &mut [[T; LANES]], row: usize) -> &mut [[T; LANES]; TILE] {
    &mut rows[row..].as_chunks_mut::<TILE>().0[0]
}
