//! Exact casts to block FP8: E4M3 under a scale for each 128×128 of a matrix.
//!
//! Scales are powers of two, 2^-126 or more. The cast takes the smallest scale that brings a
//! block's largest value in range. If a block is inexact with it, then it is inexact with every
//! scale: doubling the scale keeps the significands of normal numbers and halves the resolution of
//! subnormal ones.
//!
//! Values of MXFP4 are 1 or 3 times a power of two. E4M3 has these values from 2^-9 to 2^8 and from
//! 3·2^-9 to 3·2^7. So a block of MXFP4 values is exact if and only if the exponent of its largest
//! value exceeds the exponent of the least significant bit of any value by at most 17. Codes, from
//! 0.5 to 6, account for up to 3 of these 17. Whatever the codes are, scales with a ratio of at
//! most 2^14 are exact. Codes that include 0.5 and 6 under scales with a ratio of 2^15 are not.

use std::ops::Range;

use microscale::Device;
use microscale::cast::{e4m3_exponent, largest, to_e4m3};
use microscale::formats::E4m3;
use microscale::{Position, Report, ScaleLayout};
use rayon::prelude::*;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::fp8_block::{BLOCK, SCALES};
use crate::checkpoint_formats::packed::Packed;
use crate::convert::done::ConvertedTensor;
use crate::convert::requantized::{BandDifference, Requantized};
use crate::dtype::FileDtype;
use crate::error::Result;
use crate::error::format::FormatError;
use crate::pipeline::Worker;
use crate::read::input::Input;
use crate::read::memory::afford;
use crate::read::scale_grid::{CodeKind, ScaleGrid, grid};
use crate::read::tensor::{Tensor, elements};
use crate::sums::Sums;
use crate::write::copy::copy;
use crate::write::outline::Outline;
use crate::write::sink::Sink;

/// The least exponent of a scale: its inverse is a normal number too.
const LEAST: i32 = -126;

/// Rows of blocks: the codes of whole rows, and the scale and the largest magnitude of each block;
/// and the blocks that are not exact.
struct BlockCast {
    codes: Vec<u8>,
    scales: Vec<f32>,
    largest: Vec<f32>,
    inexact: Vec<usize>,
}

impl BlockCast {
    /// Casts up to 128 rows of values.
    fn of(values: &[f32], cols: usize) -> Self {
        let largest: Vec<f32> = (0..cols.div_ceil(BLOCK[1]))
            .into_par_iter()
            .map(|block| {
                let columns = block * BLOCK[1]..cols.min((block + 1) * BLOCK[1]);
                let rows = values.chunks_exact(cols).map(|row| largest(&row[columns.clone()]));
                rows.fold(0.0, f32::max)
            })
            .collect();
        // No scale makes an infinity exact.
        let power = |largest: &f32| e4m3_exponent(*largest).map_or(0, |power| power.max(LEAST));
        let powers: Vec<i32> = largest.iter().map(power).collect();
        let mut codes = vec![0; values.len()];
        let rows = codes.par_chunks_exact_mut(cols).zip(values.par_chunks_exact(cols));
        let none = || vec![false; powers.len()];
        let inexact = rows.fold(none, |mut inexact, (codes, values)| {
            let blocks = codes.chunks_mut(BLOCK[1]).zip(values.chunks(BLOCK[1])).zip(&powers);
            for (inexact, ((codes, values), power)) in inexact.iter_mut().zip(blocks) {
                *inexact |= !to_e4m3(values, *power, codes);
            }
            inexact
        });
        let inexact = inexact.reduce(none, |a, b| a.iter().zip(&b).map(|(a, b)| a | b).collect());
        let inexact = inexact.into_iter().enumerate().filter_map(|(block, inexact)| inexact.then_some(block));
        let inexact = inexact.collect();
        Self { codes, scales: powers.into_iter().map(|power| 2f32.powi(power)).collect(), largest, inexact }
    }

