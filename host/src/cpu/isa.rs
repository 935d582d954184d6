//! The instruction sets: one stamp of `lanes` for each, chosen once at run time.

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::hessian::{self, Hessians};
#[cfg(target_arch = "x86_64")]
use super::lanes::Widen;
use super::policy::Tally;
use super::rule::{Decoder, Rule};
#[cfg(target_arch = "x86_64")]
use super::vector::{Avx2, Avx512, Vector};
use super::{lanes, reference};
#[cfg(target_arch = "x86_64")]
use crate::element::Dtype;
use crate::element::Element;
use crate::recipe::Words;

/// A way of computing on the CPU. All give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// The definition, element by element: what the others are tested against.
    Reference,
    /// Whatever the compiler may assume of any CPU of this architecture: SSE2 on x86-64, NEON on AArch64.
    Portable,
    /// AVX2 on x86-64.
    Avx2,
    /// AVX-512 F, BW, DQ and VL on x86-64.
    Avx512,
}

impl Words for Isa {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("reference", Self::Reference),
        ("portable", Self::Portable),
        ("avx2", Self::Avx2),
        ("avx512", Self::Avx512),
    ];
}

/// A stamp for an instruction set: the same functions, compiled with its features enabled.
#[cfg(target_arch = "x86_64")]
macro_rules! stamp {
    ($module:ident, $vector:ident, $features:literal) => {
        mod $module {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) fn quantize<T: Element>(
                v: &[T],
                weights: Option<&[f32]>,
                rule: &Rule,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                lanes::quantize::<T, F16c<$vector>>(v, weights, rule, codes, scales)
            }

            #[target_feature(enable = $features)]
            pub(super) fn quantize_hessian<T: Element>(
                v: &[T],
                hessians: Hessians<'_>,
                rule: &Rule,
                codes: &mut [u8],
                scales: &mut [u8],
            ) -> Tally {
                hessian::quantize::<T, F16c<$vector>>(v, hessians, rule, codes, scales)
            }

            #[target_feature(enable = $features)]
            pub(super) fn dequantize<T: Element>(d: &Decoder, codes: &[u8], scales: &[u8], values: &mut [T]) {
                lanes::dequantize(d, codes, scales, values);
            }

            #[target_feature(enable = $features)]
            pub(super) fn amax_bits<T: Element>(v: &[T]) -> u32 {
                lanes::amax_bits::<T, F16c<$vector>>(v)
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
            return lanes::ByElement::widen(block);
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

#[cfg(target_arch = "x86_64")]
stamp!(avx2, Avx2, "avx2,bmi2,f16c,fma");
#[cfg(target_arch = "x86_64")]
stamp!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,f16c,fma");

/// Calls a function of the stamp of an instruction set, or where there is none does the other thing.
macro_rules! by_stamp {
    ($isa:expr, $function:ident($($arg:expr),*), $otherwise:expr) => {
        match $isa {
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
            _ => $otherwise,
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
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("bmi2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
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

    pub(super) fn quantize<T: Element>(
        self,
        v: &[T],
        weights: Option<&[f32]>,
        rule: &Rule,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Tally {
        match self {
            Self::Reference => reference::quantize(v, weights, rule, codes, scales),
            _ => by_stamp!(
                self,
                quantize(v, weights, rule, codes, scales),
                lanes::quantize::<T, lanes::ByElement>(v, weights, rule, codes, scales)
            ),
        }
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
        by_stamp!(
            self,
            quantize_hessian(v, hessians, rule, codes, scales),
            hessian::quantize::<T, lanes::ByElement>(v, hessians, rule, codes, scales)
        )
    }

    pub(crate) fn dequantize<T: Element>(
        self,
        decoder: &Decoder,
        codes: &[u8],
        scales: &[u8],
        values: &mut [T],
    ) {
        match self {
            Self::Reference => reference::dequantize(decoder, codes, scales, values),
            _ => by_stamp!(
                self,
                dequantize(decoder, codes, scales, values),
                lanes::dequantize(decoder, codes, scales, values)
            ),
        }
    }

    /// The largest magnitude's bits.
    pub(super) fn amax_bits<T: Element>(self, v: &[T]) -> u32 {
        match self {
            Self::Reference => reference::amax_bits(v),
            _ => by_stamp!(self, amax_bits(v), lanes::amax_bits::<T, lanes::ByElement>(v)),
        }
    }
}
