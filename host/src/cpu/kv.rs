//! Paged KV caches on the CPU.

use microscale_formats::kv::KvShape;
use microscale_formats::nvfp4::{BLOCK, Direction};
use microscale_formats::{E2m1, E2m1x2, E4m3, GlobalScale};
use rayon::prelude::*;

use super::activations::nvfp4_params;
use super::isa::Isa;
use crate::cpu::blocks::output::Output;
use crate::cpu::rounding::params::QuantizeParams;
use crate::element::Element;
use crate::elements::Elements;
use crate::error::{ActivationFault, Error, Result};
use crate::kv::{KvCache, KvCacheMut, KvFormat, check_slots};
use crate::shape::Shape;

/// Quantizes rows of K and V, and puts them into slots of a paged cache, on the CPU.
///
/// `rows` is the shape of `keys` and of `values`: tokens of `heads` · `head_dim` elements. `slots`
/// has a slot per row; negative ones are skipped. If two rows have one slot, the last one stays.
/// `scales` are the global scales of K and V, which multiply codes. `Gpu::append_kv_on` writes the
/// same bytes.
///
/// ```
/// use half::bf16;
/// use microscale::formats::kv::{KvOrder, KvShape};
/// use microscale::{KvCacheMut, KvFormat, Shape, append_kv};
///
/// let shape = KvShape::new(KvOrder::Nhd, 2, 16, 1, 64);
/// let (mut key_codes, mut value_codes) = ([0; 1024], [0; 1024]);
/// let (mut key_scales, mut value_scales) = ([0; 128], [0; 128]);
/// let cache = KvCacheMut {
///     key_codes: &mut key_codes,
///     value_codes: &mut value_codes,
///     key_scales: &mut key_scales,
///     value_scales: &mut value_scales,
/// };
/// let (keys, values) = ([bf16::ONE; 64], [bf16::ONE; 64]);
/// let (rows, scales) = (Shape::new(1, 64), [0.01, 0.01]);
/// append_kv(&shape, KvFormat::Nvfp4, &keys, &values, rows, &[17], scales, cache)?;
/// assert!(key_codes[17 * 32..][..32].iter().all(|byte| *byte != 0));
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) and [`Error::Activations`](crate::Error::Activations).
#[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
pub fn append_kv<T: Element>(
    shape: &KvShape,
    format: KvFormat,
    keys: &[T],
    values: &[T],
    rows: Shape,
    slots: &[i64],
    scales: [f32; 2],
    cache: KvCacheMut<'_>,
) -> Result<()> {
    let KvCacheMut { key_codes, value_codes, key_scales, value_scales } = cache;
    let lengths = [[key_codes.len(), key_scales.len()], [value_codes.len(), value_scales.len()]];
    format.check(shape, lengths, Some(scales))?;
    check_rows(shape, keys, values, rows, slots.len())?;
    check_slots(shape, slots)?;
    let columns = rows.cols;
    for (i, (rows_of, codes, block_scales)) in
        [(keys, key_codes, key_scales), (values, value_codes, value_scales)].into_iter().enumerate()
    {
        let quantizer = Quantizer::new(format, scales[i]);
        let transforms = i == 0;
        let quantized: Vec<_> = (0..rows.rows)
            .into_par_iter()
            .filter(|row| slots[*row] >= 0)
            .map(|row| {
                let mut wide: Vec<f32> =
                    rows_of[row * rows.row_stride..][..columns].iter().map(|x| x.to_f32()).collect();
                if transforms && shape.hadamard != 0 {
                    shape.transform(&mut wide);
                    wide.iter_mut().for_each(|x| *x = T::from_f32(*x).to_f32());
                }
                (row, quantizer.quantize(&wide))
            })
            .collect();
        let [vector_bytes, vector_scales] = format.bytes(shape.head_dim as usize);
        for (row, (row_codes, row_scales)) in quantized {
            for head in 0..shape.heads as usize {
                let [at, scales_at] = format.bytes(place(shape, slots[row], head));
                codes[at..][..vector_bytes]
                    .copy_from_slice(&row_codes[head * vector_bytes..][..vector_bytes]);
                block_scales[scales_at..][..vector_scales]
                    .copy_from_slice(&row_scales[head * vector_scales..][..vector_scales]);
            }
        }
    }
    Ok(())
}