    /// Rounds the blocks that are not exact, by transformers' rule: values times 448 / amax, under
    /// the inverse of that. There is no rule for infinities.
    fn round(&mut self, values: &[f32], cols: usize) {
        for block in &self.inexact {
            let factor = (E4m3::MAX / self.largest[*block]).min(2f32.powi(-LEAST));
            self.scales[*block] = 1.0 / factor;
            let columns = block * BLOCK[1]..cols.min((block + 1) * BLOCK[1]);
            let rows = self.codes.chunks_exact_mut(cols).zip(values.chunks_exact(cols));
            for (codes, values) in rows {
                for (code, value) in codes[columns.clone()].iter_mut().zip(&values[columns.clone()]) {
                    *code = E4m3::from_f32((value * factor).clamp(-E4m3::MAX, E4m3::MAX)).to_bits();
                }
            }
        }
    }

    /// The values that a file of this is read as.
    fn values(&self, packed: &Packed<'_>, cols: usize) -> Option<Vec<f32>> {
        let (dtype, data) = (FileDtype::F32, bytemuck::cast_slice(&self.scales));
        let scaling = ScaleGrid {
            name: SCALES,
            dtype,
            data,
            file: packed.codes.file,
            block: BLOCK,
            shared: false,
            codes: CodeKind::E4m3,
            layout: ScaleLayout::Linear,
        };
        let shape = [self.codes.len() / cols, cols];
        scaling.values(&shape, &self.codes, 0..self.codes.len())
    }
}

/// The elements of each row of blocks of a tensor, in order.
fn bands(shape: &[usize]) -> Vec<Range<usize>> {
    let &[.., rows, cols] = shape else { return Vec::new() };
    let matrices = elements(shape) as usize / (rows * cols).max(1);
    let of_matrix = |matrix: usize| {
        let row = move |row: usize| (matrix * rows + row) * cols;
        (0..rows).step_by(BLOCK[0]).map(move |first| row(first)..row(rows.min(first + BLOCK[0])))
    };
    (0..matrices).flat_map(of_matrix).collect()
}

/// The shape of the scales of a tensor.
fn scales_shape(shape: &[usize]) -> Vec<usize> {
    match shape.split_last_chunk() {
        Some((matrices, size)) => [matrices, &grid(*size, BLOCK)].concat(),
        None => Vec::new(),
    }
}

/// Returns whether a tensor of codes under scales is block FP8 already. So is a matrix within a
/// single block that has one scale.
pub(crate) fn is_block_fp8(tensor: &Tensor<'_>) -> bool {
    let single = |scaling: ScaleGrid<'_>| match tensor.shape {
        [rows, cols] => scaling.block == [*rows, *cols] && *rows <= BLOCK[0] && *cols <= BLOCK[1],
        _ => false,
    };
    let is = |scaling: ScaleGrid<'_>| {
        scaling.codes == CodeKind::E4m3 && (scaling.block == BLOCK && !scaling.shared || single(scaling))
    };
    tensor.dtype == FileDtype::F8_E4M3 && tensor.scaling.is_some_and(is)
}

/// Checks that a quantized tensor has matrices whose rows are a layer's outputs.
///
/// # Errors
/// [`FormatError::NotConverted`](crate::FormatError::NotConverted).
pub(crate) fn check_blocks(packed: &Packed<'_>) -> Result<()> {
    if !packed.storage.transposed && packed.shape.len() > 1 {
        return Ok(());
    }
    let (file, tensor) = (packed.codes.file.into(), packed.name.into());
    Err(FormatError::NotConverted { file, tensor, to: CheckpointFormat::Fp8Block }.into())
}

/// The codes and scales of a tensor.
pub(crate) fn outlines(name: &str, shape: &[usize]) -> [Outline; 2] {
    let outline = |name, dtype, shape| Outline { name, dtype, shape };
    [
        outline(name.into(), FileDtype::F8_E4M3, shape.to_vec()),
        outline(format!("{name}{SCALES}"), FileDtype::F32, scales_shape(shape)),
    ]
}

