//! What the two sides of a kernel launch agree on, in one place: the PTX targets, the kernels' names and launch shapes,
//! and the structures passed to them. Plain data, `no_std`: the kernels, the launcher in the host crate
//! and the build tool all read it from here.
#![no_std]

mod args;
mod kernels;
mod products;
mod shortcut;
mod targets;

pub use args::{
    ApplyGlobal, BlockGrid, Divider, ErrorSums, GlobalSlot, NO_POSITION, NV_FAR, NvPlan, NvQuantizeOptions,
    NvStep, QuantizeOptions, REPORT_SLOTS, ReportSlot, ScaleGrid, power_of_two,
};
pub use kernels::{
    AHEAD_WARPS, AMAX_PIECES, Ahead, Converts, DEQUANTIZE_CHUNKS, ERROR_LANES, ERROR_PART, Kernel,
    LADDER_THREADS, QUAD, ROW_PLACES, SEARCH_EACH, THREADS, TOKEN_PLACES, WARP, WARP_ELEMENTS,
    WEIGHTS_THREADS, kernels,
};
pub use products::{
    AHEAD_COLUMN_LIMIT, BLOCK_LIMIT, GemvGrid, OutputDtype, TOKEN_LIMIT, TurnsGrid, WeightsGrid, WeightsShape,
};
pub use shortcut::{NV_MANTISSAS, NvShortcut, nv_factor};
pub use targets::{TARGETS, Target, target_for};
