//! Codes under a grid of scales, and their values: W8 sources, MXFP8 and MXFP4.
//!
//! A matrix is cut into blocks of rows and columns with a scale each. The last blocks may be
//! smaller. The value of an element is the number of its code times the scale of its block, rounded
//! once to f32.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use half::{bf16, f16};
use microscale::formats::{E2m1, E4m3, E5m2, E8m0};
use microscale::{Format, QuantizedShape, QuantizedView, ScaleLayout, dequantize};
use rayon::prelude::*;

use crate::dtype::FileDtype;
use crate::read::nibble_order::NibbleOrder;

/// Values per task of a thread.
const TOGETHER: usize = 1 << 16;

/// The scales of a tensor of codes, and how they apply to it.
#[derive(Clone, Copy)]
pub struct ScaleGrid<'a> {
    /// The name of the tensor of scales.
    pub name: &'a str,
    /// Its dtype: F32, F16, BF16, or powers of two as F8_E8M0 or U8.
    pub dtype: FileDtype,
    /// Its bytes, in the mapped file.
    pub data: &'a [u8],
    /// Its file.
    pub file: &'a Path,
    /// Rows and columns of the block of each scale.
    pub block: [usize; 2],
    /// True if all matrices of a tensor share the scales.
    pub(crate) shared: bool,
    /// The numbers that codes stand for.
    pub(crate) codes: CodeKind,
    /// The order of the scales. Only single matrices have swizzled scales.
    pub(crate) layout: ScaleLayout,
}

/// Shows everything except the bytes.
impl fmt::Debug for ScaleGrid<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut grid = f.debug_struct("ScaleGrid");
        grid.field("name", &self.name).field("dtype", &self.dtype).field("block", &self.block);
        grid.field("file", &self.file).finish_non_exhaustive()
    }
}

/// The numbers that codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodeKind {
    E4m3,
    E5m2,
    Int8,
    /// Two codes per byte.
    E2m1(NibbleOrder),
}

impl CodeKind {
    /// Returns the kind of 8-bit codes of a dtype, or `None` if a dtype is no codes.
    pub(crate) fn of(dtype: FileDtype) -> Option<Self> {
        match dtype {
            FileDtype::F8_E4M3 => Some(Self::E4m3),
            FileDtype::F8_E5M2 => Some(Self::E5m2),
            FileDtype::I8 => Some(Self::Int8),
            _ => None,
        }
    }

    /// Returns the number of bytes of `count` codes.
    fn bytes(self, count: usize) -> usize {
        match self {
            Self::E4m3 | Self::E5m2 | Self::Int8 => count,
            Self::E2m1(_) => count.div_ceil(2),
        }
    }

    /// Returns the exponents of the last bit of all numbers and of a power of two that is larger
    /// than every finite number.
    fn exponents(self) -> [i32; 2] {
        match self {
            Self::E4m3 => [-9, 9],
            Self::E5m2 => [-16, 16],
            Self::Int8 => [0, 8],
            Self::E2m1(_) => [-1, 3],
        }
    }

    /// Decodes the codes from index `at` on, which share a scale.
    ///
    /// 8-bit codes are converted by arithmetic: compilers vectorize that, but not look-ups in
    /// tables.
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
            Self::E5m2 => {
                for (value, code) in values.iter_mut().zip(&codes[at..]) {
                    *value = product(E5m2::from_bits(*code).to_f32());
                }
            }
            Self::Int8 => {
                for (value, code) in values.iter_mut().zip(&codes[at..]) {
                    *value = product(f32::from(*code as i8));
                }
            }
            Self::E2m1(order) => {
                for (i, value) in values.iter_mut().enumerate() {
                    *value = product(E2m1::from_bits(order.code(codes, at + i)).to_f32());
                }
            }
        }
    }
}

/// Returns whether scales may have a dtype.
pub(crate) fn are_scales(dtype: FileDtype) -> bool {
    scale_of(dtype).is_some()
}

