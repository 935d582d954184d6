//! The block arithmetic over all lanes of a block at once, without branches on the data, so that the compiler turns each loop
//! into a few vector instructions of whatever instruction set the caller was stamped for.

use std::marker::PhantomData;

use microscale_formats::nvfp4::{self, Quantizer, Scaling};
use microscale_formats::{BlockEvents, E2m1, E4m3, E5m2, E8m0, NegativeZero, Ties, block, e2m1, mx};

use super::by_definition;
use super::groups::{self, DROP, DROP_INPUT, FORCE, Grouped, KEEP, MxGroups, NvFactors, NvGroups};
use super::policy::{self, Tally, block_at};
use super::rule::{Blocks, Decoder, Kind, Mx, Rule};
use super::search;
use super::stream;
use super::thresholds::Thresholds;
use super::vector::Vector;
use crate::element::{Dtype, Element};
use crate::recipe::{Format, NonFinite};

/// How blocks of an instruction set are widened to f32.
pub(super) trait Widen {
    /// Its vectors.
    type Vector: Vector;

    /// The exact f32 of each element.
    fn widen<T: Element, const N: usize>(block: &[T; N]) -> [f32; N];
}

/// Element by element, which the compiler vectorises.
pub(super) struct ByElement<V>(PhantomData<V>);

impl<V: Vector> Widen for ByElement<V> {
    type Vector = V;

    #[inline(always)]
    fn widen<T: Element, const N: usize>(block: &[T; N]) -> [f32; N] {
        let mut wide = [0.0; N];
        for (wide, value) in wide.iter_mut().zip(block) {
            *wide = value.to_f32();
        }
        wide
    }
}

/// A format's blocks, as vector code does them: the scale first, then all codes.
pub(super) trait Vectorised<const N: usize>: Blocks<N> {
    /// What elements are multiplied with or divided by.
    type Scaling: Copy;

    /// A block's scale byte for the bits of its finite amax.
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, Self::Scaling, BlockEvents);

    /// What elements are multiplied with or divided by under another scale, and what happens in the block.
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (Self::Scaling, BlockEvents);

    /// Encodes and packs a block of finite values.
    fn encode(&self, wide: &[f32; N], scaling: Self::Scaling, codes: &mut [u8]);
}

/// Quantizes a piece. What the loops must not ask for each element is a type here.
#[inline(always)]
pub(super) fn quantize<T: Element, W: Widen>(
    values: &[T],
    weights: Option<&[f32]>,
    rule: &Rule,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    if let Some(searching) = &rule.searching {
        return search::quantize::<T, W>(values, weights, rule, searching, codes, scales);
    }
    let mut piece = Piece { values, policy: rule.non_finite, codes, scales, tally: Tally::default() };
    match &rule.kind {
        Kind::Mxfp4(mx) => piece.mxfp4::<W>(*mx, &rule.thresholds),
        Kind::Mxfp8E4m3(mx) => piece.one_by_one::<W, _, _>(mx),
        Kind::Mxfp8E5m2(mx) => piece.one_by_one::<W, _, _>(mx),
        Kind::Nvfp4(quantizer, factors) => piece.nvfp4::<W>(quantizer, factors, &rule.thresholds),
    }
    piece.tally
}

/// Contiguous blocks, with where they go to.
struct Piece<'a, T> {
    values: &'a [T],
    policy: NonFinite,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    tally: Tally,
}

