//! The loops, compiled once per instruction set.

use std::sync::Arc;

use microscale_formats::Glu;
use microscale_formats::activations::RmsNorm;
use microscale_formats::errors::ErrorSums;
use microscale_formats::{Format, GlobalScale};

use crate::activations::GluOrder;
use crate::cpu::activations::rows;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::decode::decoder::Decoder;
use crate::cpu::gptq::{self, Blocks, GptqFactor, LoopParams, TaskRows};
use crate::cpu::memory::prefetch;
use crate::cpu::products::activations::{self, Packing};
#[cfg(target_arch = "x86_64")]
use crate::cpu::products::few_tokens_bf16::{self, PackedTokenPairs};
#[cfg(target_arch = "x86_64")]
use crate::cpu::products::microkernel::Bf16Terms;
use crate::cpu::products::microkernel::{F32Terms, VectorMicrokernel};
use crate::cpu::products::panels::{self, Operands, Scratch, TokenSums};
use crate::cpu::products::rows::Row;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::cpu::products::tiles::Amx;
use crate::cpu::products::tiles::{EmulatedAmx, TileMicrokernel};
use crate::cpu::products::{dot, few_tokens, fp8, int8};
use crate::cpu::rounding::groups;
use crate::cpu::rounding::params::{FormatParams, QuantizeParams, SearchParams};
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::search::hessian::{self, Hessians};
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512, Avx512Bf16, Avx512Vnni};
use crate::cpu::simd::{Lanes, Portable};
use crate::cpu::{decode, errors, exact_cast, rounding, search};
use crate::element::Element;

