//! The instruction sets: an instance of the algorithms for each, chosen once at run time.
//!
//! The functions that choose an instance are not generic, so that instances are compiled once, with this
//! library, and not again by each program that uses it.

use std::sync::{Arc, OnceLock};

use microscale_formats::errors::ErrorSums;

use super::arranged::{self, Arranged, Form};
use super::decoder::Decoder;
use super::hessian::{self, Hessians};
use super::panels::{self, Operands, Scratch, TokenSums};
use super::piece::Output;
use super::policy::Tally;
use super::rows::Row;
use super::rule::{Kind, Rule, Searching};
#[cfg(target_arch = "x86_64")]
use super::terms::Pairs;
use super::terms::{ByVectors, Singles};
use super::thresholds::Thresholds;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::tiles::Amx;
use super::tiles::{ByTiles, Emulated};
#[cfg(target_arch = "aarch64")]
use super::vector::Neon;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512};
use super::vector::{Lanes, Portable};
#[cfg(target_arch = "x86_64")]
use super::weigh_pairs::{self, PreparedPairs};
use super::widen::ByElement;
#[cfg(target_arch = "x86_64")]
use super::widen::F16c;
use super::{by_definition, decode, dot, errors, exact, groups, plain, prefetch, reference, search, weigh};
use crate::element::{Dtype, Element};
use crate::elements::{Elements, ElementsMut, by_dtype};
use microscale_formats::{Format, GlobalScale, Words, words};

/// A way of computing on the CPU. All give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// The definition, element by element: what the others are tested against.
    Reference,
    /// Whatever the compiler may assume of any CPU of this architecture, such as SSE2 on x86-64.
    Portable,
    /// NEON, which every AArch64 has.
    Neon,
    /// AVX2 on x86-64.
    Avx2,
    /// AVX-512 F, BW, DQ and VL on x86-64.
    Avx512,
    /// AVX-512 with BF16. Only [`gemm_weights`](crate::gemm_weights()) of bf16 differs from [`Self::Avx512`]'s.
    Avx512Bf16,
    /// [`Self::Avx512Bf16`] with matrix tiles of bf16 (Intel AMX), where Linux permits them. Only
    /// [`gemm_weights`](crate::gemm_weights()) of more than four tokens differs from [`Self::Avx512Bf16`]'s. Where tiles are named and the
    /// machine lacks them, they are emulated, with the same bits.
    AmxBf16,
}