impl<T: Element> Piece<'_, T> {
    #[inline(always)]
    fn mxfp4<W: Widen>(&mut self, mx: Mx<E2m1>, thresholds: &Thresholds) {
        const N: usize = mx::BLOCK;
        let groups = &MxGroups { mx, thresholds };
        let words = T::DTYPE != Dtype::F32;
        let vectors = W::Vector::FUSED && mx.arithmetic.ties == Ties::Even;
        match (mx.arithmetic.ties, mx.arithmetic.negative_zero) {
            (_, NegativeZero::Keep) if words || vectors => self.in_groups::<W, _, N, KEEP>(groups),
            (_, NegativeZero::DropInput) if words || vectors => self.in_groups::<W, _, N, DROP_INPUT>(groups),
            (_, NegativeZero::Drop) if words => self.in_groups::<W, _, N, DROP>(groups),
            (_, NegativeZero::Force) if words => self.in_groups::<W, _, N, FORCE>(groups),
            (Ties::Even, NegativeZero::Keep) => self.one_by_one::<W, _, _>(&Mxfp4::<EVEN, true>(mx)),
            (Ties::Even, _) => self.one_by_one::<W, _, _>(&Mxfp4::<EVEN, false>(mx)),
            (Ties::Away, NegativeZero::Keep) => self.one_by_one::<W, _, _>(&Mxfp4::<AWAY, true>(mx)),
            (Ties::Away, _) => self.one_by_one::<W, _, _>(&Mxfp4::<AWAY, false>(mx)),
            (Ties::Zero, NegativeZero::Keep) => self.one_by_one::<W, _, _>(&Mxfp4::<ZERO, true>(mx)),
            (Ties::Zero, _) => self.one_by_one::<W, _, _>(&Mxfp4::<ZERO, false>(mx)),
        }
    }

    #[inline(always)]
    fn nvfp4<W: Widen>(&mut self, quantizer: &Quantizer, factors: &NvFactors, thresholds: &Thresholds) {
        const N: usize = nvfp4::BLOCK;
        let words = T::DTYPE != Dtype::F32;
        let divided = &NvGroups::<true> { quantizer, factors, thresholds };
        let multiplied = &NvGroups::<false> { quantizer, factors, thresholds };
        // Words are compared, however thresholds were found.
        match (quantizer.negative_zero(), factors.divides && !words) {
            (NegativeZero::Keep, false) if words => self.in_groups::<W, _, N, KEEP>(multiplied),
            (NegativeZero::DropInput, false) if words => self.in_groups::<W, _, N, DROP_INPUT>(multiplied),
            (NegativeZero::Drop, false) if words => self.in_groups::<W, _, N, DROP>(multiplied),
            (NegativeZero::Force, false) if words => self.in_groups::<W, _, N, FORCE>(multiplied),
            (NegativeZero::Keep, true) if W::Vector::FUSED => self.in_groups::<W, _, N, KEEP>(divided),
            (NegativeZero::Keep, false) if W::Vector::FUSED => self.in_groups::<W, _, N, KEEP>(multiplied),
            (NegativeZero::DropInput, true) if W::Vector::FUSED => {
                self.in_groups::<W, _, N, DROP_INPUT>(divided);
            }
            (NegativeZero::DropInput, false) if W::Vector::FUSED => {
                self.in_groups::<W, _, N, DROP_INPUT>(multiplied);
            }
            (NegativeZero::Keep, _) => self.one_by_one::<W, _, _>(&Nvfp4::<true>(*quantizer)),
            _ => self.one_by_one::<W, _, _>(&Nvfp4::<false>(*quantizer)),
        }
    }

    #[inline(always)]
    fn in_groups<W: Widen, G: Grouped<N>, const N: usize, const SIGNS: u8>(&mut self, format: &G) {
        let Self { values, codes, scales, tally, .. } = self;
        groups::quantize::<T, W::Vector, G, N, SIGNS>(values, format, self.policy, codes, scales, tally);
    }

    /// A block at a time.
    #[inline(always)]
    fn one_by_one<W: Widen, V: Vectorised<N>, const N: usize>(&mut self, format: &V) {
        let block_bytes = self.codes.len() / self.scales.len();
        let codes = self.codes.chunks_exact_mut(block_bytes);
        for (i, (codes, scale)) in codes.zip(&mut *self.scales).enumerate() {
            let mut padded = [T::default(); N];
            let block = block_at(self.values, i, &mut padded);
            let wide = W::widen(block);
            let amax = block::amax_bits(&wide);
            if block::is_non_finite(amax) {
                *scale = policy::quantize_block(block, i * N, format, self.policy, codes, &mut self.tally);
                continue;
            }
            let (byte, scaling, events) = format.scale::<T>(amax);
            self.tally.add(events);
            format.encode(&wide, scaling, codes);
            *scale = byte;
        }
    }
}

