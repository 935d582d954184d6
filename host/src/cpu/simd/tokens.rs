//! Tokens: a value of such a type proves that the CPU has an instruction set.
//!
//! The `detect` functions are the only safe source of tokens, and every method that calls an
//! intrinsic takes a token as `self`. So safe code cannot execute an instruction that the CPU
//! lacks. Tokens have no size: passing one compiles to nothing.

/// Arrays. The compiler turns them into vectors that every CPU of the architecture has.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

/// AVX2 with BMI2, F16C, FMA and POPCNT.
///
/// Invariant: a value exists only where [`Self::detect`] finds all five.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// Returns the token if this CPU has the instructions.
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("popcnt");
        found.then_some(Self(()))
    }

    /// Returns the token.
    ///
    /// # Safety
    /// This CPU has AVX2, BMI2, F16C, FMA and POPCNT.
    #[inline(always)]
    pub(super) const unsafe fn new() -> Self {
        Self(())
    }
}

/// AVX-512 F, BW, DQ and VL, and all that [`Avx2`] has.
///
/// Invariant: a value exists only where [`Self::detect`] finds all of them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512(());

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// Returns the token if this CPU has the instructions.
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let found = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }

    /// Returns the token of AVX2, which this token includes.
    #[inline(always)]
    pub(super) fn avx2(self) -> Avx2 {
        Avx2(())
    }

    /// Returns the token.
    ///
    /// # Safety
    /// This CPU has AVX-512 F, BW, DQ and VL, and all that [`Avx2`] has.
    #[inline(always)]
    pub(super) const unsafe fn new() -> Self {
        Self(())
    }
}

/// AVX-512 BF16, and all that [`Avx512`] has.
///
/// Invariant: a value exists only where [`Self::detect`] finds all of them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Bf16(Avx512);

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    /// Returns the token if this CPU has the instructions.
    pub(in crate::cpu) fn detect() -> Option<Self> {
        Avx512::detect().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }

    /// Returns the token of AVX-512, whose vectors these operations take.
    #[inline(always)]
    pub(in crate::cpu) fn avx512(self) -> Avx512 {
        self.0
    }
}

/// AVX-512 VNNI, and all that [`Avx512`] has.
///
/// Invariant: a value exists only where [`Self::detect`] finds all of them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Vnni(Avx512);

#[cfg(target_arch = "x86_64")]
impl Avx512Vnni {
    /// Returns the token if this CPU has the instructions.
    pub(in crate::cpu) fn detect() -> Option<Self> {
        Avx512::detect().filter(|_| is_x86_feature_detected!("avx512vnni")).map(Self)
    }

    /// Returns the token of AVX-512, whose vectors these operations take.
    #[inline(always)]
    pub(in crate::cpu) fn avx512(self) -> Avx512 {
        self.0
    }
}

/// NEON. Every AArch64 CPU has it, so there is nothing to prove.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Neon;

/// Lanes per vector.
pub(in crate::cpu) const LANES: usize = 16;

/// A vector in memory: one value per lane.
pub(in crate::cpu) type Lanes<T> = [T; LANES];

/// Evaluates an expression once per part of a vector, and returns the array of results.
///
/// `std::array::from_fn` would not do: closures are compiled without the instruction set of the
/// function around them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! parts {
    ($($index:literal)*; $part:ident => $value:expr) => {
        [$({
            let $part: usize = $index;
            $value
        }),*]
    };
}
#[cfg(target_arch = "x86_64")]
macro_rules! halves {
    ($part:ident => $value:expr) => {
        $crate::cpu::simd::tokens::parts!(0 1; $part => $value)
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! quarters {
    ($part:ident => $value:expr) => {
        $crate::cpu::simd::tokens::parts!(0 1 2 3; $part => $value)
    };
}
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) use halves;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(in crate::cpu) use parts;
#[cfg(target_arch = "aarch64")]
pub(in crate::cpu) use quarters;

#[cfg(target_arch = "x86_64")]
const _: () =
    assert!(size_of::<Avx2>() + size_of::<Avx512>() + size_of::<Avx512Vnni>() + size_of::<Avx512Bf16>() == 0);
