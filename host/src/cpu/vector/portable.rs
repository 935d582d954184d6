//! Vectors as arrays, which the compiler makes of what every CPU of the architecture has: SSE2 on x86-64, NEON on AArch64.

use microscale_formats::search::Machine;

use super::{LANES, Lanes, Vector};

pub(in crate::cpu) struct Portable;

/// Something of each lane. A loop, for the compiler sees vectors in loops.
macro_rules! lanes {
    ($lane:ident => $value:expr) => {{
        let mut lanes = [0.0; LANES];
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
    #[inline(always)]
    fn load(lanes: &Lanes<f32>) -> Lanes<f32> {
        *lanes
    }

    #[inline(always)]
    fn store(vector: Lanes<f32>) -> Lanes<f32> {
        vector
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
