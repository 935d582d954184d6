//! Dispatch: compiles the loops for each instruction set, and chooses an instance once per call.
//!
//! The functions that choose are not generic. So this library compiles the instances once, and
//! programs that use it do not compile them again.

mod instances;

use std::sync::Arc;

use microscale_formats::errors::ErrorSums;
use microscale_formats::{Format, GlobalScale};

#[cfg(target_arch = "aarch64")]
use self::instances::neon;
use self::instances::portable;
#[cfg(target_arch = "x86_64")]
use self::instances::{avx2, avx512};
use super::blocks::output::Output;
use super::blocks::tally::Tally;
use super::decode::decoder::Decoder;
use super::isa::Isa;
use super::products::activations::{PackedActivations, Packing};
#[cfg(target_arch = "x86_64")]
use super::products::few_tokens_bf16::PackedTokenPairs;
use super::products::panels::{self, Operands, Scratch, TokenSums};
use super::products::rows::Row;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::products::tiles::Amx;
use super::products::{dot, few_tokens, fp8, int8};
use super::rounding::params::{FormatParams, QuantizeParams};
use super::rounding::thresholds::Thresholds;
use super::search::hessian::Hessians;
#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512, Avx512Bf16, Avx512Vnni};
use super::simd::{Lanes, Portable};
use super::{comparison, exact_cast, reference};
use crate::activations::RowOperation;
use crate::element::Dtype;
use crate::elements::{Elements, ElementsMut, by_dtype};

