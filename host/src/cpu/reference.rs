//! The reference: the block functions of `microscale_formats`, one block at a time.

use microscale_formats::{Format, mx, nvfp4};

use super::search;
use crate::cpu::blocks::format::BlockFormat;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::slow_path::{block_at, quantize_block};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::decode::decoder::Decoder;
use crate::cpu::rounding::params::{FormatParams, QuantizeParams};
use crate::element::Element;
use crate::scheme::NonFinite;

pub(super) fn quantize<T: Element>(
    values: &[T],
    importance: Option<&[f32]>,
    params: &QuantizeParams,
    output: Output<'_>,
) -> Tally {
    if let Some(searching) = &params.searching {
        return search::quantize_reference(values, importance, params, searching, output);
    }
    match &params.format {
        FormatParams::Mxfp4(mx) => quantize_blocks(values, mx, params.non_finite, output),
        FormatParams::Mxfp8E4m3(mx) => quantize_blocks(values, mx, params.non_finite, output),
        FormatParams::Mxfp8E5m2(mx) => quantize_blocks(values, mx, params.non_finite, output),
        FormatParams::Nvfp4(quantizer, _) => quantize_blocks(values, quantizer, params.non_finite, output),
    }
}

fn quantize_blocks<T: Element, const N: usize>(
    values: &[T],
    blocks: &impl BlockFormat<N>,
    non_finite: NonFinite,
    output: Output<'_>,
) -> Tally {
    let mut tally = Tally::default();
    let codes = output.codes.chunks_mut(output.codes.len() / output.scales.len());
    for (i, (codes, scale)) in codes.zip(output.scales).enumerate() {
        let mut padded = [T::default(); N];
        let block = block_at(values, i, &mut padded);
        *scale = quantize_block(block, i * N, blocks, non_finite, codes, &mut tally);
    }
    tally
}

pub(super) fn dequantize<T: Element>(decoder: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
    match decoder.format {
        Format::Nvfp4 => dequantize_blocks::<T, { nvfp4::BLOCK }>(decoder, codes, scales, values),
        _ => dequantize_blocks::<T, { mx::BLOCK }>(decoder, codes, scales, values),
    }
}

fn dequantize_blocks<T: Element, const N: usize>(
    decoder: &Decoder,
    codes: &[u8],
    scales: &[u8],
    values: &mut [T],
) {
    let blocks = codes.chunks(decoder.format.block_bytes()).zip(scales);
    for ((codes, scale), values) in blocks.zip(values.chunks_mut(N)) {
        let block = decoder.block::<N>(*scale, codes);
        values.iter_mut().zip(block).for_each(|(value, wide)| *value = T::from_f32(wide));
    }
}

/// The bits of the largest magnitude, element by element.
pub(super) fn amax_bits<T: Element>(values: &[T]) -> u32 {
    values.iter().map(|value| value.to_f32().to_bits() & 0x7FFF_FFFF).max().unwrap_or(0)
}
