//! Plain rounding of sixteen blocks at a time, which are a group.
//!
//! First come the scales of all blocks, one lane per block. Then come the codes: [`halfwords`]
//! compares 16-bit values with thresholds, [`floats`] computes on f32.

mod floats;
pub(super) mod format;
mod halfwords;
pub(super) mod mxfp4;
pub(super) mod nvfp4;
mod windows;

use microscale_formats::mx;

use self::format::GroupFormat;
use self::windows::{STREAMS, WINDOW};
use crate::cpu::blocks::format::BlockFormat;
use crate::cpu::blocks::slow_path;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::simd::{LANES, Vector};
use crate::element::{Dtype, Element};
use crate::scheme::NonFinite;

/// Quantizes a run in windows of whole groups.
///
/// Slices are separate arguments, not fields of a struct: the compiler knows that arguments do not
/// alias, and need not reload factors.
#[inline(always)]
pub(in crate::cpu) fn quantize<T: Element, V: Vector, G: GroupFormat<N>, const N: usize, const SIGNS: u8>(
    simd: V,
    values: &[T],
    groups: &G,
    non_finite: NonFinite,
    codes: &mut [u8],
    scales: &mut [u8],
    tally: &mut Tally,
) {
    let window = WINDOW / (LANES * N * size_of::<T>());
    let (group, group_codes) = (LANES * N, LANES * N / 2);
    let whole = values.len() / group;
    let windows = whole.div_ceil(window);
    let turns = windows.div_ceil(STREAMS);
    for i in 0..turns * STREAMS {
        let first = (i % STREAMS * turns + i / STREAMS) * window;
        if first >= whole {
            continue;
        }
        let end = whole.min(first + window);
        let window = Window {
            offset: first * group,
            values: &values[first * group..end * group],
            codes: &mut codes[first * group_codes..end * group_codes],
            scales: &mut scales[first * LANES..end * LANES],
        };
        window.quantize::<V, G, N, SIGNS>(simd, groups, non_finite, tally);
    }
    // Pads the remaining blocks to a group with zeros.
    let scales = &mut scales[whole * LANES..];
    if !scales.is_empty() {
        let (values, codes) = (&values[whole * group..], &mut codes[whole * group_codes..]);
        let mut padded = [T::default(); MOST];
        padded[..values.len()].copy_from_slice(values);
        let (mut all_codes, mut all_scales) = ([0; MOST / 2], [0; LANES]);
        let window = Window {
            offset: whole * group,
            values: &padded[..group],
            codes: &mut all_codes[..group_codes],
            scales: &mut all_scales,
        };
        window.quantize::<V, G, N, SIGNS>(simd, groups, non_finite, tally);
        codes.copy_from_slice(&all_codes[..codes.len()]);
        scales.copy_from_slice(&all_scales[..scales.len()]);
    }
}

/// Elements of the largest group.
const MOST: usize = LANES * mx::BLOCK;

/// Whole groups, with their output.
struct Window<'a, T> {
    /// Offset of the first value in the run.
    offset: usize,
    values: &'a [T],
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<T: Element> Window<'_, T> {
    /// Quantizes a window: all scales, then all codes, then the groups that need the slow path.
    ///
    /// Scales and codes are separate loops so that neither waits for the other.
    #[inline(always)]
    fn quantize<V: Vector, G: GroupFormat<N>, const N: usize, const SIGNS: u8>(
        self,
        simd: V,
        groups: &G,
        non_finite: NonFinite,
        tally: &mut Tally,
    ) {
        let Self { values, codes, scales, .. } = self;
        let mut left = 0;
        let (all_scales, _) = scales.as_chunks_mut::<LANES>();
        for (i, (group, scales)) in values.chunks_exact(LANES * N).zip(all_scales).enumerate() {
            let amax = match T::DTYPE {
                Dtype::F32 => floats::amax::<V, N>(simd, bytemuck::cast_slice(group)),
                Dtype::F16 | Dtype::Bf16 => halfwords::amax::<T, V, N>(simd, group),
            };
            let finite = simd.at_most(amax, simd.splat(f32::MAX)) == u16::MAX;
            if !(finite && groups.scales::<T, V>(simd, amax, scales, tally)) {
                left |= 1 << i;
            }
        }
        match T::DTYPE {
            Dtype::F32 => {
                floats::encode::<V, G, N, SIGNS>(simd, bytemuck::cast_slice(values), groups, scales, codes);
            }
            Dtype::F16 | Dtype::Bf16 => {
                let thresholds = groups.thresholds();
                halfwords::encode::<V, N, SIGNS>(
                    simd,
                    bytemuck::cast_slice(values),
                    thresholds,
                    scales,
                    codes,
                );
            }
        }
        if left != 0 {
            Self { values, codes, scales, ..self }.slow_path(left, groups, non_finite, tally);
        }
    }

    /// Quantizes the groups whose bits are set, by the reference.
    #[cold]
    #[inline(never)]
    fn slow_path<const N: usize>(
        self,
        left: u32,
        blocks: &impl BlockFormat<N>,
        non_finite: NonFinite,
        tally: &mut Tally,
    ) {
        let codes = self.codes.chunks_exact_mut(N / 2).zip(self.scales);
        for (i, (block, (codes, scale))) in self.values.as_chunks::<N>().0.iter().zip(codes).enumerate() {
            if left >> (i / LANES) & 1 != 0 {
                let offset = self.offset + i * N;
                *scale = slow_path::quantize_block(block, offset, blocks, non_finite, codes, tally);
            }
        }
    }
}

/// The bits of a run's largest magnitude. NaN and infinities count as the largest.
#[inline(always)]
pub(in crate::cpu) fn amax_bits<T: Element, V: Vector>(simd: V, values: &[T]) -> u32 {
    match T::DTYPE {
        Dtype::F32 => floats::amax_bits(simd, bytemuck::cast_slice(values)),
        Dtype::F16 | Dtype::Bf16 => halfwords::amax_bits::<T, V>(simd, bytemuck::cast_slice(values)),
    }
}
