//! The reference on the GPU, with the bits of the CPU's `microscale_formats::weights`: for values
//! out of the tensor cores' range, and for ragged rows.

use microscale_formats::dot::{CHUNK, STREAMS};
use microscale_formats::plan::power_of_two;
use microscale_formats::weights::GROUP;
use microscale_kernels_abi::Epilogue;

use super::lane_sums::total;
use super::operand::{Row, load_8};
use super::problem::Problem;
use super::tensor_cores::{Activations, WeightFormat};
use crate::dtype::Dtype;
use crate::hardware::{ptx, warp};

/// The product of a row and a token's activations.
///
/// # Safety
/// The kernel's contract. All lanes of the warp call it.
#[inline(always)]
unsafe fn reference<F: WeightFormat, D: Activations>(row: Row, activations: *const u8, cols: u64) -> f64 {
    let mut sum = 0.0;
    let mut start = u64::from(warp::lane()) * CHUNK as u64;
    while start < cols {
        let mut first = start;
        while first < cols && first < start + CHUNK as u64 {
            // SAFETY: `first` is before the row's end. Codes and scale of its group exist, even if
            // the row ends in it.
            let ([low, high], scale) = unsafe {
                (
                    load_8(row.codes.wrapping_add((first / 2) as usize)),
                    *row.scales.wrapping_add((first / (2 * F::BLOCK_BYTES)) as usize),
                )
            };
            let codes = u64::from(low) | u64::from(high) << 32;
            let mut fraction = 0.0;
            let mut i = 0;
            while i < GROUP as u64 && first + i < cols {
                let code = (codes >> (4 * i)) as u32;
                // Moved to the bits of an f32, the code is the weight times 2^-126.
                let weight = f32::from_bits((code & 7) << 22 | code << 28 & 1 << 31) * power_of_two(126 - 7);
                // SAFETY: `first + i < cols`.
                let bits = unsafe { *activations.wrapping_add(((first + i) * 2) as usize).cast::<u16>() };
                fraction = ptx::fma_f32(weight, D::Dtype::widen(&[u32::from(bits), 0, 0, 0], 0), fraction);
                i += 1;
            }
            sum = F::add_group(sum, fraction, scale);
            first += GROUP as u64;
        }
        start += (STREAMS * CHUNK) as u64;
    }
    64.0 * total([f64::from(sum)])
}

impl Problem {
    /// Computes and stores the results of a row and the tokens from `tokens[0]` to `tokens[1]`.
    /// With a gate, an even row is computed with the next one, and an odd row is skipped.
    ///
    /// # Safety
    /// The kernel's contract. All lanes of the warp call it, and no other warp stores these
    /// results.
    #[inline(always)]
    pub(crate) unsafe fn store_reference<F: WeightFormat, D: Activations>(&self, row: u64, tokens: [u32; 2]) {
        let gated = self.results.epilogue.has(Epilogue::GATED);
        let [mut token, end] = if gated && row % 2 == 1 { [0; 2] } else { tokens };
        while token < end {
            // SAFETY: row and token exist, and with a gate the next row. One lane stores.
            unsafe {
                let (mut before, mut sum) = (0.0, 0.0);
                let mut i = 0;
                while i < if gated { 2 } else { 1 } {
                    let weights = self.weights.row::<F>(row + i, self.shape.blocks);
                    before = sum;
                    sum = reference::<F, D>(weights, self.token(token), self.shape.cols);
                    i += 1;
                }
                if warp::lane() == 0 {
                    self.store::<D>(row, token, if gated { before } else { sum }, || sum);
                }
            }
            token += 1;
        }
    }
}