/// Dequantizes slots of a paged cache to rows of K and V, on the CPU.
///
/// `rows` is the shape of `keys` and `values`. Rows with negative slots stay as they are. A
/// transform of K is not undone.
///
/// # Errors
/// As for [`append_kv`].
#[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
pub fn gather_kv<T: Element>(
    shape: &KvShape,
    format: KvFormat,
    cache: KvCache<'_>,
    slots: &[i64],
    scales: [f32; 2],
    keys: &mut [T],
    values: &mut [T],
    rows: Shape,
) -> Result<()> {
    let KvCache { key_codes, value_codes, key_scales, value_scales } = cache;
    let lengths = [[key_codes.len(), key_scales.len()], [value_codes.len(), value_scales.len()]];
    format.check(shape, lengths, Some(scales))?;
    check_rows(shape, keys, values, rows, slots.len())?;
    check_slots(shape, slots)?;
    let head_dim = shape.head_dim as usize;
    for (scale, (codes, block_scales, out)) in
        scales.into_iter().zip([(key_codes, key_scales, keys), (value_codes, value_scales, values)])
    {
        let rows = out.par_chunks_mut(rows.row_stride.max(1)).zip(slots).filter(|(_, slot)| **slot >= 0);
        rows.for_each(|(row, slot)| {
            for (head, vector) in row[..rows_columns(shape)].chunks_mut(head_dim).enumerate() {
                let [at, scales_at] = format.bytes(place(shape, *slot, head));
                dequantize(format, scale, &codes[at..], &block_scales[scales_at..], vector);
            }
        });
    }
    Ok(())
}

/// Elements of a row.
const fn rows_columns(shape: &KvShape) -> usize {
    shape.heads as usize * shape.head_dim as usize
}

/// The offset of a slot's vector, in elements.
fn place(shape: &KvShape, slot: i64, head: usize) -> usize {
    let (page, place) = (slot as u64 / u64::from(shape.page_size), slot as u64 % u64::from(shape.page_size));
    shape.offset(page as u32, place as u32, head as u32) as usize
}

fn check_rows<T>(shape: &KvShape, keys: &[T], values: &[T], rows: Shape, slots: usize) -> Result<()> {
    rows.check("the keys", keys.len())?;
    rows.check("the values", values.len())?;
    let count =
        |what, expected, found| Err(Error::Activations(ActivationFault::Count { what, expected, found }));
    if rows.cols != rows_columns(shape) {
        return count("columns of K and V", rows_columns(shape), rows.cols);
    }
    if slots != rows.rows {
        return count("slots", rows.rows, slots);
    }
    Ok(())
}

/// Quantizes rows that are rounded to the dtype of the input.
enum Quantizer {
    Nvfp4(Box<QuantizeParams>),
    Fp8(f32),
}

impl Quantizer {
    fn new(format: KvFormat, scale: f32) -> Self {
        match format {
            KvFormat::Nvfp4 => Self::Nvfp4(Box::new(nvfp4_params(Direction::Multiplier, scale))),
            KvFormat::Fp8 => Self::Fp8(scale),
        }
    }

    fn quantize(&self, row: &[f32]) -> (Vec<u8>, Vec<u8>) {
        match self {
            Self::Nvfp4(params) => {
                let (mut codes, mut scales) = (vec![0; row.len() / 2], vec![0; row.len() / BLOCK]);
                let output = Output { codes: &mut codes, scales: &mut scales };
                Isa::best().quantize(Elements::F32(row), None, params, output);
                (codes, scales)
            }
            Self::Fp8(scale) => {
                let mut codes = vec![0; row.len()];
                Isa::best().encode_fp8(row, *scale, &mut codes);
                (codes, Vec::new())
            }
        }
    }
}

/// Dequantizes a vector.
fn dequantize<T: Element>(format: KvFormat, scale: f32, codes: &[u8], scales: &[u8], vector: &mut [T]) {
    match format {
        KvFormat::Fp8 => {
            for (value, code) in vector.iter_mut().zip(codes) {
                *value = T::from_f32(E4m3::from_bits(*code).to_f32() * scale);
            }
        }
        KvFormat::Nvfp4 => {
            for (i, value) in vector.iter_mut().enumerate() {
                let factor = GlobalScale::Multiplier(scale).factor(E4m3::from_bits(scales[i / BLOCK]));
                let pair = E2m1x2::from_bits(codes[i / 2]);
                let code: E2m1 = if i % 2 == 0 { pair.low() } else { pair.high() };
                *value = T::from_f32(code.to_f32() * factor);
            }
        }
    }
}