/// Makes sure that all blocks of a tensor are exact. Values are found on the CPU: nothing else is
/// done with them.
pub(crate) fn check_exact(packed: &Packed<'_>) -> Result<()> {
    let cols = packed.shape.last().copied().unwrap_or(1);
    let (mut blocks, mut of) = (0, 0);
    for band in bands(&packed.shape) {
        afford(&packed.codes, packed.name, band.len())?;
        let cast = BlockCast::of(&packed.values_in::<f32>(band, &Device::Cpu)?, cols);
        (blocks, of) = (blocks + cast.inexact.len() as u64, of + cast.scales.len() as u64);
    }
    let (file, tensor) = (packed.codes.file.into(), packed.name.into());
    match blocks {
        0 => Ok(()),
        blocks => Err(FormatError::NotExactBlocks { file, tensor, blocks, of }.into()),
    }
}

/// Casts a tensor and writes it, one row of blocks after another; `rounding` blocks without an
/// exact cast.
pub(crate) fn cast_to_blocks<'env>(
    packed: &'env Packed<'env>,
    rounding: bool,
    worker: &Worker<'_, 'env>,
    sink: &Sink,
) -> Result<ConvertedTensor> {
    let cols = packed.shape.last().copied().unwrap_or(1);
    let [codes, scales] = outlines(packed.name, &packed.shape);
    let mut rounded = Requantized::new(packed.name, packed.format, CheckpointFormat::Fp8Block);
    let (bands, device, into) = (bands(&packed.shape), worker.device, sink.clone());
    let (last, scales_each) = (bands.len(), (cols.div_ceil(BLOCK[1]) * size_of::<f32>()) as u64);
    let cast_band = move |number: usize| {
        let band = bands.get(number).cloned().unwrap_or_default();
        let values: Vec<f32> = packed.values_in(band.clone(), device)?;
        let mut cast = BlockCast::of(&values, cols);
        if let Some(block) = cast.inexact.iter().find(|block| cast.largest[**block].is_infinite()) {
            let at = values.iter().position(|value| value.is_infinite()).unwrap_or(block * BLOCK[1]);
            let first = Position { row: (band.start + at) / cols, col: at % cols };
            let mut report = Report::default();
            (report.infinite, report.first_non_finite) = (1, Some(first));
            return Err(packed.error(microscale::Error::NonFinite { first, report }));
        }
        let mut difference = BandDifference::default();
        let is_wrong = if rounding {
            cast.round(&values, cols);
            difference = BandDifference::between(&values, &cast.values(packed, cols).unwrap_or_default());
            difference.values != band.len() as u64
        } else {
            // Casting has compared every value.
            !cast.inexact.is_empty()
        };
        if is_wrong {
            return Err(packed.error(microscale::Error::Wrong("a cast")));
        }
        into.put(0, band.start as u64, cast.codes)?;
        into.put(1, number as u64 * scales_each, bytemuck::cast_slice(&cast.scales).to_vec())?;
        Ok(difference)
    };
    worker.each_band(last, cast_band, |band| {
        rounded.add(&band);
        Ok(())
    })?;
    let has_inputs = packed.input_scale.is_some() || !packed.other_inputs.is_empty();
    let dropped_input = has_inputs.then(|| packed.name.into());
    let requantized = (rounded.differing != 0).then_some(rounded);
    let mut done = ConvertedTensor { dropped_input, requantized, ..Default::default() };
    done.converted.add(elements(&packed.shape), packed.bytes() as u64, codes.bytes() + scales.bytes());
    Ok(done)
}