/// Compiles the loops for an instruction set: the same functions, with its token and its features.
///
/// Codes and scales are separate arguments. The compiler knows that arguments do not alias, but not
/// that the fields of an [`Output`] do not.
macro_rules! instance {
    ($module:ident, $token:ty $(, $features:literal)?) => {
        pub(in crate::cpu) mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn quantize<T: Element>(
                simd: $token,
                values: &[T],
                params: &QuantizeParams,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                rounding::quantize(simd, values, params, Output { codes, scales })
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn quantize_searching<T: Element>(
                simd: $token,
                values: &[T],
                importance: Option<&[f32]>,
                params: &QuantizeParams,
                searching: &SearchParams,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                let output = Output { codes, scales };
                search::quantize(simd, values, importance, params, searching, output)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn quantize_hessian<T: Element>(
                simd: $token,
                values: &[T],
                hessians: Hessians<'_>,
                params: &QuantizeParams,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                hessian::quantize(simd, values, hessians, params, Output { codes, scales })
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn dequantize<T: Element>(simd: $token, d: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
                decode::dequantize(simd, d, codes, scales, values);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn thresholds<T: Element>(simd: $token, _: &[T], format: &FormatParams) -> Arc<Thresholds> {
                format.thresholds::<T, $token>(simd)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn to_e4m3(_: $token, values: &[f32], factors: exact_cast::Factors, codes: &mut [u8]) -> bool {
                exact_cast::to_e4m3(values, factors, codes)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn amax_bits<T: Element>(simd: $token, values: &[T]) -> u32 {
                groups::amax_bits(simd, values)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn dot(simd: $token, row: Row<'_>, vector: &dot::PackedVector) -> f64 {
                dot::dot(simd, row, vector)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn multiply_few_tokens(
                simd: $token,
                format: Format,
                rows: &[Row<'_>],
                x: &few_tokens::PackedTokens,
                sums: &mut few_tokens::RowSums,
            ) {
                few_tokens::multiply(simd, format, rows, x, sums);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn multiply(simd: $token, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
                panels::multiply(simd, &VectorMicrokernel(F32Terms), operands, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn round_sums<T: Element>(
                _: $token,
                sums: &[TokenSums],
                factors: &[f64; panels::ROWS],
                global: Option<GlobalScale>,
                out: &mut [T],
            ) -> bool {
                panels::round_sums(sums, factors, global, out)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn pack_activations<T: Element>(
                simd: $token,
                packing: Packing,
                activations: &[T],
                cols: usize,
                first: usize,
                lines: &mut [Lanes<f32>],
            ) {
                activations::pack_activations(simd, packing, activations, cols, first, lines);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn emulate_tiles(simd: $token, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
                let tiles = &EmulatedAmx(simd);
                let products = TileMicrokernel { tiles, parts: operands.x.parts() };
                panels::multiply(simd, &products, operands, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn widen<T: Element>(_: $token, values: &[T], row: &mut [f32]) {
                rows::widen(values, row);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn add_residual<T: Element>(_: $token, residual: &mut [T], row: &mut [f32]) {
                rows::add_residual(residual, row);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn round<T: Element>(_: $token, like: &[T], row: &mut [f32]) {
                rows::round(like, row);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn glu(_: $token, glu: Glu, order: GluOrder, values: &[f32], row: &mut [f32]) {
                rows::glu(glu, order, values, row);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn normalize(_: $token, norm: &RmsNorm, row: &mut [f32]) {
                rows::normalize(norm, row);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn weigh<T: Element>(_: $token, norm: &RmsNorm, weights: &[T], row: &mut [f32]) {
                rows::weigh(norm, weights, row);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn finite_amax(_: $token, row: &[f32]) -> f32 {
                rows::finite_amax(row)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn encode_fp8(_: $token, row: &[f32], scale: f32, codes: &mut [u8]) {
                rows::encode(row, scale, codes);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn multiply_fp8(
                simd: $token,
                format: Format,
                rows: &[Row<'_>],
                x: &fp8::Fp8Tokens<'_>,
                tokens: &[usize],
                sums: &mut [Lanes<f32>],
            ) {
                fp8::multiply(simd, format, rows, x, tokens, sums);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn pack_int8<T: Element>(
                simd: $token,
                values: &[T],
                activations: &mut [int8::Activations],
                stride: usize,
            ) {
                int8::pack(simd, values, activations, stride);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn pack_fp4(
                simd: $token,
                format: Format,
                row: Row<'_>,
                activations: &mut [int8::Activations],
                stride: usize,
            ) {
                int8::pack_fp4::<$token, $token>(simd, format, row, activations, stride);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn multiply_int8(
                simd: $token,
                format: Format,
                rows: &[Row<'_>],
                x: &int8::Int8Tokens,
                sums: &mut [f32],
                scratch: &mut int8::Scratch,
            ) {
                int8::multiply(simd, simd, format, rows, x, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn round_int8<T: Element>(
                _: $token,
                sums: &[f32],
                factor: f64,
                global: Option<GlobalScale>,
                out: &mut [T],
            ) {
                int8::round_sums(sums, factor, global, out);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn subtract_panel(_: $token, panel: &[&[[f64; 8]]], done: &[[f64; 8]], open: &mut [[f64; 8]]) {
                gptq::subtract_panel(panel, done, open);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn solve_panel(_: $token, start: usize, panel: &[Vec<[f64; 8]>], tile: &mut [[f64; 8]]) {
                gptq::solve(start, panel, tile);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn factor_panel(
                _: $token,
                first: usize,
                panel: &mut [Vec<[f64; 8]>],
            ) -> Result<(), usize> {
                gptq::factor_panel(first, panel)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn quantize_gptq(simd: $token, params: &LoopParams<'_>, blocks: &Blocks, task: &mut TaskRows<'_>) -> Tally {
                gptq::quantize_task(simd, params, blocks, task)
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn add_gptq_norms(simd: $token, factor: &GptqFactor, rows: &[Lanes<f32>], norms: &mut [f64]) {
                gptq::add_norms(simd, factor, rows, norms);
            }

            $(#[target_feature(enable = $features)])?
            pub(in crate::cpu) fn errors<T: Element>(_: $token, values: &[T], approximation: &[f32]) -> ErrorSums {
                // The caller processes parts of a row in sequence, with other work in between.
                prefetch::prefetch_following(values);
                errors::of_part(values, approximation)
            }
        }
    };
}

instance!(portable, Portable);

#[cfg(target_arch = "x86_64")]
instance!(avx2, Avx2, "avx2,bmi2,f16c,fma,popcnt");
#[cfg(target_arch = "x86_64")]
instance!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt");

#[cfg(target_arch = "aarch64")]
instance!(neon, Neon, "neon");

/// The instance of [`panels::multiply`] for pairs of bf16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
pub(super) fn multiply_pairs(
    pairs: Avx512Bf16,
    operands: &Operands<'_>,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    panels::multiply(pairs.avx512(), &VectorMicrokernel(Bf16Terms(pairs)), operands, sums, scratch);
}

/// The instance of [`few_tokens_bf16::multiply`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
pub(super) fn multiply_few_tokens_bf16(
    pairs: Avx512Bf16,
    format: Format,
    rows: &[Row<'_>],
    x: &PackedTokenPairs,
    sums: &mut few_tokens::RowSums,
) {
    few_tokens_bf16::multiply(pairs, format, rows, x, sums);
}

/// The instance of [`int8::multiply`] for VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
pub(super) fn multiply_int8_vnni(
    vnni: Avx512Vnni,
    format: Format,
    rows: &[Row<'_>],
    x: &int8::Int8Tokens,
    sums: &mut [f32],
    scratch: &mut int8::Scratch,
) {
    int8::multiply(vnni.avx512(), vnni, format, rows, x, sums, scratch);
}

/// The instance of [`panels::multiply`] for AMX.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
pub(super) fn multiply_tiles(
    simd: Avx512,
    tiles: &Amx,
    operands: &Operands<'_>,
    sums: &mut [TokenSums],
    scratch: &mut Scratch,
) {
    let products = TileMicrokernel { tiles, parts: operands.x.parts() };
    panels::multiply(simd, &products, operands, sums, scratch);
}
