//! The instruction sets as types. The traits of `halfwords`, `vector` and `products` give them their
//! operations.

/// Arrays, for whatever the compiler makes of them.
pub(in crate::cpu) struct Portable;

/// AVX2 with FMA.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) struct Avx2;

/// AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) struct Avx512;

/// NEON.
#[cfg(target_arch = "aarch64")]
pub(in crate::cpu) struct Neon;

/// Lanes of a vector.
pub(in crate::cpu) const LANES: usize = 16;

/// A vector in memory: one value for each lane.
pub(in crate::cpu) type Lanes<T> = [T; LANES];

/// An array with one value for each part of a vector, by its index. A closure would not do: closures are not
/// compiled with the instruction set of the function that they are in.
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