/// Writes block FP8 with its scales in F32, which holds every number that they may be.
pub(crate) fn restate<'env>(
    input: &Input<'env>,
    worker: &Worker<'_, 'env>,
    sink: &Sink,
) -> Result<ConvertedTensor> {
    let tensor = &input.tensor;
    let [codes, scales] = outlines(tensor.name, tensor.shape);
    copy(input, worker, sink)?;
    let values: Vec<f32> = tensor.scaling.iter().flat_map(ScaleGrid::scales).collect();
    sink.put(1, 0, bytemuck::cast_slice(&values).to_vec())?;
    let mut copied = Sums::default();
    copied.add(tensor.elements(), tensor.bytes() as u64, codes.bytes() + scales.bytes());
    Ok(ConvertedTensor { copied, ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The magnitudes of E2M1.
    const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    /// The definition: some power of two makes all values numbers of E4M3.
    fn is_exact_under_any(values: &[f32]) -> bool {
        (LEAST..=127).any(|power| {
            let scale = 2f64.powi(power);
            values.iter().all(|value| {
                let number = E4m3::from_f32((f64::from(*value) / scale) as f32);
                f64::from(number.to_f32()) * scale == f64::from(*value)
            })
        })
    }

    #[test]
    fn all_pairs_of_numbers_of_mxfp4_at_every_distance_are_exact_where_some_scale_makes_them() {
        for first in [0, 1, 60, 127, 230] {
            for apart in 0..=20 {
                let [low, high] = [first, first + apart].map(|scale| 2f64.powi(scale - 127) as f32);
                for a in NUMBERS {
                    for b in NUMBERS {
                        let values = [a * low, -b * high, 0.0, -0.0];
                        let cast = BlockCast::of(&values, 4);
                        assert_eq!(cast.inexact.is_empty(), is_exact_under_any(&values), "{a} {b} {apart}");
                        if apart <= 14 {
                            assert!(cast.inexact.is_empty());
                        }
                    }
                }
                let ends = [0.5 * low, 6.0 * high];
                assert_eq!(BlockCast::of(&ends, 2).inexact.is_empty(), apart <= 14, "{apart}");
                let powers = [low, high];
                assert_eq!(BlockCast::of(&powers, 2).inexact.is_empty(), apart <= 17, "{apart}");
            }
        }
    }

    #[test]
    fn values_of_any_block_are_exact_where_some_scale_makes_them() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut exact, mut not) = (0, 0);
        for _ in 0..2000 {
            let spread = random.i32(0..24);
            let values: Vec<f32> = (0..random.usize(1..9))
                .map(|_| {
                    let number = E4m3::from_bits(random.u8(0..0x7F)).to_f32();
                    number * 2f32.powi(random.i32(-60..=spread - 60))
                })
                .collect();
            let said = BlockCast::of(&values, values.len()).inexact.is_empty();
            assert_eq!(said, is_exact_under_any(&values), "{values:?}");
            if said { exact += 1 } else { not += 1 }
        }
        assert!(exact > 100 && not > 100, "{exact} {not}");
    }

    #[test]
    fn blocks_that_are_not_exact_are_counted_and_bands_are_rows_of_blocks() {
        let cols = 300;
        let mut values = vec![1.0f32; 130 * cols];
        values[0] = 2f32.powi(-17);
        values[299] = 2f32.powi(-18);
        values[129 * cols + 150] = f32::NAN;
        let of = bands(&[2, 130, 300]);
        assert_eq!(of[..2], [0..128 * 300, 128 * 300..130 * 300]);
        assert_eq!((of.len(), of[3].end), (4, 2 * 130 * 300));
        let [first, last] = [&of[0], &of[1]].map(|band| BlockCast::of(&values[band.clone()], cols));
        assert_eq!((&first.inexact[..], &last.inexact[..]), (&[2][..], &[][..]));
        assert_eq!(last.scales, [2f32.powi(-8); 3]);
        assert!(E4m3::from_bits(last.codes[cols + 150]).is_nan());
        assert_eq!(scales_shape(&[2, 130, 300]), [2, 2, 3]);
        assert_eq!(BlockCast::of(&[0.0, -0.0], 2).codes, [0, 0x80]);
        assert_eq!(BlockCast::of(&[f32::INFINITY], 1).inexact, [0]);
    }
}
