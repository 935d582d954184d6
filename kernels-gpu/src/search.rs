//! Quantization with searched block scales (`microscale_formats::search`): a lane sixteen elements,
//! a block of NVFP4 or half of one of the MX formats.
//!
//! Each lane goes through the scales that its block may take; the warp goes on until the last is
//! done. A candidate costs two shuffles, and each of its elements six instructions. A warp with a
//! block that is not usual does its blocks over again, one after another, each by the whole warp:
//! slowly, but without a register's cost to the others.

mod lane;
mod of_warp;
mod options;
mod report;
mod usual;

use core::hint::cold_path;
use core::marker::PhantomData;

use microscale_formats::E2m1;
use microscale_kernels_abi::launch::{THREADS, WARP};
use microscale_kernels_abi::{
    BlockGrid, GlobalSlot, MxOptions, NvOptions, REPORT_SLOTS, ReportSlot, ScaleGrid,
};

use self::lane::{chunks, lanes};
use self::of_warp::of_warp;
use self::options::SearchOptions;
use self::report::{Counts, add_to_report};
use self::usual::{Share, usual};
use crate::access::{self, Target};
use crate::dtype::{Bf16, Dtype, F16, F32};
use crate::format::{EVEN, Mx, Nv, OTHER, Searched};
use crate::hardware::{ptx, warp};

/// Quantizes a warp's blocks.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn quantize<D: Dtype, F: Searched>(
    format: &F,
    values: *const u8,
    target: Target,
    report: *mut ReportSlot,
    grid: BlockGrid,
    options: SearchOptions,
) {
    let warp_number = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    // SAFETY: slots are REPORT_SLOTS in number.
    let report = unsafe { report.add(warp_number as usize % REPORT_SLOTS) };
    let at_once = const { WARP / lanes::<F>() };
    let vector = (values.addr() as u64 | grid.row_stride * u64::from(D::BYTES)).is_multiple_of(16);
    let first = u64::from(warp_number) * u64::from(at_once);
    if first >= grid.blocks {
        return; // The whole warp.
    }
    let share = Share::<F> {
        grid: &grid,
        block: first + u64::from(warp::lane() / const { lanes::<F>() }),
        format: PhantomData,
    };
    // SAFETY: the same contract; all lanes are here.
    let done = unsafe {
        let count = const { chunks::<D>() };
        let chunks =
            access::load_of_block::<D, F>(values, &grid, vector, share.block, share.first_element(), count);
        usual::<D, F>(format, chunks, &share, target, report, &options)
    };
    if !done {
        cold_path();
        let mut counts = Counts::default();
        // A number that the compiler does not know, lest it unroll the loop.
        for block in first..grid.blocks.min(first + u64::from(ptx::opaque(at_once))) {
            // SAFETY: the same contract; the block exists.
            unsafe {
                of_warp::<D, F>(format, values, target, report, &grid, block, &options, &mut counts);
            }
        }
        if warp::lane() == 0 {
            // SAFETY: `report` points to a report slot, by the contract.
            unsafe { add_to_report(&counts, report) };
        }
    }
}

/// The MX formats' entry points: `name<dtype, ties>`.
macro_rules! mx_entries {
    ($($name:ident<$dtype:ty, $ties:ident>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, searching scales, and
        /// adding to the report.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which is aligned to its dtype and which nothing
        /// writes meanwhile; `codes` (aligned to 8) has room for `grid.blocks` blocks, and `scales`
        /// for their bytes where `scale_grid` puts them; `report` points to `REPORT_SLOTS` slots;
        /// `importance` is null, or there is a weight for each of the grid's columns. All in global
        /// memory, and none overlap. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            report: *mut ReportSlot,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            options: MxOptions,
            importance: *const f32,
            search: u32,
        ) {
            let format = Mx::<E2m1, $ties>::new(options);
            let target = Target { codes, scales, scale_grid };
            // SAFETY: the same contract.
            unsafe { quantize::<$dtype, _>(&format, values, target, report, grid, SearchOptions { importance, search }) }
        }
    )+};
}

mx_entries! {
    mxfp4_search_f32_even<F32, EVEN>
    mxfp4_search_f16_even<F16, EVEN>
    mxfp4_search_bf16_even<Bf16, EVEN>
    mxfp4_search_f32_other_ties<F32, OTHER>
    mxfp4_search_f16_other_ties<F16, OTHER>
    mxfp4_search_bf16_other_ties<Bf16, OTHER>
}

/// NVFP4's entry points: `name<dtype, plan from the slot>`.
macro_rules! nv_entries {
    ($($name:ident<$dtype:ty, $from_slot:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, searching scales, and
        /// adds to the report. The global scale comes from the plan in the options. The `planned`
        /// variants take the plan in the slot at `global`, and write the scale there.
        ///
        /// # Safety
        /// As for the MX formats; `global` points to a slot in global memory, whose scale only this
        /// kernel writes and whose other fields nothing writes meanwhile.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            global: *mut GlobalSlot,
            report: *mut ReportSlot,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            options: NvOptions,
            importance: *const f32,
            search: u32,
        ) {
            let target = Target { codes, scales, scale_grid };
            // SAFETY: nothing writes the plan during the kernel, and one thread the scale; the rest
            // is the same contract.
            unsafe {
                let plan = if $from_slot { (*global).plan } else { options.plan };
                if warp::thread_block() == 0 && warp::thread() == 0 {
                    (*global).scale = plan.global_scale;
                }
                let format = Nv::new(plan, options.saturate_non_finite);
                quantize::<$dtype, _>(&format, values, target, report, grid, SearchOptions { importance, search });
            }
        }
    )+};
}

nv_entries! {
    nvfp4_search_f32_given<F32, false>
    nvfp4_search_f16_given<F16, false>
    nvfp4_search_bf16_given<Bf16, false>
    nvfp4_search_f32_planned<F32, true>
    nvfp4_search_f16_planned<F16, true>
    nvfp4_search_bf16_planned<Bf16, true>
}
