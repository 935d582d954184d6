//! Where a product's results go, and what is done with sums before: bias, gate, residual, rounding.

use microscale_formats::dot;
use microscale_formats::Dtype as OutputDtype;
use microscale_kernels_abi::Epilogue;

use crate::arithmetic::Ptx;
use crate::dtype::{Bf16, Dtype, F16};
use crate::ptx;

/// The results of a product, and the operands of its epilogue.
#[derive(Clone, Copy)]
pub(crate) struct Results {
    pub(crate) out: *mut u8,
    /// A value a row of weights, or of an expert's.
    pub(crate) bias: *const u8,
    /// A value a result, in its place.
    pub(crate) residual: *const u8,
    pub(crate) epilogue: Epilogue,
}

impl Results {
    /// Stores the sum of a row, of so many, in the row of results `place`. The activations' dtype is given, and, for a gate, the sum of
    /// the row behind; the gate's results are stored for even rows alone.
    ///
    /// # Safety
    /// The contract of the kernels; nobody else stores this result.
    #[inline(always)]
    pub(crate) unsafe fn store(
        &self,
        dtype: OutputDtype,
        [place, row, rows]: [u64; 3],
        sum: f64,
        next: impl FnOnce() -> f64,
    ) {
        let epilogue = &self.epilogue;
        if epilogue.steps == 0 {
            // SAFETY: the caller's promise.
            return unsafe { store(self.out, place * rows + row, sum, dtype) };
        }
        let gated = epilogue.has(Epilogue::GATED);
        if gated && row % 2 == 1 {
            return;
        }
        // SAFETY: there is a value for each row, and a residual for each result.
        unsafe {
            let mut sum = sum + self.bias_of(dtype, row);
            let mut at = row;
            if gated {
                let up = next() + self.bias_of(dtype, row + 1);
                sum = f64::from(epilogue.gate.of::<Ptx>(sum as f32, up as f32));
                at = row / 2;
            }
            let dtype = if epilogue.has(Epilogue::F32_RESULTS) { OutputDtype::F32 } else { dtype };
            let index = place * epilogue.results(rows) + at;
            if epilogue.has(Epilogue::RESIDUAL) {
                sum += f64::from(load(self.residual, index, dtype));
            }
            store(self.out, index, sum, dtype);
        }
    }

    /// The bias of a row, 0 if there is none.
    ///
    /// # Safety
    /// As for [`Self::store`]; the row exists.
    #[inline(always)]
    unsafe fn bias_of(&self, dtype: OutputDtype, row: u64) -> f64 {
        // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise.
    unsafe {
        let half = || u32::from(*from.cast::<u16>().wrapping_add(index));
        match dtype {
            OutputDtype::F32 => *from.cast::<f32>().wrapping_add(index),
            OutputDtype::F16 => ptx::f16_low_to_f32(half()),
            OutputDtype::Bf16 => f32::from_bits(half() << 16),
        }
    }
}

/// Stores a result, rounded once; NaN is the canonical one.
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
