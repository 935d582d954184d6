//! The epilogue adds sums up over lanes, scales, rounds and stores them.

use microscale_formats::dot::{self, STREAMS};
use microscale_kernels_abi::{ApplyGlobal, Dtype as OutputDtype};

use super::operand::{Operand, Problem};
use super::tensor_cores::Activations;
use crate::dtype::{Bf16, Dtype, F16};
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
        // SAFETY: the caller's promise; an operand without a global scale has a stage too.
        let global = f64::from(unsafe { (*self.global).scale });
        match self.apply {
            ApplyGlobal::Absent => sum,
            ApplyGlobal::Divisor => sum / global,
            ApplyGlobal::Multiplier => sum * global,
        }
    }
}

impl Problem {
    /// Stores the sum of a row and a token.
    ///
    /// # Safety
    /// The contract of the kernels; nobody else stores this result.
    #[inline(always)]
    pub(crate) unsafe fn store<D: Activations>(&self, row: u64, token: u32, sum: f64) {
        // SAFETY: the caller's promise.
        unsafe {
            let result = u64::from(self.place(token)) * self.shape.rows + row;
            store(self.out, result, self.weights.scaled(sum), D::OUTPUT)
        }
    }
}

/// Stores a result, rounded.
///
/// # Safety
/// `out` points to more than `index` elements of the dtype in global memory, and no other thread writes this
/// one.
#[inline(always)]
pub(crate) unsafe fn store(out: *mut u8, index: u64, sum: f64, dtype: OutputDtype) {
    let index = index as usize;
    let odd = dot::rounded_to_odd(sum);
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            OutputDtype::F32 => {
                *out.cast::<u32>().add(index) =
                    if sum.is_nan() { 0x7FC0_0000 } else { (sum as f32).to_bits() };
            }
            OutputDtype::F16 => *out.cast::<u16>().add(index) = narrowed::<F16>(odd),
            OutputDtype::Bf16 => *out.cast::<u16>().add(index) = narrowed::<Bf16>(odd),
        }
    }
}

/// A value in 16 bits, or the canonical NaN.
#[inline(always)]
fn narrowed<D: Dtype>(value: f32) -> u16 {
    if value.is_nan() { D::NAN_WORD as u16 } else { D::narrow(&[value; 8])[0] as u16 }
}
