//! The block arithmetic over all 32 lanes at once, without branches on the data, so that the compiler turns each loop
//! into a few vector instructions of whatever instruction set the caller was stamped for.

use microscale_formats::mxfp4::{self, BLOCK, BLOCK_BYTES, BlockEvents};
use microscale_formats::{E8m0, NegativeZero, Ties, e2m1};

use super::policy::{self, Tally, block_at};
use crate::element::Element;
use crate::recipe::Recipe;

/// How blocks of an instruction set are widened to f32.
pub(super) trait Widen {
    /// The exact f32 of each element.
    fn widen<T: Element>(block: &[T; BLOCK]) -> [f32; BLOCK];
}

/// Element by element, which the compiler vectorises.
pub(super) struct ByElement;

impl Widen for ByElement {
    #[inline(always)]
    fn widen<T: Element>(block: &[T; BLOCK]) -> [f32; BLOCK] {
        let mut wide = [0.0; BLOCK];
        for (wide, value) in wide.iter_mut().zip(block) {
            *wide = value.to_f32();
        }
        wide
    }
}

/// Quantizes a piece. The usual case of −0 gets a loop of its own.
#[inline(always)]
pub(super) fn quantize<T: Element, W: Widen>(
    values: &[T],
    recipe: &Recipe,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    let keep = recipe.arithmetic.negative_zero == NegativeZero::Keep;
    match (recipe.arithmetic.ties, keep) {
        (Ties::Even, true) => quantize_as::<T, W, EVEN, true>(values, recipe, codes, scales),
        (Ties::Even, false) => quantize_as::<T, W, EVEN, false>(values, recipe, codes, scales),
        (Ties::Away, true) => quantize_as::<T, W, AWAY, true>(values, recipe, codes, scales),
        (Ties::Away, false) => quantize_as::<T, W, AWAY, false>(values, recipe, codes, scales),
        (Ties::Zero, true) => quantize_as::<T, W, ZERO, true>(values, recipe, codes, scales),
        (Ties::Zero, false) => quantize_as::<T, W, ZERO, false>(values, recipe, codes, scales),
    }
}

const EVEN: u8 = 0;
const AWAY: u8 = 1;
const ZERO: u8 = 2;

#[inline(always)]
fn quantize_as<T: Element, W: Widen, const TIES: u8, const KEEP_NEGATIVE_ZERO: bool>(
    values: &[T],
    recipe: &Recipe,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    let addend = recipe.arithmetic.scale_rule.mantissa_addend();
    let mut tally = Tally::default();
    for (i, (codes, scale)) in codes.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(scales).enumerate() {
        let mut padded = [T::default(); BLOCK];
        let block = block_at(values, i, &mut padded);
        let wide = W::widen(block);
        let amax = mxfp4::amax_bits(&wide);
        if mxfp4::is_non_finite(amax) {
            *scale = policy::quantize_block(block, i * BLOCK, recipe, codes, &mut tally);
            continue;
        }
        let exponent = mxfp4::rounded_exponent(amax, addend);
        let block_scale = mxfp4::scale_from_exponent(exponent);
        tally.add(BlockEvents::of(amax, exponent, recipe.arithmetic.ties));
        let negative_zero = recipe.arithmetic.negative_zero;
        encode::<TIES, KEEP_NEGATIVE_ZERO>(&wide, block_scale.reciprocal(), negative_zero, codes);
        *scale = block_scale.to_bits();
    }
    tally
}

/// Encodes and packs a block of finite values.
#[inline(always)]
fn encode<const TIES: u8, const KEEP_NEGATIVE_ZERO: bool>(
    wide: &[f32; BLOCK],
    reciprocal: f32,
    negative_zero: NegativeZero,
    codes: &mut [u8; BLOCK_BYTES],
) {
    let mut nibbles = [0u8; BLOCK];
    for (nibble, value) in nibbles.iter_mut().zip(wide) {
        let bits = value.to_bits();
        let magnitude = bits & 0x7FFF_FFFF;
        let code = magnitude_code::<TIES>(f32::from_bits(magnitude) * reciprocal);
        let mut sign = bits >> 28 & 8;
        if !KEEP_NEGATIVE_ZERO {
            let zero = if negative_zero == NegativeZero::Drop { code } else { magnitude };
            let sign_of_zero = if negative_zero == NegativeZero::Force { 8 } else { 0 };
            sign = if zero == 0 { sign_of_zero } else { sign };
        }
        *nibble = (code | sign) as u8;
    }
    for (byte, pair) in codes.iter_mut().zip(nibbles.as_chunks::<2>().0) {
        // Both nibbles in one 16-bit word: the shift brings the upper one down beside the lower.
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}

/// The code of a scaled magnitude. Only ties to even have the three-term identity; the others count midpoints.
#[inline(always)]
fn magnitude_code<const TIES: u8>(a: f32) -> u32 {
    match TIES {
        EVEN => e2m1::magnitude_code_even(a),
        AWAY => e2m1::MIDPOINTS.iter().map(|&m| u32::from(a >= m)).sum(),
        _ => e2m1::MIDPOINTS.iter().map(|&m| u32::from(a > m)).sum(),
    }
}

/// Dequantizes a piece.
#[inline(always)]
pub(super) fn dequantize<T: Element>(codes: &[u8], scales: &[u8], values: &mut [T]) {
    let blocks = codes.as_chunks::<BLOCK_BYTES>().0.iter().zip(scales);
    for ((codes, scale), values) in blocks.zip(values.chunks_mut(BLOCK)) {
        let scale = E8m0::from_bits(*scale);
        match values.first_chunk_mut::<BLOCK>() {
            _ if scale.is_nan() => values.fill(T::from_f32(f32::NAN)),
            Some(whole) => decode(codes, scale.to_f32(), whole),
            None => {
                let mut padded = [T::default(); BLOCK];
                decode(codes, scale.to_f32(), &mut padded);
                values.copy_from_slice(&padded[..values.len()]);
            }
        }
    }
}

/// Unpacks and decodes a block.
#[inline(always)]
fn decode<T: Element>(codes: &[u8; BLOCK_BYTES], factor: f32, values: &mut [T; BLOCK]) {
    let mut nibbles = [0u8; BLOCK];
    for (pair, byte) in nibbles.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = (u16::from(*byte) & 0xF | u16::from(*byte) << 4 & 0xF00).to_le_bytes();
    }
    for (value, nibble) in values.iter_mut().zip(&nibbles) {
        *value = T::from_f32(element(u32::from(*nibble)) * factor);
    }
}

/// The value of a code. Code c ≥ 2 is the float whose exponent and mantissa are c's, rebased; codes 0 and 1 would lack
/// their hidden one, so (½, ¾) is taken for them and stretched to (0, ½). No subnormal float is met: those are slow.
#[inline(always)]
fn element(nibble: u32) -> f32 {
    let magnitude = nibble & 7;
    let rebased = f32::from_bits((magnitude + 2 * 126) << 22);
    let value = if magnitude < 2 { rebased + rebased - 1.0 } else { rebased };
    f32::from_bits(value.to_bits() | (nibble & 8) << 28)
}
