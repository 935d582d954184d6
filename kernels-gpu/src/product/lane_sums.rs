//! The epilogue adds sums up over lanes, scales and stores them.

use microscale_formats::dot::STREAMS;

use super::operand::{Operand, Problem};
use super::tensor_cores::Activations;
use crate::warp;

/// Adds up the streams of a warp in pairs: those 16 apart, then 8, and so on. As long as a lane has sums of
/// several rows, it gives half of them away. At the end lane `l` has the sum of row `l / (32 / ROWS)`.
#[inline(always)]
pub(crate) fn total<const ROWS: usize>(mut sums: [f64; ROWS]) -> f64 {
    let (mut left, mut apart) = (ROWS, STREAMS as u32 / 2);
    while apart > 0 {
        if left > 1 {
            left /= 2;
            let upper = warp::lane() & apart != 0;
            for i in 0..left {
                let (low, high) = (sums[i], sums[i + left]);
                let (keeps, gives) = if upper { (high, low) } else { (low, high) };
                sums[i] = keeps + warp::shuffle_xor_f64(gives, apart);
            }
        } else {
            sums[0] += warp::shuffle_xor_f64(sums[0], apart);
        }
        apart /= 2;
    }
    sums[0]
}

/// Adds the sum of the lane whose number differs in a bit.
#[inline(always)]
pub(crate) fn both(sum: f32, bit: u32) -> f32 {
    sum + f32::from_bits(warp::shuffle_xor(sum.to_bits(), bit))
}

/// Adds two sums of both lanes, and leaves one in each: the first in the lane where the bit is not set, the
/// second in the other.
#[inline(always)]
pub(crate) fn shared_out([first, second]: [f32; 2], bit: u32) -> f32 {
    let (kept, given) = if warp::lane() & bit == 0 { (first, second) } else { (second, first) };
    kept + f32::from_bits(warp::shuffle_xor(given.to_bits(), bit))
}

impl Operand {
    /// Applies the operand's global scale to a sum, if it has one.
    ///
    /// # Safety
    /// The contract of the kernels.
    #[inline(always)]
    pub(crate) unsafe fn scaled(&self, sum: f64) -> f64 {
        // SAFETY: the caller's promise; an operand without a global scale has a slot too.
        self.apply.scaled(sum, unsafe { (*self.global).scale })
    }
}

impl Problem {
    /// Stores the sum of a row and a token, given that of the row behind for a gate.
    ///
    /// # Safety
    /// The contract of the kernels; nobody else stores this result.
    #[inline(always)]
    pub(crate) unsafe fn store<D: Activations>(
        &self,
        row: u64,
        token: u32,
        sum: f64,
        next: impl FnOnce() -> f64,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let at = [u64::from(self.place(token)), row, self.shape.rows];
            let (sum, next) = (self.weights.scaled(sum), || self.weights.scaled(next()));
            self.results.store(D::OUTPUT, at, sum, next);
        }
    }
}
