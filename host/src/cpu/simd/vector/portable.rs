//! Vectors as arrays, which the compiler turns into SSE2 on x86-64 and NEON on AArch64.

use super::Vector;
use crate::cpu::simd::tokens::{LANES, Lanes, Portable};
use crate::element::Element;
use half::f16;

/// An array with one value per lane, filled by a loop, because the compiler vectorizes loops.
macro_rules! lanes {
    ($lane:ident => $value:expr) => {{
        let mut lanes = [Default::default(); LANES];
        for $lane in 0..LANES {
            lanes[$lane] = $value;
        }
        lanes
    }};
}

impl Vector for Portable {
    type Number = Lanes<f32>;

    const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

    #[inline(always)]
    unsafe fn assume_detected() -> Self {
        Self
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes<f32> {
        [x; LANES]
    }

    #[inline(always)]
    fn mul(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] * b[lane])
    }

    #[inline(always)]
    fn add(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] + b[lane])
    }

    #[inline(always)]
    fn sub(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] - b[lane])
    }

    #[inline(always)]
    fn fma(self, a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn fnma(self, a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => (-a[lane]).mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn min(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn max(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }

    #[inline(always)]
    fn load(self, lanes: &Lanes<f32>) -> Lanes<f32> {
        *lanes
    }

    #[inline(always)]
    fn store(self, vector: Lanes<f32>) -> Lanes<f32> {
        vector
    }

    #[inline(always)]
    fn deinterleave(self, a: Lanes<f32>, b: Lanes<f32>) -> (Lanes<f32>, Lanes<f32>) {
        let both = [a, b];
        let both = both.as_flattened();
        (lanes!(lane => both[2 * lane]), lanes!(lane => both[2 * lane + 1]))
    }

    #[inline(always)]
    fn halves(self, first: f32, second: f32) -> Lanes<f32> {
        lanes!(lane => if lane < LANES / 2 { first } else { second })
    }

    #[inline(always)]
    fn bits(self, numbers: Lanes<f32>) -> Lanes<u32> {
        lanes!(lane => numbers[lane].to_bits())
    }

    #[inline(always)]
    fn number(self, bits: Lanes<u32>) -> Lanes<f32> {
        lanes!(lane => f32::from_bits(bits[lane]))
    }

    #[inline(always)]
    fn splat_bits(self, bits: u32) -> Lanes<u32> {
        [bits; LANES]
    }

    #[inline(always)]
    fn and(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane] & b[lane])
    }

    #[inline(always)]
    fn or(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane] | b[lane])
    }

    #[inline(always)]
    fn and_not(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => !a[lane] & b[lane])
    }

    #[inline(always)]
    fn shift_left(self, bits: Lanes<u32>, by: u32) -> Lanes<u32> {
        lanes!(lane => bits[lane] << by)
    }

    #[inline(always)]
    fn shift_right(self, bits: Lanes<u32>, by: u32) -> Lanes<u32> {
        lanes!(lane => bits[lane] >> by)
    }

    #[inline(always)]
    fn max_bits(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane].max(b[lane]))
    }

    #[inline(always)]
    fn fold_max(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        let mut lanes = [0; LANES];
        for lane in 0..LANES / 2 {
            lanes[lane] = a[lane].max(a[lane + LANES / 2]);
            lanes[lane + LANES / 2] = b[lane].max(b[lane + LANES / 2]);
        }
        lanes
    }

    #[inline(always)]
    fn max_of_halves(self, vectors: &[Lanes<u32>; LANES / 2]) -> Lanes<u32> {
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
    fn add_bits(self, a: Lanes<u32>, b: Lanes<u32>) -> Lanes<u32> {
        lanes!(lane => a[lane].wrapping_add(b[lane]))
    }

    #[inline(always)]
    fn truncate(self, numbers: Lanes<f32>) -> Lanes<u32> {
        lanes!(lane => numbers[lane] as i32 as u32)
    }

    #[inline(always)]
    fn above(self, a: Lanes<u32>, b: Lanes<u32>) -> u16 {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u16::from(a[lane] > b[lane]) << lane;
        }
        mask
    }

    #[inline(always)]
    fn f32_to_f16(self, numbers: Lanes<f32>) -> Lanes<u32> {
        lanes!(lane => u32::from(<f16 as Element>::from_f32(numbers[lane]).to_bits()))
    }

    #[inline(always)]
    fn f16_to_f32(self, bits: Lanes<u32>) -> Lanes<f32> {
        lanes!(lane => Element::to_f32(f16::from_bits(bits[lane] as u16)))
    }

    #[inline(always)]
    fn low_bytes(self, bits: Lanes<u32>) -> Lanes<u8> {
        lanes!(lane => bits[lane] as u8)
    }

    #[inline(always)]
    fn div(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => a[lane] / b[lane])
    }

    #[inline(always)]
    fn at_most(self, a: Lanes<f32>, b: Lanes<f32>) -> u16 {
        let mut mask = 0;
        for lane in 0..LANES {
            mask |= u16::from(a[lane] <= b[lane]) << lane;
        }
        mask
    }

    #[inline(always)]
    fn select(self, mask: u16, set: Lanes<f32>, unset: Lanes<f32>) -> Lanes<f32> {
        lanes!(lane => if mask >> lane & 1 != 0 { set[lane] } else { unset[lane] })
    }
}