pub(super) const EVEN: u8 = 0;
pub(super) const AWAY: u8 = 1;
pub(super) const ZERO: u8 = 2;

/// MXFP4 with a rule of ties, and with −0 kept or not.
pub(super) struct Mxfp4<const TIES: u8, const KEEP: bool>(pub(super) Mx<E2m1>);

impl<const TIES: u8, const KEEP: bool> Blocks<{ mx::BLOCK }> for Mxfp4<TIES, KEEP> {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        Blocks::quantize_block::<T>(&self.0, values, codes)
    }
}

impl<const TIES: u8, const KEEP: bool> Vectorised<{ mx::BLOCK }> for Mxfp4<TIES, KEEP> {
    type Scaling = f32;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, f32, BlockEvents) {
        Vectorised::scale::<T>(&self.0, amax_bits)
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (f32, BlockEvents) {
        Vectorised::rescale::<T>(&self.0, amax_bits, byte)
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; mx::BLOCK], reciprocal: f32, codes: &mut [u8]) {
        let negative_zero = self.0.arithmetic.negative_zero;
        let mut nibbles = [0u8; mx::BLOCK];
        for (nibble, value) in nibbles.iter_mut().zip(wide) {
            let magnitude = f32::from_bits(value.to_bits() & 0x7FFF_FFFF);
            let code = magnitude_code::<TIES>(magnitude * reciprocal);
            *nibble = with_sign::<KEEP>(code, *value, negative_zero);
        }
        pack(&nibbles, codes);
    }
}

/// The MX formats in general; MXFP8 as it stands.
impl<E: mx::Element> Vectorised<{ mx::BLOCK }> for Mx<E> {
    type Scaling = f32;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, f32, BlockEvents) {
        let addend = self.arithmetic.scale_rule.mantissa_addend::<E>();
        let exponent = mx::rounded_exponent(amax_bits, addend);
        let scale = mx::scale_from_exponent::<E>(exponent);
        let events = mx::events::<E>(amax_bits, exponent, self.arithmetic.ties);
        (scale.to_bits(), scale.reciprocal(), events)
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (f32, BlockEvents) {
        let scale = E8m0::from_bits(byte);
        let scaled = f32::from_bits(amax_bits) * scale.reciprocal();
        let flushed = amax_bits != 0 && E::encode(scaled, self.arithmetic.ties) == 0;
        let events =
            BlockEvents { clipped: mx::clips::<E>(amax_bits, scale), flushed, scale_saturated: false };
        (scale.reciprocal(), events)
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; mx::BLOCK], reciprocal: f32, codes: &mut [u8]) {
        for (code, value) in codes.iter_mut().zip(wide) {
            *code = E::encode(value * reciprocal, Ties::Even);
        }
    }
}

/// NVFP4, with −0 kept or not.
pub(super) struct Nvfp4<const KEEP: bool>(pub(super) Quantizer);

impl<const KEEP: bool> Blocks<{ nvfp4::BLOCK }> for Nvfp4<KEEP> {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        Blocks::quantize_block::<T>(&self.0, values, codes)
    }
}

