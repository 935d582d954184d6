//! Codes of eight bits under scales: how values are made of them.
//!
//! A matrix is cut into blocks of so many rows and columns, of which the last ones may be smaller, and each has a
//! scale. The value of an element is the number of its code times its block's scale, rounded once to f32.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use microscale::formats::{E4m3, E8m0};
use microscale::{Format, QuantizedShape, QuantizedView, ScaleLayout, dequantize};
use rayon::prelude::*;

use crate::dtype::FileDtype;

/// Values that a thread makes at once.
const TOGETHER: usize = 1 << 16;

/// The scales of a tensor of codes.
#[derive(Clone, Copy)]
pub struct Scaling<'a> {
    /// The name of the tensor that holds them.
    pub name: &'a str,
    /// Its dtype: F32, F16, BF16, or powers of two as F8_E8M0 or U8.
    pub dtype: FileDtype,
    /// Its bytes, in the mapped file.
    pub data: &'a [u8],
    /// The file that it is in.
    pub file: &'a Path,
    /// Rows and columns of the block that each scale is for.
    pub block: [usize; 2],
    /// True if all matrices of a tensor have the same scales.
    pub(crate) shared: bool,
    /// Bits of a code: 8, or the 4 of E2M1, of which a byte has the first of two in its low half.
    pub bits: usize,
    /// The order of scales: linear, or of a single matrix in tiles.
    pub(crate) layout: ScaleLayout,
}

/// Shows all but the bytes.
impl fmt::Debug for Scaling<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut scaling = f.debug_struct("Scaling");
        scaling.field("name", &self.name).field("dtype", &self.dtype).field("block", &self.block);
        scaling.field("file", &self.file).finish_non_exhaustive()
    }
}

/// Returns whether codes of a dtype are numbers that scales may make values of.
pub(crate) fn are_codes(dtype: FileDtype) -> bool {
    Decoder::of(dtype).is_some()
}

/// Returns whether scales may have a dtype.
pub(crate) fn are_scales(dtype: FileDtype) -> bool {
    scale_of(dtype).is_some()
}

/// The scales in rows and columns of a matrix, given its size and that of a block.
pub(crate) fn grid([rows, cols]: [usize; 2], block: [usize; 2]) -> [usize; 2] {
    [rows.div_ceil(block[0].max(1)), cols.div_ceil(block[1].max(1))]
}

/// The scale at an index.
type ScaleAt = fn(&[u8], usize) -> f32;

/// The reading of scales of a dtype. Beyond the last one they are NaN.
fn scale_of(dtype: FileDtype) -> Option<ScaleAt> {
    fn at<const BYTES: usize>(data: &[u8], index: usize, number: impl Fn([u8; BYTES]) -> f32) -> f32 {
        data.as_chunks().0.get(index).map_or(f32::NAN, |bytes| number(*bytes))
    }
    match dtype {
        FileDtype::F32 => Some(|data, index| at(data, index, f32::from_le_bytes)),
        FileDtype::F16 => Some(|data, index| at(data, index, |bytes| f16::from_le_bytes(bytes).to_f32())),
        FileDtype::BF16 => Some(|data, index| at(data, index, |bytes| bf16::from_le_bytes(bytes).to_f32())),
        FileDtype::F8_E8M0 | FileDtype::U8 => {
            Some(|data, index| at(data, index, |[byte]| E8m0::from_bits(byte).to_f32()))
        }
        _ => None,
    }
}

