//! Dequantizing a run of blocks: E2M1 to 16 bits by table lookup, everything else block by block.

pub(super) mod decoder;
mod value_table;

use microscale_formats::{E4m3, E5m2, Format, e2m1, mx, nvfp4};

use self::decoder::Decoder;
use self::value_table::ValueTable;
use super::comparison;
use crate::cpu::memory::streaming_stores;
use crate::cpu::simd::Vector;
use crate::cpu::simd::halfwords::{HALFWORDS, HalfwordVector};
use crate::element::Element;

/// Bytes of the buffer between decoding and streaming stores.
const STAGE: usize = 4096;

/// Dequantizes a run of blocks.
#[inline(always)]
pub(super) fn dequantize<T: Element, V: Vector>(
    simd: V,
    decoder: &Decoder,
    codes: &[u8],
    scales: &[u8],
    values: &mut [T],
) {
    if !decoder.streams {
        return decode::<T, V>(simd, decoder, codes, scales, values);
    }
    let mut stage = [0u64; STAGE / size_of::<u64>()];
    let stage: &mut [T] = bytemuck::cast_slice_mut(&mut stage);
    let blocks = stage.len() / decoder.format.block();
    let pieces = codes.chunks(blocks * decoder.format.block_bytes()).zip(scales.chunks(blocks));
    for ((codes, scales), values) in pieces.zip(values.chunks_mut(stage.len())) {
        let stage = &mut stage[..values.len()];
        decode::<T, V>(simd, decoder, codes, scales, stage);
        streaming_stores::copy(bytemuck::cast_slice(stage), bytemuck::cast_slice_mut(values));
    }
    streaming_stores::finish();
}

#[inline(always)]
fn decode<T: Element, V: Vector>(simd: V, decoder: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
    const MX: usize = mx::BLOCK;
    const NV: usize = nvfp4::BLOCK;
    let (mut codes, mut scales, mut values) = (codes, scales, values);
    if let Some(rows) = &decoder.values {
        let halfwords = bytemuck::cast_slice_mut(values);
        let done = match decoder.format {
            Format::Nvfp4 => look_up::<V, NV>(simd, rows, codes, scales, halfwords),
            _ => look_up::<V, MX>(simd, rows, codes, scales, halfwords),
        };
        let blocks = done / decoder.format.block();
        (codes, scales) = (&codes[blocks * decoder.format.block_bytes()..], &scales[blocks..]);
        values = &mut values[done..];
    }
    match decoder.format {
        Format::Mxfp4 => decode_blocks::<T, MX>(decoder, codes, scales, values, decode_e2m1),
        Format::Nvfp4 => decode_blocks::<T, NV>(decoder, codes, scales, values, decode_e2m1),
        Format::Mxfp8E4m3 => decode_blocks::<T, MX>(decoder, codes, scales, values, decode_bytes::<_, E4m3>),
        Format::Mxfp8E5m2 => decode_blocks::<T, MX>(decoder, codes, scales, values, decode_bytes::<_, E5m2>),
        Format::Comparison(format) => comparison::dequantize(format, codes, scales, values),
    }
}

#[inline(always)]
fn decode_blocks<T: Element, const N: usize>(
    decoder: &Decoder,
    codes: &[u8],
    scales: &[u8],
    values: &mut [T],
    decode: impl Fn(&[u8], f32, &mut [T; N]),
) {
    let blocks = codes.chunks_exact(decoder.format.block_bytes()).zip(scales);
    for ((codes, scale), values) in blocks.zip(values.chunks_mut(N)) {
        match (decoder.factor(*scale), values.first_chunk_mut::<N>()) {
            (None, _) => values.fill(T::from_f32(f32::NAN)),
            (Some(factor), Some(whole)) => decode(codes, factor, whole),
            (Some(factor), None) => {
                let mut padded = [T::default(); N];
                decode(codes, factor, &mut padded);
                values.copy_from_slice(&padded[..values.len()]);
            }
        }
    }
}

/// Unpacks and decodes a block of E2M1 elements.
#[inline(always)]
pub(super) fn decode_e2m1<T: Element, const N: usize>(codes: &[u8], factor: f32, values: &mut [T; N]) {
    let mut nibbles = [0u8; N];
    for (pair, byte) in nibbles.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = (u16::from(*byte) & 0xF | u16::from(*byte) << 4 & 0xF00).to_le_bytes();
    }
    for (value, nibble) in values.iter_mut().zip(&nibbles) {
        *value = T::from_f32(element(u32::from(*nibble)) * factor);
    }
}

/// Decodes a block of 8-bit elements.
#[inline(always)]
fn decode_bytes<T: Element, E: mx::Element>(codes: &[u8], factor: f32, values: &mut [T; mx::BLOCK]) {
    for (value, code) in values.iter_mut().zip(codes) {
        let product = E::decode(*code) * factor;
        *value = T::from_f32(if product.is_nan() { f32::NAN } else { product });
    }
}

/// The value of an E2M1 code.
#[inline(always)]
fn element(nibble: u32) -> f32 {
    f32::from_bits(e2m1::magnitude_value(nibble & 7).to_bits() | (nibble & 8) << 28)
}

/// Looks up 16-bit values, 64 at a time. Returns the number of values written; the rest is left.
#[inline(always)]
fn look_up<V: HalfwordVector, const N: usize>(
    simd: V,
    rows: &ValueTable,
    codes: &[u8],
    scales: &[u8],
    values: &mut [u16],
) -> usize {
    let (chunks, _) = values.as_chunks_mut::<HALFWORDS>();
    let (pairs, _) = chunks.as_chunks_mut::<2>();
    let done = pairs.len() * 2 * HALFWORDS;
    let (codes, _) = codes.as_chunks::<HALFWORDS>();
    for ((pair, codes), scales) in pairs.iter_mut().zip(codes).zip(scales.chunks_exact(2 * HALFWORDS / N)) {
        // Two MXFP4 blocks use two rows twice each, four NVFP4 blocks use four rows.
        let [a, b, c, d] = if N == HALFWORDS {
            [scales[0], scales[0], scales[1], scales[1]]
        } else {
            [scales[0], scales[1], scales[2], scales[3]]
        };
        let [first, second] = simd.decode(codes, [rows.row(a), rows.row(b), rows.row(c), rows.row(d)]);
        *pair = [simd.store_halfwords(first), simd.store_halfwords(second)];
    }
    done
}