/// Returns rows and columns of the scales of a matrix, by its size and the size of a block.
pub(crate) fn grid([rows, cols]: [usize; 2], block: [usize; 2]) -> [usize; 2] {
    [rows.div_ceil(block[0].max(1)), cols.div_ceil(block[1].max(1))]
}

/// Reads the scale at an index, or NaN past the last one.
type ScaleAt = fn(&[u8], usize) -> f32;

/// Returns how scales of a dtype are read, or `None` if scales cannot have it.
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

impl ScaleGrid<'_> {
    /// Returns all scales in their stored order.
    pub(crate) fn scales(&self) -> impl Iterator<Item = f32> {
        let bytes = self.dtype.bytes_of(1).max(1) as usize;
        let scale_of = scale_of(self.dtype).unwrap_or(|_, _| f32::NAN);
        (0..self.data.len() / bytes).map(move |index| scale_of(self.data, index))
    }

    /// Returns whether the values of all codes are exact in bf16.
    ///
    /// Scales must be powers of two. The last bit of a code must not fall below the last bit of
    /// bf16 (2^-133), and its largest number must not overflow.
    pub(crate) fn is_exact_in_bf16(&self) -> bool {
        let [last_bit, beyond] = self.codes.exponents();
        let powers = 2f32.powi(-133 - last_bit)..=2f32.powi(128 - beyond);
        let exact = |scale: f32| {
            let power = scale.to_bits() & 0x007F_FFFF == 0;
            scale.is_nan() || power && powers.contains(&scale)
        };
        self.scales().all(exact)
    }

    /// Returns the values of a range of elements, given the shape and all codes of the tensor, or
    /// `None` if there are too few codes or the scales have another dtype.
    pub(crate) fn values(&self, shape: &[usize], codes: &[u8], elements: Range<usize>) -> Option<Vec<f32>> {
        if self.is_mxfp4() {
            return self.values_of_mxfp4(codes, elements);
        }
        let scale_of = scale_of(self.dtype)?;
        let [.., rows, cols] = *shape else { return None };
        let start = elements.start;
        codes.get(..self.codes.bytes(elements.end))?;
        let [scales_down, scales_across] = grid([rows, cols], self.block);
        let mut values = vec![0.0; elements.len()];
        values.par_chunks_mut(TOGETHER).enumerate().for_each(|(part, mut values)| {
            let mut at = start + part * TOGETHER;
            // Each iteration decodes the rest of a row, and the inner loop the rest of a block's
            // row.
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
                    self.codes.decode(codes, at, scale, these);
                    (of_row, at, col, across) = (next, at + run, col + run, across + 1);
                }
                values = rest;
            }
        });
        Some(values)
    }

    /// Returns whether codes and scales are MXFP4 as [`QuantizedView`] has it.
    fn is_mxfp4(&self) -> bool {
        let in_order = self.layout == ScaleLayout::Linear && !self.shared;
        let powers = matches!(self.dtype, FileDtype::F8_E8M0 | FileDtype::U8);
        let is_block = self.block == [1, Format::Mxfp4.block()];
        self.codes == CodeKind::E2m1(NibbleOrder::LowFirst) && in_order && powers && is_block
    }

    /// Returns the values of a range of elements of MXFP4. Rows are whole blocks.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn scale_grid(
        dtype: FileDtype,
        data: &[u8],
        block: [usize; 2],
        shared: bool,
        codes: CodeKind,
    ) -> ScaleGrid<'_> {
        let (file, layout) = (Path::new("x"), ScaleLayout::Linear);
        ScaleGrid { name: "s", dtype, data, file, block, shared, codes, layout }
    }

    /// Computes each value from its row and column.
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
                let data = bytemuck::cast_slice(&scales);
                let scale_grid = scale_grid(FileDtype::F32, data, block, shared, CodeKind::Int8);
                assert!(scale_grid.scales().eq(scales.iter().copied()));
                let of = |range| scale_grid.values(&shape, bytemuck::cast_slice(&codes), range).unwrap();
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
        for (kind, powers) in
            [(CodeKind::E4m3, 3..=246), (CodeKind::E5m2, 10..=239), (CodeKind::Int8, 1..=247)]
        {
            for byte in 0..=255u8 {
                let data = [byte];
                let scale_grid = scale_grid(FileDtype::F8_E8M0, &data, [1, 256], false, kind);
                let values = scale_grid.values(&[1, 256], &codes, 0..256).unwrap();
                let same = |value: &f32| value.is_nan() || bf16::from_f32(*value).to_f32() == *value;
                let exact = scale_grid.is_exact_in_bf16();
                assert!(!exact || values.iter().all(same), "{kind:?} {byte}");
                assert_eq!(exact, powers.contains(&byte) || byte == 255, "{kind:?} {byte}");
            }
        }
        for (scale, exact) in [(1.0f32 / 3.0, false), (0.25, true)] {
            let data = scale.to_le_bytes();
            let scale_grid = scale_grid(FileDtype::F32, &data, [1, 1], false, CodeKind::E4m3);
            assert_eq!(scale_grid.is_exact_in_bf16(), exact);
        }
    }

    #[test]
    fn bytes_hold_two_4_bit_codes_in_either_order_and_layout() {
        let mut random = fastrand::Rng::with_seed(6);
        let (rows, blocks) = (10, 3);
        let elements = rows * blocks * 32;
        let codes: Vec<u8> = (0..elements / 2).map(|_| random.u8(..)).collect();
        let linear: Vec<u8> = (0..rows * blocks).map(|_| random.u8(..)).collect();
        let mut swizzled = vec![0; ScaleLayout::Swizzled.bytes(rows, blocks).unwrap()];
        for (i, scale) in linear.iter().enumerate() {
            swizzled[ScaleLayout::Swizzled.offset(i / blocks, i % blocks, blocks)] = *scale;
        }
        let same = |a: &[f32], b: &[f32]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        for order in [NibbleOrder::LowFirst, NibbleOrder::HighFirst] {
            let expected = (0..elements).map(|i| {
                let shift = if (i % 2 == 1) == (order == NibbleOrder::LowFirst) { 4 } else { 0 };
                let code = E2m1::from_bits(codes[i / 2] >> shift & 0xF).to_f32();
                let value = code * E8m0::from_bits(linear[i / 32]).to_f32();
                if value.is_nan() { f32::NAN } else { value }
            });
            let expected: Vec<f32> = expected.collect();
            for (layout, scales) in [(ScaleLayout::Linear, &linear), (ScaleLayout::Swizzled, &swizzled)] {
                let kind = CodeKind::E2m1(order);
                let scale_grid =
                    ScaleGrid { layout, ..scale_grid(FileDtype::U8, scales, [1, 32], false, kind) };
                let of = |range| scale_grid.values(&[rows, 96], &codes, range).unwrap();
                assert!(same(&of(0..elements), &expected), "{order:?} {layout:?}");
                for _ in 0..50 {
                    let start = random.usize(..elements);
                    let range = start..random.usize(start..=elements);
                    assert!(same(&of(range.clone()), &expected[range]), "{order:?} {layout:?}");
                }
                assert!(scale_grid.values(&[rows, 96], &codes[1..], 0..elements).is_none());
            }
        }
    }

    #[test]
    fn all_codes_are_decoded_under_scales_of_every_dtype() {
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
            let scale_grid = scale_grid(dtype, data, [1, 256], false, CodeKind::E4m3);
            let values = scale_grid.values(&[1, 256], &codes, 0..256).unwrap();
            for (code, value) in codes.iter().zip(values) {
                let expected = E4m3::from_bits(*code).to_f32() * 0.25;
                assert!(
                    value.to_bits() == expected.to_bits() || value.is_nan() && code & 0x7F == 0x7F,
                    "{code}"
                );
            }
        }
        let integers = scale_grid(FileDtype::I64, &[0; 8], [1, 1], false, CodeKind::Int8);
        assert!(integers.values(&[1, 1], &[1], 0..1).is_none());
    }
}
