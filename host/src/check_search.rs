//! A debug check of searched scales: no untried scale would have been better.

use rayon::prelude::*;

use crate::cpu::Scalars;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::formats::search::{Block, Measure, PowersOfTwo, Scales};
use crate::formats::{E8m0, block, mx, nvfp4};
use crate::recipe::{Recipe, check_importance};
use crate::scheme::NonFinite;
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;
use microscale_formats::Format;

/// Rounding of an error's square root, relative to its own norm and the norm of the block.
///
/// Its steps, each to 2⁻²⁴, are the factor and its reciprocal, the difference, and a sum of at most
/// eight roundings. They make 6 for each of two scales. The difference between compared and stored
/// scales (a global scale converted to the other direction) adds the same amount again.
const ROUNDING: f64 = 24.0 / (1 << 24) as f64;

/// Checks that the result of a full search ([`Search::Full`](crate::Search::Full)) is the best.
///
/// For each block, the error of its scale is compared with the errors of all 126 or 255 scales that
/// can be stored. None may be smaller, beyond rounding. The result may come from any device. The
/// check takes ten times as long as the search. Blocks with the NaN scale are skipped. Returns the
/// number of checked blocks.
///
/// # Errors
/// [`Error::SkippedScale`] for a block that another scale fits better. [`Error::Length`],
/// [`Error::RowStride`], [`Error::TooLarge`], [`Error::QuantizedShape`] and [`Error::Importance`]
/// if the arguments do not match. [`Error::NoSearch`] for a format whose scales are not searched.
pub fn check_search<'a, T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    importance: Option<&[f32]>,
    tensor: impl Into<QuantizedView<'a>>,
) -> Result<u64> {
    let tensor = tensor.into();
    shape.check("the input", values.len())?;
    tensor.shape().require(QuantizedShape::of(recipe, shape))?;
    if let Some(importance) = importance {
        check_importance(importance, shape.cols)?;
    }
    if shape.is_empty() {
        return Ok(0);
    }
    let scales = tensor.linear_scales();
    let check = Check { shape, non_finite: recipe.non_finite, importance, scales: &scales };
    match recipe.format() {
        Format::Nvfp4 => check.rows::<T, { nvfp4::BLOCK }>(values, &tensor.global_scale()),
        Format::Mxfp4 => check.rows::<T, { mx::BLOCK }>(values, &PowersOfTwo),
        format => Err(Error::NoSearch { format }),
    }
}

struct Check<'a> {
    shape: Shape,
    non_finite: NonFinite,
    importance: Option<&'a [f32]>,
    /// The scales in linear order.
    scales: &'a [u8],
}

impl Check<'_> {
    fn rows<T: Element, const N: usize>(&self, values: &[T], scales: &(impl Scales + Sync)) -> Result<u64> {
        let Shape { cols, row_stride, .. } = self.shape;
        let rows = values[..self.shape.span()?].par_chunks(row_stride);
        rows.enumerate()
            .map(|(row, values)| {
                let blocks = values[..cols].chunks(N).enumerate();
                blocks.map(|(i, values)| self.block::<T, N>(row, i, values, scales)).sum::<Result<u64>>()
            })
            .sum()
    }

    /// Checks block `i` of a row.
    fn block<T: Element, const N: usize>(
        &self,
        row: usize,
        i: usize,
        values: &[T],
        scales: &impl Scales,
    ) -> Result<u64> {
        let mut wide = [0.0; N];
        for (wide, value) in wide.iter_mut().zip(values) {
            *wide = self.non_finite.replaced::<T>(value.to_f32());
        }
        if block::is_non_finite(block::amax_bits(&wide)) {
            return Ok(0);
        }
        let importance = self.importance.map(|importance| {
            let mut of_block = [0.0; N];
            let of_columns = importance[i * N..].iter().take(values.len());
            of_block.iter_mut().zip(of_columns).for_each(|(weight, of_column)| *weight = *of_column);
            of_block
        });
        let chosen = self.scales[row * self.shape.cols.div_ceil(N) + i];
        let block = Block::new(&wide, importance);
        let root = |factor: f32| f64::from(block.error::<Scalars>(factor)).sqrt();
        let least = root(scales.factor(chosen));
        // Under the largest possible factor, all elements become zeros.
        let allowed = least - ROUNDING * (root(f32::MAX) + least);
        let better = bytes(scales).find(|byte| root(scales.factor(*byte)) < allowed);
        better.map_or(Ok(1), |better| Err(Error::SkippedScale { row, block: i, chosen, better }))
    }
}

/// Returns the bytes of all scales except 0 and NaN.
fn bytes<S: Scales>(_: &S) -> std::ops::RangeInclusive<u8> {
    const { assert!(S::LAST < E8m0::NAN.to_bits()) };
    S::FIRST..=S::LAST
}
