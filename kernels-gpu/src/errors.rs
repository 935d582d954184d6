//! The errors of quantizing: sums over pairs of original and decoded values, for the library's
//! error measures.
//!
//! Sums have the library's order (`host/src/loss/`) and bits: eight running sums per part of a row,
//! then their sum in order. A warp has four parts of eight lanes.

use microscale_formats::errors::{ERROR_LANES, ERROR_PART, ErrorSums};
use microscale_kernels_abi::BlockGrid;
use microscale_kernels_abi::launch::{THREADS, WARP};

use crate::dtype::{Bf16, Dtype, F16, F32};
use crate::hardware::warp;

/// A lane's running sums.
#[derive(Clone, Copy)]
struct Sums {
    signal: f64,
    noise: f64,
    approximation: f64,
    product: f64,
    max_abs: f64,
    non_finite: u32,
}

impl Sums {
    const NONE: Self =
        Self { signal: 0.0, noise: 0.0, approximation: 0.0, product: 0.0, max_abs: 0.0, non_finite: 0 };

    /// Adds a value and its decoded value.
    #[inline(always)]
    fn add(&mut self, value: f32, back: f32) {
        let finite = value.abs() < f32::INFINITY && back.abs() < f32::INFINITY;
        let (a, b) = if finite { (f64::from(value), f64::from(back)) } else { (0.0, 0.0) };
        let difference = a - b;
        self.non_finite += u32::from(!finite);
        self.signal += a * a;
        self.noise += difference * difference;
        self.approximation += b * b;
        self.product += a * b;
        self.max_abs = larger(self.max_abs, difference.abs());
    }

    /// The sums of the part's lanes, one after the other. All lanes of the warp call it.
    #[inline(always)]
    fn of_part(&self) -> Self {
        let first = warp::lane() / ERROR_LANES * ERROR_LANES;
        let mut total = Self::NONE;
        let mut lane = first;
        while lane < first + ERROR_LANES {
            total.signal += warp::shuffle_f64(self.signal, lane);
            total.noise += warp::shuffle_f64(self.noise, lane);
            total.approximation += warp::shuffle_f64(self.approximation, lane);
            total.product += warp::shuffle_f64(self.product, lane);
            total.max_abs = larger(total.max_abs, warp::shuffle_f64(self.max_abs, lane));
            total.non_finite += warp::shuffle(self.non_finite, lane);
            lane += 1;
        }
        total
    }
}

/// The larger of two numbers that are not negative.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if b > a { b } else { a }
}

/// A value of a matrix.
///
/// # Safety
/// `values` points to more than `index` values in global memory, aligned to their dtype.
#[inline(always)]
pub(crate) unsafe fn value<D: Dtype>(values: *const u8, index: u64) -> f32 {
    // SAFETY: the value exists.
    let bits = unsafe {
        let address = values.add((index * u64::from(D::BYTES)) as usize);
        if D::BYTES == 4 { *address.cast::<u32>() } else { u32::from(*address.cast::<u16>()) }
    };
    D::widen(&[bits, 0, 0, 0], 0)
}

/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn errors<D: Dtype>(values: *const u8, back: *const f32, sums: *mut ErrorSums, grid: BlockGrid) {
    const PARTS_A_BLOCK: u32 = THREADS / ERROR_LANES;
    const PARTS_A_WARP: u32 = WARP / ERROR_LANES;
    let first = u64::from(warp::thread_block()) * u64::from(PARTS_A_BLOCK)
        + u64::from(warp::thread() / WARP * PARTS_A_WARP);
    if first >= grid.blocks {
        return; // The whole warp returns, as it shuffles below.
    }
    let part = first + u64::from(warp::lane() / ERROR_LANES);
    let (row, number) = grid.row_blocks.divide(part);
    let start = number * u64::from(ERROR_PART);
    let exists = part < grid.blocks;
    let elements = if exists { (grid.cols - start).min(u64::from(ERROR_PART)) as u32 } else { 0 };
    let (here, there) = (row * grid.row_stride + start, row * grid.cols + start);
    let mut of_lane = Sums::NONE;
    let mut element = warp::lane() % ERROR_LANES;
    while element < elements {
        // SAFETY: the element exists, in both.
        let (value, back) = unsafe {
            (value::<D>(values, here + u64::from(element)), *back.add((there + u64::from(element)) as usize))
        };
        of_lane.add(value, back);
        element += ERROR_LANES;
    }
    let total = of_lane.of_part();
    if exists && warp::lane() % ERROR_LANES == 0 {
        let total = ErrorSums {
            signal: total.signal,
            noise: total.noise,
            approximation: total.approximation,
            product: total.product,
            max_abs: total.max_abs,
            non_finite: u64::from(total.non_finite),
        };
        // SAFETY: there is room for every part, and each is stored by one lane.
        unsafe { *sums.add(part as usize) = total };
    }
}

/// The entry points: `name<dtype>`.
macro_rules! entries {
    ($($name:ident<$dtype:ty>)+) => {$(
        /// Sums the differences between `back` and `values`, for each part of each row.
        ///
        /// # Safety
        /// `grid`, made for blocks of [`ERROR_PART`] and row by row, describes the matrix at
        /// `values`, which is aligned to its dtype; `back` holds its rows without gaps between
        /// them; `sums` has room for `grid.blocks`. All in global memory, none overlap, and nothing
        /// writes the first two meanwhile. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            back: *const f32,
            sums: *mut ErrorSums,
            grid: BlockGrid,
        ) {
            // SAFETY: the same contract.
            unsafe { errors::<$dtype>(values, back, sums, grid) }
        }
    )+};
}

entries! {
    errors_f32<F32>
    errors_f16<F16>
    errors_bf16<Bf16>
}
