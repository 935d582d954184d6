//! Vectors as arrays, which the compiler turns into the vectors that every CPU of the architecture has: SSE2
//! on x86-64, NEON on AArch64.

use half::f16;
use microscale_formats::arithmetic::Machine;

use super::Vector;
use crate::cpu::simd::tokens::{LANES, Lanes, Portable};
use crate::element::Element;

/// An array of a value for each lane, made in a loop, for the compiler sees vectors in loops.
macro_rules! lanes {
    ($lane:ident => $value:expr) => {{
        let mut lanes = [Default::default(); LANES];
        for $lane in 0..LANES {
            lanes[$lane] = $value;
        }
        lanes
    }};
}

impl Machine for Portable {
    type Number = Lanes<f32>;

    #[inline(always)]
    fn splat(x: f32) -> Lanes<f32> {
        [x; LANES]
    }

    #[inline(always)]
    fn mul(a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] * b[lane])
    }

    #[inline(always)]
    fn add(a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] + b[lane])
    }

    #[inline(always)]
    fn sub(a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] - b[lane])
    }

    #[inline(always)]
    fn fma(a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn fnma(a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => (-a[lane]).mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn min(a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn max(a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }
}

impl Vector for Portable {
    const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

    #[inline(always)]
    fn load(lanes: &Lanes<f32>) -> Lanes<f32> {
        *lanes
    }

    #[inline(always)]
    fn store(vector: Lanes<f32>) -> Lanes<f32> {
        vector
    }

    #[inline(always)]
    fn deinterleave(a: Lanes<f32>, b: Lanes<f32>) -> (Lanes<f32>, Lanes<f32>) {
        let both = [a, b];
        let both = both.as_flattened();
        (lanes!(lane => both[2 * lane]), lanes!(lane => both[2 * lane + 1]))
    }

    #[inline(always)]
    fn halves(first: f32, second: f32) -> Lanes<f32> {
        lanes!(lane => if lane < LANES / 2 { first } else { second })
    }

    #[inline(always)]
    fn bits(numbers: Lanes<f32>) -> Lanes<u32> {
        lanes!(lane => numbers[lane].to_bits())
    }

    #[inline(always)]
    fn number(bits: Lanes<u32>) -> Lanes<f32> {
        lanes!(lane => f32::from_bits(bits[lane]))
    }

    #[inline(always)]
    fn splat_bits(bits: u32) -> Lanes<u32> {
        [bits; LANES]
    }

    #[inline(always)]
    fn and(a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane] & b[lane])
    }

    #[inline(always)]
    fn or(a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane] | b[lane])
    }

    #[inline(always)]
    fn and_not(a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => !a[lane] & b[lane])
    }

    #[inline(always)]
    fn shift_left(bits: Lanes<u32>, by: u32) -> Lanes<u32> {
        lanes!(lane => bits[lane] << by)
    }

    #[inline(always)]
    fn shift_right(bits: Lanes<u32>, by: u32) -> Lanes<u32> {
        lanes!(lane => bits[lane] >> by)
    }

    #[inline(always)]
    fn max_bits(a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane].max(b[lane]))
    }

    #[inline(always)]
    fn fold_max(a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        let mut lanes = [0; LANES];
        for lane in 0..LANES / 2 {
            lanes[lane] = a[lane].max(a[lane + LANES / 2]);
            lanes[lane + LANES / 2] = b[lane].max(b[lane + LANES / 2]);
        }
        lanes
    }

    #[inline(always)]
    fn max_of_halves(vectors: &[Lanes<u32>; LANES / 2]) -> Lanes<u32> {
        let halves = vectors.as_flattened().as_chunks::<{ LANES / 2 }>().0;
        let mut largest = [0; LANES];
        for (largest, half) in largest.iter_mut().zip(halves) {
            for bits in half {
                *largest = (*bits).max(*largest);
            }
        }
        largest
    }

    #[inline(always)]
    fn add_bits(a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane].wrapping_add(b[lane]))
    }

    #[inline(always)]
    fn above(a: Lanes<u32>, b: Lanes<u32>) -> u16 {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u16::from(a[lane] > b[lane]) << lane;
        }
        mask
    }

    #[inline(always)]
    fn f32_to_f16(numbers: Lanes<f32>) -> Lanes<u32> {
        lanes!(lane => u32::from(<f16 as Element>::from_f32(numbers[lane]).to_bits()))
    }

    #[inline(always)]
    fn f16_to_f32(bits: Lanes<u32>) -> Lanes<f32> {
        lanes!(lane => Element::to_f32(f16::from_bits(bits[lane] as u16)))
    }

    #[inline(always)]
    fn low_bytes(bits: Lanes<u32>) -> Lanes<u8> {
        lanes!(lane => bits[lane] as u8)
    }

    #[inline(always)]
    fn div(a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] / b[lane])
    }

    #[inline(always)]
    fn at_most(a: Lanes<f32>, b: Lanes<f32>) -> u16 {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u16::from(a[lane] <= b[lane]) << lane;
        }
        mask
    }

    #[inline(always)]
    fn select(mask: u16, set: Lanes<f32>, unset: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => if mask >> lane & 1 != 0 { set[lane] } else { unset[lane] })
    }
}
