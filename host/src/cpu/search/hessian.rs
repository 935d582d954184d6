//! Searching scales by the error in a layer's output, with `microscale_formats::hessian`.

use microscale_formats::hessian::Hessian;
use microscale_formats::search::{Found, Scales};
use microscale_formats::{Format, Search, mx, nvfp4};
use rayon::prelude::*;

use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::VectorizedFormat;
use crate::cpu::decode::decode_e2m1;
use crate::cpu::rounding::params::QuantizeParams;
use crate::cpu::search::{self, ScaleSearch, SearchStart};
use crate::cpu::simd::Vector;
use crate::element::Element;
use crate::error::{Error, HessianFault, Result};
use crate::recipe::Recipe;

/// The largest accepted asymmetry, relative to the geometric mean of the diagonal entries.
///
/// Products summed in 16 bits differ by this much.
const ASYMMETRY: f64 = 1.0 / 256.0;

/// The Hessians of all blocks of columns.
pub(in crate::cpu) enum HessianStore {
    Nvfp4(Vec<Hessian<{ nvfp4::BLOCK }>>),
    Mxfp4(Vec<Hessian<{ mx::BLOCK }>>),
}

/// The Hessians of a run's blocks.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Hessians<'a> {
    Nvfp4(&'a [Hessian<{ nvfp4::BLOCK }>]),
    Mxfp4(&'a [Hessian<{ mx::BLOCK }>]),
}

impl HessianStore {
    /// Checks the entries and prepares the Hessians.
    pub(in crate::cpu) fn new(entries: &[f32], recipe: &Recipe, columns: usize) -> Result<Self> {
        let format = recipe.format();
        if !format.is_searched() {
            return Err(Error::NoSearch { format });
        }
        if recipe.search == Search::None {
            return Err(Error::HessianWithoutSearch);
        }
        let blocks = columns.div_ceil(format.block());
        let expected = blocks.saturating_mul(format.block() * format.block());
        if entries.len() != expected {
            return Err(Error::HessianLength { format, columns, expected, found: entries.len() });
        }
        match format {
            Format::Nvfp4 => prepare(entries, columns).map(Self::Nvfp4),
            _ => prepare(entries, columns).map(Self::Mxfp4),
        }
    }

    /// The Hessians of `count` blocks of columns, starting at column `col`.
    pub(in crate::cpu) fn at_column(&self, col: usize, count: usize) -> Hessians<'_> {
        match self {
            Self::Nvfp4(all) => Hessians::Nvfp4(&all[col / nvfp4::BLOCK..][..count]),
            Self::Mxfp4(all) => Hessians::Mxfp4(&all[col / mx::BLOCK..][..count]),
        }
    }
}

fn prepare<const N: usize>(entries: &[f32], columns: usize) -> Result<Vec<Hessian<N>>> {
    let blocks = entries.as_chunks::<N>().0.as_chunks::<N>().0;
    let used = |block: usize| N.min(columns - block * N);
    if let Some(error) = blocks.iter().enumerate().find_map(|(block, rows)| fault(block, rows, used(block))) {
        return Err(error);
    }
    Ok(blocks.par_iter().enumerate().map(|(block, rows)| Hessian::new(rows, used(block))).collect())
}

/// The first fault in the first `used` rows and columns of a block's matrix.
fn fault<const N: usize>(block: usize, rows: &[[f32; N]; N], used: usize) -> Option<Error> {
    let places = || (0..used).flat_map(|row| (0..used).map(move |col| (row, col)));
    let found = |fault, (row, col): (usize, usize)| Error::HessianEntry {
        block,
        row,
        col,
        value: rows[row][col],
        fault,
    };
    // Symmetry is measured relative to the diagonal, so the diagonal is checked first.
    let not_finite = places().find(|(i, j)| !rows[*i][*j].is_finite());
    let negative = || (0..used).map(|i| (i, i)).find(|(i, _)| rows[*i][*i] < 0.0);
    let asymmetric = || {
        places().find(|(i, j)| {
            let [a, b, ii, jj] = [rows[*i][*j], rows[*j][*i], rows[*i][*i], rows[*j][*j]].map(f64::from);
            (a - b) * (a - b) > ASYMMETRY * ASYMMETRY * ii * jj
        })
    };
    not_finite
        .map(|place| found(HessianFault::NotFinite, place))
        .or_else(|| negative().map(|place| found(HessianFault::NegativeDiagonal, place)))
        .or_else(|| asymmetric().map(|place| found(HessianFault::NotSymmetric, place)))
}

/// Quantizes a run, given the Hessian of each of its blocks.
#[inline(always)]
pub(in crate::cpu) fn quantize<T: Element, V: Vector>(
    simd: V,
    values: &[T],
    hessians: Hessians<'_>,
    params: &QuantizeParams,
    output: Output<'_>,
) -> Tally {
    match &params.searching {
        Some(searching) => search::quantize_with::<T, V>(simd, values, &hessians, params, searching, output),
        // `HessianStore::new` refuses recipes without a search.
        None => Tally::default(),
    }
}

impl ScaleSearch<{ nvfp4::BLOCK }> for Hessians<'_> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; nvfp4::BLOCK],
        format: &impl VectorizedFormat<{ nvfp4::BLOCK }>,
        candidates: &impl Scales,
        start: SearchStart,
    ) -> Found {
        match self {
            Self::Nvfp4(hessians) => find::<T, _>(&hessians[i], wide, format, candidates, start),
            Self::Mxfp4(_) => Found { byte: start.plain, tried: 0 },
        }
    }
}

impl ScaleSearch<{ mx::BLOCK }> for Hessians<'_> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; mx::BLOCK],
        format: &impl VectorizedFormat<{ mx::BLOCK }>,
        candidates: &impl Scales,
        start: SearchStart,
    ) -> Found {
        match self {
            Self::Mxfp4(hessians) => find::<T, _>(&hessians[i], wide, format, candidates, start),
            Self::Nvfp4(_) => Found { byte: start.plain, tried: 0 },
        }
    }
}

#[inline(always)]
fn find<T: Element, const N: usize>(
    hessian: &Hessian<N>,
    wide: &[f32; N],
    format: &impl VectorizedFormat<N>,
    candidates: &impl Scales,
    SearchStart { search, amax_bits, plain, larger, .. }: SearchStart,
) -> Found {
    let decoded = |byte| {
        let (scaling, _) = format.rescale::<T>(amax_bits, byte);
        let (mut codes, mut values) = ([0; N], [0.0; N]);
        let codes = &mut codes[..N / 2];
        format.encode(wide, scaling, codes);
        decode_e2m1(codes, 1.0, &mut values);
        values
    };
    // A trait object, so that the search is compiled once, not for each dtype, format and
    // instruction set.
    let decoded: &dyn Fn(u8) -> [f32; N] = &decoded;
    hessian.search(wide, search, candidates, (plain, larger), decoded)
}