/// The token of the instance to call.
enum Token {
    Portable(Portable),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

/// Calls a function of the instruction set's instance, with the token as its first argument.
macro_rules! by_instance {
    ($isa:expr, $function:ident($($arg:expr),*)) => {
        match $isa.token() {
            Token::Portable(simd) => portable::$function(simd, $($arg),*),
            #[cfg(target_arch = "aarch64")]
            Token::Neon(simd) => {
                // SAFETY: the instance enables NEON, which is part of AArch64.
                unsafe { neon::$function(simd, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Token::Avx2(simd) => {
                // SAFETY: the instance enables the features that `simd` proves.
                unsafe { avx2::$function(simd, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Token::Avx512(simd) => {
                // SAFETY: the instance enables the features that `simd` proves.
                unsafe { avx512::$function(simd, $($arg),*) }
            }
        }
    };
}

mod gptq;

impl Isa {
    /// The token of this instruction set's instance.
    ///
    /// Falls back to [`Portable`] for the reference, and if this CPU lacks the instructions.
    ///
    /// Not inlined: detection takes half a kilobyte, and every operation and dtype has a call.
    #[inline(never)]
    fn token(self) -> Token {
        match self {
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Token::Neon(Neon),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::detect().map_or(Token::Portable(Portable), Token::Avx2),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx512Vnni | Self::Avx512Bf16 | Self::AmxBf16 if self.is_available() => {
                Avx512::detect().map_or(Token::Portable(Portable), Token::Avx512)
            }
            _ => Token::Portable(Portable),
        }
    }

    /// The thresholds for quantizing 16-bit values of the dtype of `like`. The reference has none.
    pub(super) fn thresholds(self, like: Elements<'_>, format: &FormatParams) -> Arc<Thresholds> {
        by_dtype!(Elements, like => match self {
            Self::Reference => Thresholds::none(),
            _ => by_instance!(self, thresholds(like, format)),
        })
    }

    /// Quantizes a run of blocks. `importance` has one weight per element, for searches.
    pub(super) fn quantize(
        self,
        values: Elements<'_>,
        importance: Option<&[f32]>,
        params: &QuantizeParams,
        output: Output<'_>,
    ) -> Tally {
        let Output { codes, scales } = output;
        by_dtype!(Elements, values => match (self, &params.searching) {
            (Self::Reference, _) => {
                reference::quantize(values, importance, params, Output { codes, scales })
            }
            (_, None) => by_instance!(self, quantize(values, params, codes, scales)),
            (_, Some(searching)) => {
                by_instance!(self, quantize_searching(values, importance, params, searching, codes, scales))
            }
        })
    }

    /// Quantizes a run of blocks with searched scales, given the Hessian of each block.
    pub(super) fn quantize_hessian(
        self,
        values: Elements<'_>,
        hessians: Hessians<'_>,
        params: &QuantizeParams,
        output: Output<'_>,
    ) -> Tally {
        let Output { codes, scales } = output;
        // The search dominates, and it is compiled once for all instances. An instance for AVX-512
        // would add 100 kB to every program.
        let isa = match self {
            Self::Avx512 | Self::Avx512Vnni | Self::Avx512Bf16 | Self::AmxBf16 => Self::Avx2,
            isa => isa,
        };
        by_dtype!(Elements, values => {
            by_instance!(isa, quantize_hessian(values, hessians, params, codes, scales))
        })
    }

    /// Dequantizes a run of blocks.
    pub(crate) fn dequantize(self, decoder: &Decoder, codes: &[u8], scales: &[u8], values: ElementsMut<'_>) {
        by_dtype!(ElementsMut, values => match (self, decoder.format) {
            (_, Format::Comparison(format)) => comparison::dequantize(format, codes, scales, values),
            (Self::Reference, _) => reference::dequantize(decoder, codes, scales, values),
            _ => by_instance!(self, dequantize(decoder, codes, scales, values)),
        })
    }

    /// Sums over the differences of values and their approximations, of equal number.
    pub(crate) fn errors(self, values: Elements<'_>, approximation: &[f32]) -> ErrorSums {
        by_dtype!(Elements, values => by_instance!(self, errors(values, approximation)))
    }

    /// Casts to E4M3. Returns whether all casts are exact.
    pub(crate) fn to_e4m3(self, values: &[f32], factors: exact_cast::Factors, codes: &mut [u8]) -> bool {
        match self {
            Self::Reference => exact_cast::to_e4m3(values, factors, codes),
            _ => by_instance!(self, to_e4m3(values, factors, codes)),
        }
    }

    /// The bits of the largest magnitude.
    pub(super) fn amax_bits(self, values: Elements<'_>) -> u32 {
        by_dtype!(Elements, values => match self {
            Self::Reference => reference::amax_bits(values),
            _ => by_instance!(self, amax_bits(values)),
        })
    }

    /// The dot product of a row and a vector. The reference uses [`dot::reference`] instead.
    pub(super) fn dot(self, row: Row<'_>, vector: &dot::PackedVector) -> f64 {
        by_instance!(self, dot(row, vector))
    }

    /// The dot products of rows with each token's activations.
    pub(super) fn multiply_few_tokens(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &few_tokens::PackedTokens,
        sums: &mut few_tokens::RowSums,
    ) {
        if self == Self::Reference {
            return rows
                .iter()
                .zip(sums)
                .for_each(|(row, sums)| few_tokens::reference(format, *row, x, sums));
        }
        by_instance!(self, multiply_few_tokens(format, rows, x, sums));
    }

    /// Returns whether this is AVX-512 BF16 or more, and the machine has it.
    pub(super) fn has_bf16_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::AmxBf16) && self.is_available()
    }

    /// The packing of activations of a dtype for products of many tokens.
    pub(super) fn packing_of(self, dtype: Dtype) -> Packing {
        match self {
            Self::AmxBf16 => Packing::Bf16Tiles,
            _ if dtype == Dtype::Bf16 && self.has_bf16_pairs() => Packing::Bf16Pairs,
            _ => Packing::F32,
        }
    }

    /// Packs activations for products of many tokens.
    pub(super) fn pack_activations(
        self,
        activations: Elements<'_>,
        cols: usize,
        tokens: usize,
    ) -> PackedActivations {
        let (dtype, packing) = (activations.dtype(), self.packing_of(activations.dtype()));
        PackedActivations::new(packing, dtype, cols, tokens, |first, lines| {
            by_dtype!(Elements, activations => {
                by_instance!(self, pack_activations(packing, activations, cols, first, lines));
            });
        })
    }

    /// Computes the sums of a task, by panel and token. Not for [`Self::Reference`].
    pub(super) fn multiply(self, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
        let packing = operands.x.packing();
        #[cfg(target_arch = "x86_64")]
        if packing == Packing::Bf16Pairs
            && let Some(pairs) = Avx512Bf16::detect()
        {
            // SAFETY: the function enables the features that `pairs` proves.
            return unsafe { instances::multiply_pairs(pairs, operands, sums, scratch) };
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if packing == Packing::Bf16Tiles
            && Self::AmxBf16.is_available()
            && let Some(simd) = Avx512::detect()
        {
            // SAFETY: `is_available` found that this process may use tiles. This thread has no
            // other `Amx`: outside of tests, only this line makes one, and `multiply_tiles` does
            // not call this function. That function enables the features that `simd` proves.
            return unsafe { instances::multiply_tiles(simd, &Amx::configure(), operands, sums, scratch) };
        }
        match packing {
            Packing::Bf16Tiles => by_instance!(Self::Avx512, emulate_tiles(operands, sums, scratch)),
            // `packing_of` chooses pairs only if the CPU has them.
            Packing::Bf16Pairs | Packing::F32 => by_instance!(self, multiply(operands, sums, scratch)),
        }
    }

    /// Rounds the products of some tokens and [`panels::ROWS`] rows.
    ///
    /// Returns false if one of them is not finite. Then none of the output is valid.
    pub(super) fn round_sums(
        self,
        sums: &[TokenSums],
        factors: &[f64; panels::ROWS],
        global: Option<GlobalScale>,
        out: ElementsMut<'_>,
    ) -> bool {
        by_dtype!(ElementsMut, out => by_instance!(self, round_sums(sums, factors, global, out)))
    }

    /// The dot products of rows with each token's activations, by pairs of bf16.
    ///
    /// Does nothing if this machine lacks the instructions: call it only after
    /// [`Self::has_bf16_pairs`].
    #[cfg(target_arch = "x86_64")]
    pub(super) fn multiply_few_tokens_bf16(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &PackedTokenPairs,
        sums: &mut few_tokens::RowSums,
    ) {
        if let Some(pairs) = Avx512Bf16::detect() {
            // SAFETY: the function enables the features that `pairs` proves.
            unsafe { instances::multiply_few_tokens_bf16(pairs, format, rows, x, sums) };
        }
    }

    /// Computes a row of activations by an operation: values rounded to their dtype, as f32.
    ///
    /// `residual`, if there is one, is added first, and replaced by the sum. All have one dtype.
    /// `wide` is scratch memory for gates.
    pub(super) fn compute_row(
        self,
        operation: &RowOperation,
        values: Elements<'_>,
        residual: Option<ElementsMut<'_>>,
        weights: Option<Elements<'_>>,
        wide: &mut Vec<f32>,
        row: &mut [f32],
    ) {
        let widen = |values: Elements<'_>, row: &mut [f32]| {
            by_dtype!(Elements, values => by_instance!(self, widen(values, row)));
        };
        let round = |row: &mut [f32]| by_dtype!(Elements, values => by_instance!(self, round(values, row)));
        match operation {
            RowOperation::None => widen(values, row),
            RowOperation::Glu(of, order) => {
                wide.resize(values.len(), 0.0);
                widen(values, wide);
                by_instance!(self, glu(*of, *order, wide, row));
                round(row);
            }
            RowOperation::RmsNorm(norm) => {
                widen(values, row);
                if let Some(residual) = residual {
                    by_dtype!(ElementsMut, residual => by_instance!(self, add_residual(residual, row)));
                }
                by_instance!(self, normalize(norm, row));
                if let Some(weights) = weights {
                    if norm.rounds_before_weight != 0 {
                        round(row);
                    }
                    by_dtype!(Elements, weights => by_instance!(self, weigh(norm, weights, row)));
                }
                round(row);
            }
        }
    }

    /// The largest finite magnitude of a row.
    pub(super) fn finite_amax(self, row: &[f32]) -> f32 {
        by_instance!(self, finite_amax(row))
    }

    /// Encodes a row in FP8 under one scale.
    pub(super) fn encode_fp8(self, row: &[f32], scale: f32, codes: &mut [u8]) {
        by_instance!(self, encode_fp8(row, scale, codes));
    }

    /// The sums of up to [`fp8::ROWS`] rows and the listed tokens in FP8, by token.
    pub(super) fn multiply_fp8(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &fp8::Fp8Tokens<'_>,
        tokens: &[usize],
        sums: &mut [Lanes<f32>],
    ) {
        match self {
            Self::Reference => fp8::multiply_reference(format, rows, x, tokens, sums),
            _ => by_instance!(self, multiply_fp8(format, rows, x, tokens, sums)),
        }
    }

    /// Packs one token's activations for products in INT8.
    pub(super) fn pack_int8(
        self,
        values: Elements<'_>,
        activations: &mut [int8::Activations],
        stride: usize,
    ) {
        by_dtype!(Elements, values => by_instance!(self, pack_int8(values, activations, stride)));
    }

    /// Packs one token's activations in FP4 for products in INT8.
    pub(super) fn pack_fp4(
        self,
        format: Format,
        row: Row<'_>,
        activations: &mut [int8::Activations],
        stride: usize,
    ) {
        by_instance!(self, pack_fp4(format, row, activations, stride));
    }

    /// The sums of up to [`int8::ROWS`] rows and all tokens in INT8, by token.
    pub(super) fn multiply_int8(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &int8::Int8Tokens,
        sums: &mut [f32],
        scratch: &mut int8::Scratch,
    ) {
        #[cfg(target_arch = "x86_64")]
        if matches!(self, Self::Avx512Vnni | Self::Avx512Bf16 | Self::AmxBf16)
            && let Some(vnni) = Avx512Vnni::detect()
        {
            // SAFETY: the function enables the features that `vnni` proves.
            return unsafe { instances::multiply_int8_vnni(vnni, format, rows, x, sums, scratch) };
        }
        match self {
            Self::Reference => int8::multiply_reference(format, rows, x, |_| true, sums),
            _ => by_instance!(self, multiply_int8(format, rows, x, sums, scratch)),
        }
    }

    /// Rounds sums of products in INT8, given the factor of the format.
    pub(super) fn round_int8(
        self,
        sums: &[f32],
        factor: f64,
        global: Option<GlobalScale>,
        out: ElementsMut<'_>,
    ) {
        by_dtype!(ElementsMut, out => by_instance!(self, round_int8(sums, factor, global, out)));
    }
}
