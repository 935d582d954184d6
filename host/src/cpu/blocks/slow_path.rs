//! The slow path: blocks with NaN or infinities, and blocks that vector code does not support.

use microscale_formats::block;

use super::format::BlockFormat;
use super::tally::Tally;
use crate::element::Element;
use crate::scheme::NonFinite;

/// Quantizes one block by the reference, and returns the scale byte.
///
/// Applies the policy for non-finite values first.
#[inline(never)]
pub(in crate::cpu) fn quantize_block<T: Element, const N: usize>(
    block: &[T; N],
    offset: usize,
    blocks: &impl BlockFormat<N>,
    non_finite: NonFinite,
    codes: &mut [u8],
    tally: &mut Tally,
) -> u8 {
    let mut values = block.map(T::to_f32);
    if block::is_non_finite(block::amax_bits(&values)) {
        values = replace_non_finite::<T, N>(values, offset, non_finite, tally);
    }
    let (scale, events) = blocks.quantize_block::<T>(&values, codes);
    tally.add(events);
    scale
}

/// Counts the non-finite values of a block, and replaces them if the policy is to saturate.
#[cold]
pub(in crate::cpu) fn replace_non_finite<T: Element, const N: usize>(
    values: [f32; N],
    offset: usize,
    non_finite: NonFinite,
    tally: &mut Tally,
) -> [f32; N] {
    tally.count_non_finite(&values, offset);
    match non_finite {
        NonFinite::Saturate => values.map(|v| if v.is_nan() { 0.0 } else { v.clamp(-T::MAX, T::MAX) }),
        NonFinite::Error | NonFinite::Propagate => values,
    }
}

/// Block `i` of a run, in place if it is whole.
///
/// A partial last block is copied to `padded`, which must hold zeros.
#[inline(always)]
pub(in crate::cpu) fn block_at<'a, T: Element, const N: usize>(
    values: &'a [T],
    i: usize,
    padded: &'a mut [T; N],
) -> &'a [T; N] {
    let rest = &values[i * N..];
    match rest.first_chunk() {
        Some(whole) => whole,
        None => {
            padded[..rest.len()].copy_from_slice(rest);
            padded
        }
    }
}