impl Scaling<'_> {
    /// All scales.
    pub(crate) fn scales(&self) -> impl Iterator<Item = f32> {
        let bytes = self.dtype.bytes_of(1).max(1) as usize;
        let scale_of = scale_of(self.dtype).unwrap_or(|_, _| f32::NAN);
        (0..self.data.len() / bytes).map(move |index| scale_of(self.data, index))
    }

    /// Returns whether the values of all codes are exact in bf16: their scales are powers of two, and neither the last bit of an
    /// E4M3 (2^-9) is below bf16's (2^-133) nor its largest number, below 2^9, above what there is.
    pub(crate) fn is_exact_in_bf16(&self) -> bool {
        let exact = |scale: f32| {
            let power = scale.to_bits() & 0x007F_FFFF == 0;
            scale.is_nan() || power && (2f32.powi(-124)..=2f32.powi(119)).contains(&scale)
        };
        self.scales().all(exact)
    }

    /// The values of some of a tensor's elements, given its dtype, its sizes and the codes of all of it; `None`
    /// for dtypes that have none.
    pub(crate) fn values(
        &self,
        dtype: FileDtype,
        shape: &[usize],
        codes: &[u8],
        elements: Range<usize>,
    ) -> Option<Vec<f32>> {
        if self.bits == 4 {
            return self.values_of_mxfp4(codes, elements);
        }
        let (decoder, scale_of) = (Decoder::of(dtype)?, scale_of(self.dtype)?);
        let [.., rows, cols] = *shape else { return None };
        let start = elements.start;
        codes.get(..elements.end)?;
        let [scales_down, scales_across] = grid([rows, cols], self.block);
        let mut values = vec![0.0; elements.len()];
        values.par_chunks_mut(TOGETHER).enumerate().for_each(|(part, mut values)| {
            let mut at = start + part * TOGETHER;
            // Each turn takes the rest of a row, and of that each the rest of a block's row.
            while !values.is_empty() {
                let (row, mut col) = (at / cols, at % cols);
                let (matrix, row) = (if self.shared { 0 } else { row / rows }, row % rows);
                let down = matrix * scales_down + row / self.block[0];
                let (mut of_row, rest) = values.split_at_mut((cols - col).min(values.len()));
                let mut across = col / self.block[1];
                while !of_row.is_empty() {
                    let scale = scale_of(self.data, self.layout.offset(down, across, scales_across));
                    let run = ((across + 1).saturating_mul(self.block[1]) - col).min(of_row.len());
                    let (these, next) = of_row.split_at_mut(run);
                    decoder.decode(codes, at, scale, these);
                    (of_row, at, col, across) = (next, at + run, col + run, across + 1);
                }
                values = rest;
            }
        });
        Some(values)
    }

    /// The values of some elements of MXFP4 in linear order, whose rows are whole blocks.
    fn values_of_mxfp4(&self, codes: &[u8], elements: Range<usize>) -> Option<Vec<f32>> {
        let format = Format::Mxfp4;
        let blocks = elements.start / format.block()..elements.end.div_ceil(format.block());
        let first = blocks.start * format.block();
        let codes = codes.get(blocks.start * format.block_bytes()..blocks.end * format.block_bytes())?;
        let shape = QuantizedShape::new(format, 1, blocks.len() * format.block());
        let view = QuantizedView::from_parts(shape, codes, self.data.get(blocks)?).ok()?;
        let mut values: Vec<f32> = dequantize(view);
        values.truncate(elements.end - first);
        values.drain(..elements.start - first);
        Some(values)
    }
}

/// How the numbers of codes of eight bits are found.
#[derive(Clone, Copy)]
enum Decoder {
    E4m3,
    Int8,
}

impl Decoder {
    fn of(dtype: FileDtype) -> Option<Self> {
        match dtype {
            FileDtype::F8_E4M3 => Some(Self::E4m3),
            FileDtype::I8 => Some(Self::Int8),
            _ => None,
        }
    }

