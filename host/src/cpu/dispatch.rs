//! Dispatch: an instance of the algorithms for each instruction set, chosen once for each call at run time.
//!
//! The functions that choose an instance are not generic, so that instances are compiled once, with this
//! library, and not again by each program that uses it.

use std::sync::Arc;

use super::isa::Isa;
use microscale_formats::errors::ErrorSums;

use super::comparison;
use super::decode;
use super::errors;
use super::exact_cast;
use super::reference;
use super::rounding;
use super::search;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::tally::Tally;
use crate::cpu::decode::decoder::Decoder;
use crate::cpu::memory::prefetch;
use crate::cpu::products::activations::{self, PackedActivations, Packing};
use crate::cpu::products::dot;
use crate::cpu::products::few_tokens;
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
use crate::cpu::rounding::groups;
use crate::cpu::rounding::params::{FormatParams, QuantizeParams, SearchParams};
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::search::hessian::{self, Hessians};
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::Neon;
use crate::cpu::simd::widen::ByElement;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::widen::F16c;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};
use crate::cpu::simd::{Lanes, Portable};
use crate::element::{Dtype, Element};
use crate::elements::{Elements, ElementsMut, by_dtype};
use microscale_formats::{Format, GlobalScale};

/// An instance for an instruction set: the same functions, compiled with its features enabled, if any, given
/// its vectors and its widening. Codes and scales are arguments of their own: the compiler knows of arguments
/// that they do not overlap, but not of the fields of an [`Output`].
macro_rules! instance {
    ($module:ident, $vector:ty, $widen:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize<T: Element>(
                values: &[T],
                params: &QuantizeParams,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                rounding::quantize::<T, $widen>(values, params, Output { codes, scales })
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize_searching<T: Element>(
                values: &[T],
                importance: Option<&[f32]>,
                params: &QuantizeParams,
                searching: &SearchParams,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                let output = Output { codes, scales };
                search::quantize::<T, $widen>(values, importance, params, searching, output)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize_hessian<T: Element>(
                values: &[T],
                hessians: Hessians<'_>,
                params: &QuantizeParams,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                hessian::quantize::<T, $widen>(values, hessians, params, Output { codes, scales })
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn dequantize<T: Element>(d: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
                decode::dequantize::<T, $vector>(d, codes, scales, values);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn thresholds<T: Element>(_: &[T], format: &FormatParams) -> Arc<Thresholds> {
                format.thresholds::<T, $vector>()
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn to_e4m3(values: &[f32], factors: exact_cast::Factors, codes: &mut [u8]) -> bool {
                exact_cast::to_e4m3(values, factors, codes)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn amax_bits<T: Element>(values: &[T]) -> u32 {
                groups::amax_bits::<T, $vector>(values)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn dot(row: Row<'_>, vector: &dot::PackedVector) -> f64 {
                dot::dot::<$vector>(row, vector)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn multiply_few_tokens(
                format: Format,
                rows: &[Row<'_>],
                x: &few_tokens::PackedTokens,
                sums: &mut few_tokens::RowSums,
            ) {
                few_tokens::multiply::<$vector>(format, rows, x, sums);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn multiply(operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
                panels::multiply::<$vector, _>(&VectorMicrokernel(F32Terms), operands, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn round_sums<T: Element>(
                sums: &[TokenSums],
                factors: &[f64; panels::ROWS],
                global: Option<GlobalScale>,
                out: &mut [T],
            ) -> bool {
                panels::round_sums(sums, factors, global, out)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn pack_activations<T: Element>(
                packing: Packing,
                activations: &[T],
                cols: usize,
                first: usize,
                lines: &mut [Lanes<f32>],
            ) {
                activations::pack_activations::<T, $widen>(packing, activations, cols, first, lines);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn emulate_tiles(operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
                let tiles = &EmulatedAmx::<$vector>::new();
                let products = TileMicrokernel { tiles, parts: operands.x.parts() };
                panels::multiply::<$vector, _>(&products, operands, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn errors<T: Element>(values: &[T], approximation: &[f32]) -> ErrorSums {
                // Parts of a row follow each other, with other work between them.
                prefetch::prefetch_following(values);
                errors::of_part(values, approximation)
            }
        }
    };
}

instance!(portable, Portable, ByElement<Portable>);

#[cfg(target_arch = "x86_64")]
instance!(avx2, Avx2, F16c<Avx2>, "avx2,bmi2,f16c,fma,popcnt");
#[cfg(target_arch = "x86_64")]
instance!(avx512, Avx512, F16c<Avx512>, "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt");

/// The products that AVX-512 BF16 adds.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
fn multiply_pairs(operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
    panels::multiply::<Avx512, _>(&VectorMicrokernel(Bf16Terms), operands, sums, scratch);
}

/// The products that AMX adds, by tiles that are configured.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
fn multiply_tiles(tiles: &Amx, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
    let products = TileMicrokernel { tiles, parts: operands.x.parts() };
    panels::multiply::<Avx512, _>(&products, operands, sums, scratch);
}

/// As [`multiply_pairs`], for a few tokens.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
fn multiply_few_tokens_bf16(
    format: Format,
    rows: &[Row<'_>],
    x: &PackedTokenPairs,
    sums: &mut few_tokens::RowSums,
) {
    few_tokens_bf16::multiply::<Avx512>(format, rows, x, sums);
}

#[cfg(target_arch = "aarch64")]
instance!(neon, Neon, ByElement<Neon>, "neon");

/// Calls a function of the instance for an instruction set; the portable one where this machine lacks it, and
/// for the reference.
macro_rules! by_instance {
    ($isa:expr, $function:ident($($arg:expr),*)) => {
        match $isa {
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                // SAFETY: NEON is part of AArch64.
                unsafe { neon::$function($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if $isa.is_available() => {
                // SAFETY: the features that the instance enables were just detected on this CPU.
                unsafe { avx2::$function($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::AmxBf16 if $isa.is_available() => {
                // SAFETY: the features that the instance enables were just detected on this CPU.
                unsafe { avx512::$function($($arg),*) }
            }
            _ => portable::$function($($arg),*),
        }
    };
}

impl Isa {
    /// The thresholds for quantizing 16-bit values like these; the reference has none.
    pub(super) fn thresholds(self, like: Elements<'_>, format: &FormatParams) -> Arc<Thresholds> {
        by_dtype!(Elements, like => match self {
            Self::Reference => Thresholds::none(),
            _ => by_instance!(self, thresholds(like, format)),
        })
    }

    /// Quantizes a piece; if scales are searched, with the importance of its elements' errors.
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

    /// Quantizes a piece with scales that are searched, given the Hessian of each block.
    pub(super) fn quantize_hessian(
        self,
        values: Elements<'_>,
        hessians: Hessians<'_>,
        params: &QuantizeParams,
        output: Output<'_>,
    ) -> Tally {
        let Output { codes, scales } = output;
        // Most of the time goes to the search, which is compiled once for all: an instance for AVX-512 would add
        // 100 kB to every program.
        let isa =
            if matches!(self, Self::Avx512 | Self::Avx512Bf16 | Self::AmxBf16) { Self::Avx2 } else { self };
        by_dtype!(Elements, values => {
            by_instance!(isa, quantize_hessian(values, hessians, params, codes, scales))
        })
    }

    /// Dequantizes a piece.
    pub(crate) fn dequantize(self, decoder: &Decoder, codes: &[u8], scales: &[u8], values: ElementsMut<'_>) {
        by_dtype!(ElementsMut, values => match (self, decoder.format) {
            (_, Format::Comparison(format)) => comparison::dequantize(format, codes, scales, values),
            (Self::Reference, _) => reference::dequantize(decoder, codes, scales, values),
            _ => by_instance!(self, dequantize(decoder, codes, scales, values)),
        })
    }

    /// The sums of the differences of values and as many approximations.
    pub(crate) fn errors(self, values: Elements<'_>, approximation: &[f32]) -> ErrorSums {
        by_dtype!(Elements, values => by_instance!(self, errors(values, approximation)))
    }

    /// Codes of E4M3, and whether all are exact.
    pub(crate) fn to_e4m3(self, values: &[f32], factors: exact_cast::Factors, codes: &mut [u8]) -> bool {
        match self {
            Self::Reference => exact_cast::to_e4m3(values, factors, codes),
            _ => by_instance!(self, to_e4m3(values, factors, codes)),
        }
    }

    /// The largest magnitude's bits.
    pub(super) fn amax_bits(self, values: Elements<'_>) -> u32 {
        by_dtype!(Elements, values => match self {
            Self::Reference => reference::amax_bits(values),
            _ => by_instance!(self, amax_bits(values)),
        })
    }

    /// The sum of a row's products with a vector; the reference does it otherwise.
    pub(super) fn dot(self, row: Row<'_>, vector: &dot::PackedVector) -> f64 {
        by_instance!(self, dot(row, vector))
    }

    /// The sums of rows' products with each token's activations.
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

    /// Returns whether the machine has this instruction set, and AVX-512 BF16 in it.
    pub(super) fn has_bf16_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::AmxBf16) && self.is_available()
    }

    /// How activations of a dtype are multiplied where there are many tokens.
    pub(super) fn packing_of(self, dtype: Dtype) -> Packing {
        match self {
            Self::AmxBf16 => Packing::Bf16Tiles,
            _ if dtype == Dtype::Bf16 && self.has_bf16_pairs() => Packing::Bf16Pairs,
            _ => Packing::F32,
        }
    }

    /// Puts activations in the order in which they are multiplied.
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

    /// Sets the sums of some tokens, by panel and token. The reference does it otherwise.
    pub(super) fn multiply(self, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
        match operands.x.packing() {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Packing::Bf16Tiles if Self::AmxBf16.is_available() => {
                // SAFETY: tiles were just found to be permitted, and the features that the function enables to be there. There are no
                // other configured tiles on this thread: they are configured here alone, and the function calls nothing that does.
                unsafe { multiply_tiles(&Amx::configure(), operands, sums, scratch) }
            }
            Packing::Bf16Tiles => by_instance!(Self::Avx512, emulate_tiles(operands, sums, scratch)),
            #[cfg(target_arch = "x86_64")]
            Packing::Bf16Pairs if Self::Avx512Bf16.is_available() => {
                // SAFETY: the features that the function enables were just detected on this CPU.
                unsafe { multiply_pairs(operands, sums, scratch) }
            }
            // Pairs are only chosen where they are there.
            Packing::Bf16Pairs | Packing::F32 => by_instance!(self, multiply(operands, sums, scratch)),
        }
    }

    /// Rounds the products of some tokens and [`panels::ROWS`] rows. Returns false if some are no numbers, and then none counts.
    pub(super) fn round_sums(
        self,
        sums: &[TokenSums],
        factors: &[f64; panels::ROWS],
        global: Option<GlobalScale>,
        out: ElementsMut<'_>,
    ) -> bool {
        by_dtype!(ElementsMut, out => by_instance!(self, round_sums(sums, factors, global, out)))
    }

    /// The sums of rows' products with each token's activations, in pairs, if this machine has the instructions.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn multiply_few_tokens_bf16(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &PackedTokenPairs,
        sums: &mut few_tokens::RowSums,
    ) {
        if self.has_bf16_pairs() {
            // SAFETY: the features that the function enables were just detected on this CPU.
            unsafe { multiply_few_tokens_bf16(format, rows, x, sums) };
        }
    }
}