impl<const KEEP: bool> Vectorised<{ nvfp4::BLOCK }> for Nvfp4<KEEP> {
    type Scaling = Scaling;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, Scaling, BlockEvents) {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.0.wanted_scale(amax, |x| T::from_f32(x).to_f32());
        let scale = self.0.rounded_scale(wanted);
        let scaling = self.0.scaling(scale);
        (scale.to_bits(), scaling, self.0.events(amax, wanted, scale, scaling))
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (Scaling, BlockEvents) {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.0.wanted_scale(amax, |x| T::from_f32(x).to_f32());
        let scale = E4m3::from_bits(byte);
        let scaling = self.0.scaling(scale);
        (scaling, self.0.events(amax, wanted, scale, scaling))
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; nvfp4::BLOCK], scaling: Scaling, codes: &mut [u8]) {
        let mut scaled = [0.0; nvfp4::BLOCK];
        match scaling {
            Scaling::Multiply(factor) => {
                scaled.iter_mut().zip(wide).for_each(|(scaled, value)| *scaled = value * factor);
            }
            Scaling::Divide(divisor) => {
                scaled.iter_mut().zip(wide).for_each(|(scaled, value)| *scaled = value / divisor);
            }
        }
        let mut nibbles = [0u8; nvfp4::BLOCK];
        for ((nibble, value), scaled) in nibbles.iter_mut().zip(wide).zip(scaled) {
            // A global scale that is given may leave elements far above 6; the identity needs them below 2^20.
            let magnitude = f32::from_bits(scaled.to_bits() & 0x7FFF_FFFF);
            let code = magnitude_code::<EVEN>(if magnitude < 8.0 { magnitude } else { 8.0 });
            *nibble = with_sign::<KEEP>(code, *value, self.0.negative_zero());
        }
        pack(&nibbles, codes);
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

/// A magnitude's code with the sign of its value, zeros as wanted.
#[inline(always)]
fn with_sign<const KEEP: bool>(code: u32, value: f32, negative_zero: NegativeZero) -> u8 {
    let mut sign = value.to_bits() >> 28 & 8;
    if !KEEP {
        let magnitude = value.to_bits() & 0x7FFF_FFFF;
        let zero = if negative_zero == NegativeZero::Drop { code } else { magnitude };
        let sign_of_zero = if negative_zero == NegativeZero::Force { 8 } else { 0 };
        sign = if zero == 0 { sign_of_zero } else { sign };
    }
    (code | sign) as u8
}

/// Packs codes, two a byte.
#[inline(always)]
fn pack<const N: usize>(nibbles: &[u8; N], codes: &mut [u8]) {
    for (byte, pair) in codes.iter_mut().zip(nibbles.as_chunks::<2>().0) {
        // Both nibbles in one 16-bit word: the shift brings the upper one down beside the lower.
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}

/// Bytes of values that are worked out before they are written past the caches.
const STAGE: usize = 4096;

/// Dequantizes a piece.
#[inline(always)]
pub(super) fn dequantize<T: Element, V: Vector>(
    decoder: &Decoder,
    codes: &[u8],
    scales: &[u8],
    values: &mut [T],
) {
    if !decoder.streams {
        return decode::<T, V>(decoder, codes, scales, values);
    }
    let mut stage = [0u64; STAGE / size_of::<u64>()];
    let stage: &mut [T] = bytemuck::cast_slice_mut(&mut stage);
    let blocks = stage.len() / decoder.format.block();
    let pieces = codes.chunks(blocks * decoder.format.block_bytes()).zip(scales.chunks(blocks));
    for ((codes, scales), values) in pieces.zip(values.chunks_mut(stage.len())) {
        let stage = &mut stage[..values.len()];
        decode::<T, V>(decoder, codes, scales, stage);
        stream::copy(bytemuck::cast_slice(stage), bytemuck::cast_slice_mut(values));
    }
    stream::finish();
}

#[inline(always)]
fn decode<T: Element, V: Vector>(decoder: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
    const MX: usize = mx::BLOCK;
    const NV: usize = nvfp4::BLOCK;
    let (mut codes, mut scales, mut values) = (codes, scales, values);
    if let Some(rows) = &decoder.values {
        let words = bytemuck::cast_slice_mut(values);
        let done = match decoder.format {
            Format::Nvfp4 => groups::decode::<V, NV>(rows, codes, scales, words),
            _ => groups::decode::<V, MX>(rows, codes, scales, words),
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
        Format::Comparison(format) => by_definition::dequantize(format, codes, scales, values),
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

/// The value of a code.
#[inline(always)]
fn element(nibble: u32) -> f32 {
    f32::from_bits(e2m1::magnitude_value(nibble & 7).to_bits() | (nibble & 8) << 28)
}