words!(Isa, "instruction set" {
    Self::Reference = "reference",
    Self::Portable = "portable",
    Self::Neon = "neon",
    Self::Avx2 = "avx2",
    Self::Avx512 = "avx512",
    Self::Avx512Bf16 = "avx512-bf16",
    Self::AmxBf16 = "amx-bf16",
});

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
                rule: &Rule,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                plain::quantize::<T, $widen>(values, rule, Output { codes, scales })
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize_searching<T: Element>(
                values: &[T],
                importance: Option<&[f32]>,
                rule: &Rule,
                searching: &Searching,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                let output = Output { codes, scales };
                search::quantize::<T, $widen>(values, importance, rule, searching, output)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize_hessian<T: Element>(
                values: &[T],
                hessians: Hessians<'_>,
                rule: &Rule,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                hessian::quantize::<T, $widen>(values, hessians, rule, Output { codes, scales })
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn dequantize<T: Element>(d: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
                decode::dequantize::<T, $vector>(d, codes, scales, values);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn thresholds<T: Element>(_: &[T], kind: &Kind) -> Arc<Thresholds> {
                kind.thresholds::<T, $vector>()
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn to_e4m3(values: &[f32], factors: exact::Factors, codes: &mut [u8]) -> bool {
                exact::to_e4m3(values, factors, codes)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn amax_bits<T: Element>(values: &[T]) -> u32 {
                groups::amax_bits::<T, $vector>(values)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn dot(row: Row<'_>, vector: &dot::Prepared) -> f64 {
                dot::dot::<$vector>(row, vector)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn weigh(
                format: Format,
                rows: &[Row<'_>],
                x: &weigh::Prepared,
                sums: &mut weigh::RowSums,
            ) {
                weigh::weigh::<$vector>(format, rows, x, sums);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn multiply(operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
                panels::multiply::<$vector, _>(&ByVectors(Singles), operands, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn finish<T: Element>(
                sums: &[TokenSums],
                factors: &[f64; panels::ROWS],
                global: Option<GlobalScale>,
                out: &mut [T],
            ) -> bool {
                panels::finish(sums, factors, global, out)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn arrange<T: Element>(
                form: Form,
                activations: &[T],
                cols: usize,
                first: usize,
                lines: &mut [Lanes<f32>],
            ) {
                arranged::arrange::<T, $widen>(form, activations, cols, first, lines);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn emulate_tiles(operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
                let tiles = &Emulated::<$vector>::new();
                let products = ByTiles { tiles, parts: operands.x.parts() };
                panels::multiply::<$vector, _>(&products, operands, sums, scratch);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn errors<T: Element>(values: &[T], approximation: &[f32]) -> ErrorSums {
                // Parts of a row follow each other, with other work between them.
                prefetch::after(values);
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
    panels::multiply::<Avx512, _>(&ByVectors(Pairs), operands, sums, scratch);
}

/// The products that AMX adds, by tiles that are configured.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
fn multiply_tiles(tiles: &Amx, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
    let products = ByTiles { tiles, parts: operands.x.parts() };
    panels::multiply::<Avx512, _>(&products, operands, sums, scratch);
}

/// As [`multiply_pairs`], for a few tokens.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt")]
fn weigh_pairs(format: Format, rows: &[Row<'_>], x: &PreparedPairs, sums: &mut weigh::RowSums) {
    weigh_pairs::weigh::<Avx512>(format, rows, x, sums);
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
    /// The fastest one of this machine, or the one that was [asked](Self::asked) for, if the machine has it.
    /// Decided at the first call.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let asked = Self::asked().ok().flatten();
            asked.or_else(|| Self::available().next_back()).unwrap_or(Self::Portable)
        })
    }

    /// The one that the environment variable `MICROSCALE_CPU` asks for, if it is set.
    ///
    /// # Errors
    /// What is wrong with its value: no such word, or this machine lacks it. The program stops there;
    /// [`Self::best`] goes on without it.
    pub fn asked() -> Result<Option<Self>, String> {
        let Some(word) = std::env::var_os("MICROSCALE_CPU") else { return Ok(None) };
        let isa = word.to_str().and_then(Self::from_word).filter(|isa| isa.is_available());
        isa.map(Some).ok_or_else(|| {
            let words: Vec<_> = Self::available().map(Self::word).collect();
            format!("MICROSCALE_CPU is {}; this machine has {}", word.display(), words.join(", "))
        })
    }

    /// The instruction sets that this machine has, the slowest first.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::WORDS.iter().map(|(_, isa)| *isa).filter(|isa| isa.is_available())
    }

    fn is_available(self) -> bool {
        match self {
            Self::Reference | Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::AmxBf16 => Self::Avx512Bf16.is_available() && Amx::is_permitted(),
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            Self::AmxBf16 => false,
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => false,
        }
    }

    /// The thresholds for quantizing 16-bit values like these; the reference has none.
    pub(super) fn thresholds(self, like: Elements<'_>, kind: &Kind) -> Arc<Thresholds> {
        by_dtype!(Elements, like => match self {
            Self::Reference => Thresholds::none(),
            _ => by_instance!(self, thresholds(like, kind)),
        })
    }

    /// Quantizes a piece; if scales are searched, with the importance of its elements' errors.
    pub(super) fn quantize(
        self,
        values: Elements<'_>,
        importance: Option<&[f32]>,
        rule: &Rule,
        output: Output<'_>,
    ) -> Tally {
        let Output { codes, scales } = output;
        by_dtype!(Elements, values => match (self, &rule.searching) {
            (Self::Reference, _) => {
                reference::quantize(values, importance, rule, Output { codes, scales })
            }
            (_, None) => by_instance!(self, quantize(values, rule, codes, scales)),
            (_, Some(searching)) => {
                by_instance!(self, quantize_searching(values, importance, rule, searching, codes, scales))
            }
        })
    }

    /// Quantizes a piece with scales that are searched, given the Hessian of each block.
    pub(super) fn quantize_hessian(
        self,
        values: Elements<'_>,
        hessians: Hessians<'_>,
        rule: &Rule,
        output: Output<'_>,
    ) -> Tally {
        let Output { codes, scales } = output;
        // Most of the time goes to the search, which is compiled once for all: an instance for AVX-512 would add
        // 100 kB to every program.
        let isa =
            if matches!(self, Self::Avx512 | Self::Avx512Bf16 | Self::AmxBf16) { Self::Avx2 } else { self };
        by_dtype!(Elements, values => {
            by_instance!(isa, quantize_hessian(values, hessians, rule, codes, scales))
        })
    }

    /// Dequantizes a piece.
    pub(crate) fn dequantize(self, decoder: &Decoder, codes: &[u8], scales: &[u8], values: ElementsMut<'_>) {
        by_dtype!(ElementsMut, values => match (self, decoder.format) {
            (_, Format::Comparison(format)) => by_definition::dequantize(format, codes, scales, values),
            (Self::Reference, _) => reference::dequantize(decoder, codes, scales, values),
            _ => by_instance!(self, dequantize(decoder, codes, scales, values)),
        })
    }

    /// The sums of the differences of values and as many approximations.
    pub(crate) fn errors(self, values: Elements<'_>, approximation: &[f32]) -> ErrorSums {
        by_dtype!(Elements, values => by_instance!(self, errors(values, approximation)))
    }

    /// Codes of E4M3, and whether all are exact.
    pub(crate) fn to_e4m3(self, values: &[f32], factors: exact::Factors, codes: &mut [u8]) -> bool {
        match self {
            Self::Reference => exact::to_e4m3(values, factors, codes),
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
    pub(super) fn dot(self, row: Row<'_>, vector: &dot::Prepared) -> f64 {
        by_instance!(self, dot(row, vector))
    }

    /// The sums of rows' products with each token's activations.
    pub(super) fn weigh(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &weigh::Prepared,
        sums: &mut weigh::RowSums,
    ) {
        if self == Self::Reference {
            return rows.iter().zip(sums).for_each(|(row, sums)| weigh::reference(format, *row, x, sums));
        }
        by_instance!(self, weigh(format, rows, x, sums));
    }

    /// Returns whether the machine has this instruction set, and AVX-512 BF16 in it.
    pub(super) fn has_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::AmxBf16) && self.is_available()
    }

    /// How activations of a dtype are multiplied where there are many tokens.
    pub(super) fn form_of(self, dtype: Dtype) -> Form {
        match self {
            Self::AmxBf16 => Form::Tiles,
            _ if dtype == Dtype::Bf16 && self.has_pairs() => Form::Pairs,
            _ => Form::Singles,
        }
    }

    /// Puts activations in the order in which they are multiplied.
    pub(super) fn arranged(self, activations: Elements<'_>, cols: usize, tokens: usize) -> Arranged {
        let (dtype, form) = (activations.dtype(), self.form_of(activations.dtype()));
        Arranged::new(form, dtype, cols, tokens, |first, lines| {
            by_dtype!(Elements, activations => {
                by_instance!(self, arrange(form, activations, cols, first, lines));
            });
        })
    }

    /// Sets the sums of some tokens, by panel and token. The reference does it otherwise.
    pub(super) fn multiply(self, operands: &Operands<'_>, sums: &mut [TokenSums], scratch: &mut Scratch) {
        match operands.x.form() {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Form::Tiles if Self::AmxBf16.is_available() => {
                // SAFETY: tiles were just found to be permitted, and the features that the function enables to be there. There are no
                // other configured tiles on this thread: they are configured here alone, and the function calls nothing that does.
                unsafe { multiply_tiles(&Amx::configure(), operands, sums, scratch) }
            }
            Form::Tiles => by_instance!(Self::Avx512, emulate_tiles(operands, sums, scratch)),
            #[cfg(target_arch = "x86_64")]
            Form::Pairs if Self::Avx512Bf16.is_available() => {
                // SAFETY: the features that the function enables were just detected on this CPU.
                unsafe { multiply_pairs(operands, sums, scratch) }
            }
            // Pairs are only chosen where they are there.
            Form::Pairs | Form::Singles => by_instance!(self, multiply(operands, sums, scratch)),
        }
    }

    /// Rounds the products of some tokens and [`panels::ROWS`] rows. Returns false if some are no numbers, and then none counts.
    pub(super) fn finish(
        self,
        sums: &[TokenSums],
        factors: &[f64; panels::ROWS],
        global: Option<GlobalScale>,
        out: ElementsMut<'_>,
    ) -> bool {
        by_dtype!(ElementsMut, out => by_instance!(self, finish(sums, factors, global, out)))
    }

    /// The sums of rows' products with each token's activations, in pairs, if this machine has the instructions.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn weigh_pairs(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &PreparedPairs,
        sums: &mut weigh::RowSums,
    ) {
        if self.has_pairs() {
            // SAFETY: the features that the function enables were just detected on this CPU.
            unsafe { weigh_pairs(format, rows, x, sums) };
        }
    }
}
