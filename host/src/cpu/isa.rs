//! The instruction sets: one stamp of `lanes` for each, chosen once at run time.
//!
//! What leads to a stamp is not generic, so that a stamp is compiled once, with this library, and not again by each program that uses it.

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};

use super::gemv::{self, Row};
use super::hessian::{self, Hessians};
#[cfg(target_arch = "x86_64")]
use super::lanes::Widen;
use super::policy::Tally;
use super::rule::{Decoder, Kind, Rule};
use super::thresholds::Thresholds;
#[cfg(target_arch = "aarch64")]
use super::vector::Neon;
use super::vector::Portable;
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512, Vector};
use super::{by_definition, groups, lanes, prefetch, reference, weights};
use crate::element::{Dtype, Element};
use crate::quality::ErrorStats;
use crate::recipe::{Format, Words};

/// A way of computing on the CPU. All give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

impl Words for Isa {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("reference", Self::Reference),
        ("portable", Self::Portable),
        ("neon", Self::Neon),
        ("avx2", Self::Avx2),
        ("avx512", Self::Avx512),
    ];
}

/// A stamp for an instruction set: the same functions, compiled with its features enabled, if any, given its vectors and how it widens.
macro_rules! stamp {
    ($module:ident, $vector:ty, $widen:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize<T: Element>(
                v: &[T],
                weights: Option<&[f32]>,
                rule: &Rule,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                lanes::quantize::<T, $widen>(v, weights, rule, codes, scales)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn quantize_hessian<T: Element>(
                v: &[T],
                hessians: Hessians<'_>,
                rule: &Rule,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                hessian::quantize::<T, $widen>(v, hessians, rule, codes, scales)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn dequantize<T: Element>(d: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
                lanes::dequantize::<T, $vector>(d, codes, scales, values);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn thresholds<T: Element>(_: &[T], kind: &Kind) -> Arc<Thresholds> {
                kind.thresholds::<T, $vector>()
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn amax_bits<T: Element>(v: &[T]) -> u32 {
                groups::amax_bits::<T, $vector>(v)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn dot(row: Row<'_>, vector: &gemv::Prepared) -> f64 {
                gemv::dot::<$vector>(row, vector)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn weigh(format: Format, rows: &[Row<'_>], x: &weights::Prepared, sums: &mut weights::RowSums) {
                weights::weigh::<$vector>(format, rows, x, sums);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn errors<T: Element>(v: &[T], approximation: &[f32]) -> ErrorStats {
                // Parts of a row follow each other, with other work between them.
                prefetch::after(v);
                ErrorStats::of_part(v, approximation)
            }
        }
    };
}

/// Widens f16 by the instruction for it; the compiler does not find it by itself. For the vectors of a stamp.
#[cfg(target_arch = "x86_64")]
struct F16c<V>(PhantomData<V>);

#[cfg(target_arch = "x86_64")]
impl<V: Vector> Widen for F16c<V> {
    type Vector = V;

    #[inline(always)]
    fn widen<T: Element, const N: usize>(block: &[T; N]) -> [f32; N] {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
        if T::DTYPE != Dtype::F16 || !N.is_multiple_of(8) {
            return lanes::ByElement::<V>::widen(block);
        }
        let mut wide = [0.0; N];
        for (wide, values) in wide.as_chunks_mut::<8>().0.iter_mut().zip(block.as_chunks::<8>().0) {
            // SAFETY: only the stamps use this type, and they are entered after F16C was detected; eight f16 are the 16
            // bytes that are read, and eight f32 the 32 bytes that are written, both without a demand on alignment.
            unsafe {
                let halves = _mm_loadu_si128(values.as_ptr().cast::<__m128i>());
                _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(halves));
            }
        }
        wide
    }
}

stamp!(portable, Portable, lanes::ByElement<Portable>);

#[cfg(target_arch = "x86_64")]
stamp!(avx2, Avx2, F16c<Avx2>, "avx2,bmi2,f16c,fma,popcnt");
#[cfg(target_arch = "x86_64")]
stamp!(avx512, Avx512, F16c<Avx512>, "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma,popcnt");

#[cfg(target_arch = "aarch64")]
stamp!(neon, Neon, lanes::ByElement<Neon>, "neon");

/// Calls a function of the stamp of an instruction set; the portable one where this machine lacks it, and for the reference.
macro_rules! by_stamp {
    ($isa:expr, $function:ident($($arg:expr),*)) => {
        match $isa {
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                // SAFETY: NEON is part of AArch64.
                unsafe { neon::$function($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if $isa.is_available() => {
                // SAFETY: the features that the stamp enables were just detected on this CPU.
                unsafe { avx2::$function($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if $isa.is_available() => {
                // SAFETY: the features that the stamp enables were just detected on this CPU.
                unsafe { avx512::$function($($arg),*) }
            }
            _ => portable::$function($($arg),*),
        }
    };
}

impl Isa {
    /// The fastest one of this machine, or the one that was [asked](Self::asked) for, if the machine has it. Decided at the
    /// first call.
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
    /// What is wrong with its value: no such word, or this machine lacks it. The program stops there; [`Self::best`] goes on
    /// without it.
    pub fn asked() -> Result<Option<Self>, String> {
        let Some(word) = std::env::var_os("MICROSCALE_CPU") else { return Ok(None) };
        let isa = word.to_str().and_then(Self::from_word).filter(|isa| isa.is_available());
        isa.map(Some).ok_or_else(|| {
            let words: Vec<_> = Self::available().map(Self::word).collect();
            format!("MICROSCALE_CPU is {}; this machine has {}", word.display(), words.join(", "))
        })
    }

    /// Those that this machine has, the slowest first.
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
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// What quantizing 16-bit values compares them with; the reference does not.
    pub(super) fn thresholds<T: Element>(self, kind: &Kind) -> Arc<Thresholds> {
        thresholds(self, Elements::of::<T>(&[]), kind)
    }

    pub(super) fn quantize<T: Element>(
        self,
        v: &[T],
        weights: Option<&[f32]>,
        rule: &Rule,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Tally {
        quantize(self, Elements::of(v), weights, rule, codes, scales)
    }

    /// With scales that are searched, given the Hessian of each block.
    pub(super) fn quantize_hessian<T: Element>(
        self,
        v: &[T],
        hessians: Hessians<'_>,
        rule: &Rule,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Tally {
        quantize_hessian(self, Elements::of(v), hessians, rule, codes, scales)
    }

    pub(crate) fn dequantize<T: Element>(
        self,
        decoder: &Decoder,
        codes: &[u8],
        scales: &[u8],
        values: &mut [T],
    ) {
        if let Format::Comparison(format) = decoder.format {
            return by_definition::dequantize(format, codes, scales, values);
        }
        dequantize(self, decoder, codes, scales, ElementsMut::of(values));
    }

    /// How far values are from as many approximations.
    pub(crate) fn errors<T: Element>(self, v: &[T], approximation: &[f32]) -> ErrorStats {
        errors(self, Elements::of(v), approximation)
    }

    /// The sum of a row's products with a vector; the reference does it otherwise.
    pub(super) fn dot(self, row: Row<'_>, vector: &gemv::Prepared) -> f64 {
        by_stamp!(self, dot(row, vector))
    }

    /// The sums of rows' products with each token's activations.
    pub(super) fn weigh(
        self,
        format: Format,
        rows: &[Row<'_>],
        x: &weights::Prepared,
        sums: &mut weights::RowSums,
    ) {
        if self == Self::Reference {
            return rows.iter().zip(sums).for_each(|(row, sums)| weights::reference(format, *row, x, sums));
        }
        by_stamp!(self, weigh(format, rows, x, sums));
    }

    /// The largest magnitude's bits.
    pub(super) fn amax_bits<T: Element>(self, v: &[T]) -> u32 {
        amax_bits(self, Elements::of(v))
    }
}

/// Values of a dtype.
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    fn of<T: Element>(values: &'a [T]) -> Self {
        match T::DTYPE {
            Dtype::F32 => Self::F32(bytemuck::cast_slice(values)),
            Dtype::F16 => Self::F16(bytemuck::cast_slice(values)),
            Dtype::Bf16 => Self::Bf16(bytemuck::cast_slice(values)),
        }
    }
}

/// Where values of a dtype go to.
enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

impl<'a> ElementsMut<'a> {
    fn of<T: Element>(values: &'a mut [T]) -> Self {
        match T::DTYPE {
            Dtype::F32 => Self::F32(bytemuck::cast_slice_mut(values)),
            Dtype::F16 => Self::F16(bytemuck::cast_slice_mut(values)),
            Dtype::Bf16 => Self::Bf16(bytemuck::cast_slice_mut(values)),
        }
    }
}

/// The same expression for values of each dtype.
macro_rules! by_dtype {
    ($Elements:ident, $values:ident => $expr:expr) => {
        match $values {
            $Elements::F32($values) => $expr,
            $Elements::F16($values) => $expr,
            $Elements::Bf16($values) => $expr,
        }
    };
}

fn thresholds(isa: Isa, none: Elements<'_>, kind: &Kind) -> Arc<Thresholds> {
    by_dtype!(Elements, none => match isa {
        Isa::Reference => Thresholds::none(),
        _ => by_stamp!(isa, thresholds(none, kind)),
    })
}

fn quantize(
    isa: Isa,
    v: Elements<'_>,
    weights: Option<&[f32]>,
    rule: &Rule,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    by_dtype!(Elements, v => match isa {
        Isa::Reference => reference::quantize(v, weights, rule, codes, scales),
        _ => by_stamp!(isa, quantize(v, weights, rule, codes, scales)),
    })
}

fn quantize_hessian(
    isa: Isa,
    v: Elements<'_>,
    hessians: Hessians<'_>,
    rule: &Rule,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    by_dtype!(Elements, v => by_stamp!(isa, quantize_hessian(v, hessians, rule, codes, scales)))
}

fn dequantize(isa: Isa, decoder: &Decoder, codes: &[u8], scales: &[u8], values: ElementsMut<'_>) {
    by_dtype!(ElementsMut, values => match isa {
        Isa::Reference => reference::dequantize(decoder, codes, scales, values),
        _ => by_stamp!(isa, dequantize(decoder, codes, scales, values)),
    })
}

fn errors(isa: Isa, v: Elements<'_>, approximation: &[f32]) -> ErrorStats {
    by_dtype!(Elements, v => by_stamp!(isa, errors(v, approximation)))
}

fn amax_bits(isa: Isa, v: Elements<'_>) -> u32 {
    by_dtype!(Elements, v => match isa {
        Isa::Reference => reference::amax_bits(v),
        _ => by_stamp!(isa, amax_bits(v)),
    })
}
