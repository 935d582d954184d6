//! Products of bytes in arrays, element by element.

use super::{Int8Products, LANES, Lanes, Quarter, STEP};
use crate::cpu::simd::products::RAISED;
use crate::cpu::simd::tokens::Portable;

impl Int8Products<Portable> for Portable {
    type Bytes = Quarter;

    #[inline(always)]
    fn raised(self, codes: &[u8; STEP]) -> [Quarter; 4] {
        let mut raised = [[[0; 4]; LANES]; 4];
        for (group, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
            for (i, codes) in codes.iter().enumerate() {
                raised[i / 4 * 2][group][i % 4] = RAISED[usize::from(codes & 15)];
                raised[i / 4 * 2 + 1][group][i % 4] = RAISED[usize::from(codes >> 4)];
            }
        }
        raised
    }

    #[inline(always)]
    fn load(self, quarter: &Quarter) -> Quarter {
        *quarter
    }

    #[inline(always)]
    fn store(self, bytes: Quarter) -> Quarter {
        bytes
    }

    #[inline(always)]
    fn add_groups(self, sums: &Lanes<i32>, weights: [Quarter; 4], x: [Quarter; 4]) -> Lanes<u32> {
        let mut of_groups = [0; LANES];
        for (group, of_group) in of_groups.iter_mut().enumerate() {
            let mut sum = sums[group];
            for (weights, x) in weights.iter().zip(&x) {
                for (weight, x) in weights[group].iter().zip(x[group]) {
                    sum += i32::from(*weight) * i32::from(x);
                }
            }
            *of_group = sum as u32;
        }
        of_groups
    }
}