    /// The values of codes from the one at an index on, which have one scale. Computed alike for all: compilers make vectors of that, and
    /// not of tables.
    fn decode(self, codes: &[u8], at: usize, scale: f32, values: &mut [f32]) {
        let product = |number: f32| {
            let product = number * scale;
            if product.is_nan() { f32::NAN } else { product }
        };
        match self {
            Self::E4m3 => {
                for (value, code) in values.iter_mut().zip(&codes[at..]) {
                    *value = product(E4m3::from_bits(*code).to_f32());
                }
            }
            Self::Int8 => {
                for (value, code) in values.iter_mut().zip(&codes[at..]) {
                    *value = product(f32::from(*code as i8));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use microscale::formats::E2m1;

    use super::*;

    fn scaling(dtype: FileDtype, data: &[u8], block: [usize; 2], shared: bool) -> Scaling<'_> {
        Scaling {
            name: "s",
            dtype,
            data,
            file: Path::new("x"),
            block,
            shared,
            bits: 8,
            layout: ScaleLayout::Linear,
        }
    }

    /// Each value by its own row and column, one at a time.
    fn one_by_one(
        codes: &[i8],
        shape: [usize; 3],
        scales: &[f32],
        block: [usize; 2],
        shared: bool,
    ) -> Vec<f32> {
        let [matrices, rows, cols] = shape;
        let (down, across) = (rows.div_ceil(block[0]), cols.div_ceil(block[1]));
        let mut values = Vec::new();
        for matrix in 0..matrices {
            for row in 0..rows {
                for col in 0..cols {
                    let of_matrix = if shared { 0 } else { matrix * down * across };
                    let scale = scales[of_matrix + row / block[0] * across + col / block[1]];
                    values.push(f32::from(codes[(matrix * rows + row) * cols + col]) * scale);
                }
            }
        }
        values
    }

    #[test]
    fn every_element_has_the_scale_of_its_block() {
        let mut random = fastrand::Rng::with_seed(5);
        for (shape, block) in [
            ([1, 7, 9], [1, 9]),
            ([1, 7, 9], [7, 9]),
            ([3, 5, 11], [2, 4]),
            ([2, 300, 1000], [128, 128]),
            ([1, 1, 70_000], [1, 32]),
            ([4, 1, 1], [128, 128]),
        ] {
            let elements: usize = shape.iter().product();
            let codes: Vec<i8> = (0..elements).map(|_| random.i8(..)).collect();
            for shared in [false, true] {
                let [down, across] = grid([shape[1], shape[2]], block);
                let count = down * across * if shared { 1 } else { shape[0] };
                let scales: Vec<f32> = (0..count).map(|_| random.f32() + 0.5).collect();
                let expected = one_by_one(&codes, shape, &scales, block, shared);
                let scaling = scaling(FileDtype::F32, bytemuck::cast_slice(&scales), block, shared);
                assert!(scaling.scales().eq(scales.iter().copied()));
                let of = |range| {
                    scaling.values(FileDtype::I8, &shape, bytemuck::cast_slice(&codes), range).unwrap()
                };
                assert_eq!(of(0..elements), expected, "{shape:?} {block:?}");
                for _ in 0..5 {
                    let start = random.usize(..elements);
                    let range = start..random.usize(start..=elements);
                    assert_eq!(of(range.clone()), expected[range], "{shape:?} {block:?}");
                }
            }
        }
    }

    #[test]
    fn exact_in_bf16_is_exact_for_every_code() {
        let codes: Vec<u8> = (0..=255).collect();
        for dtype in [FileDtype::F8_E4M3, FileDtype::I8] {
            for byte in 0..=255u8 {
                let data = [byte];
                let scaling = scaling(FileDtype::F8_E8M0, &data, [1, 256], false);
                let values = scaling.values(dtype, &[1, 256], &codes, 0..256).unwrap();
                let same = |value: &f32| value.is_nan() || bf16::from_f32(*value).to_f32() == *value;
                let said = scaling.is_exact_in_bf16();
                assert!(!said || values.iter().all(same), "{dtype} {byte}");
                assert_eq!(said, (3..=246).contains(&byte) || byte == 255, "{byte}");
            }
        }
        let third = (1.0f32 / 3.0).to_le_bytes();
        assert!(!scaling(FileDtype::F32, &third, [1, 1], false).is_exact_in_bf16());
        let quarter = (0.25f32).to_le_bytes();
        assert!(scaling(FileDtype::F32, &quarter, [1, 1], false).is_exact_in_bf16());
    }

    #[test]
    fn codes_of_four_bits_are_two_a_byte() {
        let mut random = fastrand::Rng::with_seed(6);
        let (shape, block) = ([2, 5, 96], [1, 32]);
        let (elements, scales) = (2 * 5 * 96, 2 * 5 * 3);
        let codes: Vec<u8> = (0..elements / 2).map(|_| random.u8(..)).collect();
        let scales: Vec<u8> = (0..scales).map(|_| random.u8(100..150)).collect();
        let scaling = Scaling { bits: 4, ..scaling(FileDtype::U8, &scales, block, false) };
        let expected = (0..elements).map(|i| {
            let code = codes[i / 2] >> (4 * (i % 2)) & 0xF;
            E2m1::from_bits(code).to_f32() * E8m0::from_bits(scales[i / 32]).to_f32()
        });
        let expected: Vec<f32> = expected.collect();
        let of = |range| scaling.values(FileDtype::I8, &shape, &codes, range).unwrap();
        assert_eq!(of(0..elements), expected);
        for _ in 0..50 {
            let start = random.usize(..elements);
            let range = start..random.usize(start..=elements);
            assert_eq!(of(range.clone()), expected[range]);
        }
        assert!(scaling.values(FileDtype::I8, &shape, &codes[1..], 0..elements).is_none());
    }

    #[test]
    fn scales_of_every_dtype_and_all_codes() {
        let codes: Vec<u8> = (0..=255).collect();
        let (half, word) = (f16::from_f32(0.25).to_le_bytes(), 0.25f32.to_le_bytes());
        let brain = bf16::from_f32(0.25).to_le_bytes();
        for (dtype, data) in [
            (FileDtype::F32, &word[..]),
            (FileDtype::F16, &half),
            (FileDtype::BF16, &brain),
            (FileDtype::F8_E8M0, &[125]),
            (FileDtype::U8, &[125]),
        ] {
            let scaling = scaling(dtype, data, [1, 256], false);
            let values = scaling.values(FileDtype::F8_E4M3, &[1, 256], &codes, 0..256).unwrap();
            for (code, value) in codes.iter().zip(values) {
                let expected = E4m3::from_bits(*code).to_f32() * 0.25;
                assert!(
                    value.to_bits() == expected.to_bits() || value.is_nan() && code & 0x7F == 0x7F,
                    "{code}"
                );
            }
        }
        let nothing = scaling(FileDtype::I64, &[0; 8], [1, 1], false);
        assert!(nothing.values(FileDtype::I8, &[1, 1], &[1], 0..1).is_none());
        assert!(
            scaling(FileDtype::U8, &[1], [1, 1], false).values(FileDtype::F32, &[1, 1], &[1], 0..1).is_none()
        );
    }
}
