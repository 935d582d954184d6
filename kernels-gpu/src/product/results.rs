//! Results of products: global scale, bias, gate, residual, rounding and storing, result by result.

use microscale_formats::Dtype as OutputDtype;
use microscale_formats::dot;
use microscale_kernels_abi::Epilogue;

use crate::arithmetic::Ptx;
use crate::dtype::{Bf16, Dtype, F16};
use crate::hardware::ptx;

/// The results of a product, and the operands of its epilogue.
#[derive(Clone, Copy)]
pub(crate) struct Results {
    pub(crate) out: *mut u8,
    /// A value per row of the weights, and per expert.
    pub(crate) bias: *const u8,
    /// A value per result, laid out as `out`.
    pub(crate) residual: *const u8,
    pub(crate) epilogue: Epilogue,
}

impl Results {
    /// Stores the sum of row `row` of `rows` in row `result_row` of the results. `multiplied` is
    /// the dtype that the kernel multiplies in. With a gate, `next` computes the sum of the next
    /// row, and odd rows store nothing.
    ///
    /// # Safety
    /// The kernel's contract. Row and token exist, and no other thread stores this result.
    #[inline(always)]
    pub(crate) unsafe fn store(
        &self,
        multiplied: OutputDtype,
        [result_row, row, rows]: [u64; 3],
        sum: f64,
        next: impl FnOnce() -> f64,
    ) {
        let epilogue = &self.epilogue;
        if epilogue.steps == 0 {
            // SAFETY: the result exists, and no other thread stores it.
            return unsafe { store(self.out, result_row * rows + row, sum, multiplied) };
        }
        let gated = epilogue.has(Epilogue::GATED);
        if gated && row % 2 == 1 {
            return;
        }
        // SAFETY: `bias` has a value for each row, and `residual` for each result, which this
        // thread stores.
        unsafe {
            let bias_dtype = epilogue.bias_dtype(multiplied);
            let mut sum = sum + self.bias_of(bias_dtype, row);
            let mut at = row;
            if gated {
                let up = next() + self.bias_of(bias_dtype, row + 1);
                sum = f64::from(epilogue.gate.of::<Ptx>(sum as f32, up as f32));
                at = row / 2;
            }
            let dtype = epilogue.result_dtype(multiplied);
            let index = result_row * epilogue.results(rows) + at;
            if epilogue.has(Epilogue::RESIDUAL) {
                sum += f64::from(load(self.residual, index, dtype));
            }
            store(self.out, index, sum, dtype);
        }
    }

    /// The bias of a row; 0 without a bias.
    ///
    /// # Safety
    /// As for [`Self::store`].
    #[inline(always)]
    unsafe fn bias_of(&self, dtype: OutputDtype, row: u64) -> f64 {
        // SAFETY: `bias` has a value for each row.
        if self.epilogue.has(Epilogue::BIAS) {
            f64::from(unsafe { load(self.bias, row, dtype) })
        } else {
            0.0
        }
    }
}

/// Loads a value.
///
/// # Safety
/// `from` points to more than `index` readable elements of the dtype in global memory.
#[inline(always)]
pub(crate) unsafe fn load(from: *const u8, index: u64, dtype: OutputDtype) -> f32 {
    let index = index as usize;
    // SAFETY: the element exists.
    unsafe {
        let half = || u32::from(*from.cast::<u16>().wrapping_add(index));
        match dtype {
            OutputDtype::F32 => *from.cast::<f32>().wrapping_add(index),
            OutputDtype::F16 => ptx::f16_low_to_f32(half()),
            OutputDtype::Bf16 => f32::from_bits(half() << 16),
        }
    }
}

/// Stores a result, rounded once. NaN becomes the canonical NaN.
///
/// # Safety
/// `out` points to more than `index` elements of the dtype in global memory. No other thread uses
/// element `index`.
#[inline(always)]
pub(crate) unsafe fn store(out: *mut u8, index: u64, sum: f64, dtype: OutputDtype) {
    let index = index as usize;
    let odd = dot::rounded_to_odd(sum);
    // SAFETY: the element exists and is this thread's.
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
