//! The instruction sets that the loops are compiled for, and their detection.

use std::sync::OnceLock;

use microscale_formats::{Words, words};

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::products::tiles::Amx;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512, Avx512Bf16, Avx512Vnni};

/// An instruction set for computing on the CPU. All give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// The reference implementation, one element at a time. Tests compare the others with it.
    Reference,
    /// The baseline of the architecture, such as SSE2 on x86-64.
    Portable,
    /// NEON, which every AArch64 CPU has.
    Neon,
    /// AVX2 on x86-64.
    Avx2,
    /// AVX-512 F, BW, DQ and VL on x86-64.
    Avx512,
    /// AVX-512 with VNNI.
    ///
    /// Differs from [`Self::Avx512`] only in the speed of products in INT8.
    Avx512Vnni,
    /// AVX-512 with VNNI and BF16.
    ///
    /// Differs from [`Self::Avx512Vnni`] only in [`gemm_weights`](crate::gemm_weights()) of bf16.
    Avx512Bf16,
    /// [`Self::Avx512Bf16`] with matrix tiles of bf16 (Intel AMX), where Linux permits them.
    ///
    /// Differs from [`Self::Avx512Bf16`] only in [`gemm_weights`](crate::gemm_weights()) of more
    /// than four tokens. If a caller names this instruction set and the machine lacks tiles, they
    /// are emulated, with the same bits.
    AmxBf16,
}

words!(Isa, "instruction set" {
    Self::Reference = "reference",
    Self::Portable = "portable",
    Self::Neon = "neon",
    Self::Avx2 = "avx2",
    Self::Avx512 = "avx512",
    Self::Avx512Vnni = "avx512-vnni",
    Self::Avx512Bf16 = "avx512-bf16",
    Self::AmxBf16 = "amx-bf16",
});

impl Isa {
    /// The instruction set that [`Self::asked`] returns, or else the fastest one of this machine.
    ///
    /// Decided at the first call.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let asked = Self::asked().ok().flatten();
            asked.or_else(|| Self::available().next_back()).unwrap_or(Self::Portable)
        })
    }

    /// The instruction set in the environment variable `MICROSCALE_CPU`, if it is set.
    ///
    /// # Errors
    ///
    /// The fault of the variable: an unknown word, or an instruction set that this machine lacks.
    /// The program stops at such an error; [`Self::best`] ignores the variable.
    pub fn asked() -> Result<Option<Self>, String> {
        let Some(word) = std::env::var_os("MICROSCALE_CPU") else { return Ok(None) };
        let isa = word.to_str().and_then(Self::from_word).filter(|isa| isa.is_available());
        isa.map(Some).ok_or_else(|| {
            let words: Vec<_> = Self::available().map(Self::word).collect();
            format!("MICROSCALE_CPU is {}; this machine has {}", word.display(), words.join(", "))
        })
    }

    /// The instruction sets of this machine, the slowest first.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::WORDS.iter().map(|(_, isa)| *isa).filter(|isa| isa.is_available())
    }

    pub(super) fn is_available(self) -> bool {
        match self {
            Self::Reference | Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Avx512::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Avx512Vnni::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Avx512Vnni::detect().is_some() && Avx512Bf16::detect().is_some(),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::AmxBf16 => Self::Avx512Bf16.is_available() && Amx::is_permitted(),
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            Self::AmxBf16 => false,
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Vnni | Self::Avx512Bf16 => false,
        }
    }
}
