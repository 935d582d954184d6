//! The kernels that run before products with experts' weights: they sort pairs of a token and an
//! expert, and plan token tiles.

use microscale_kernels_abi::experts::{ExpertTile, Plan, PlanGrid, RouteGrid, Sorted};
use microscale_kernels_abi::gemm::schedule::Schedule;
use microscale_kernels_abi::launch::{THREADS, WARP};

#[cfg(microscale_sm90)]
use crate::hardware::ptx;
use crate::hardware::warp;

/// Sorts pairs of a token and an expert by expert: one warp per expert.
///
/// # Safety
/// All pointers are to global memory, aligned, and do not overlap. Only this kernel uses them.
/// `chosen` has the expert of each of `grid`'s pairs; pairs with another number are left out.
/// `ends` has room for an end per expert, `tokens` and `pairs` for a number per pair, and `sorted`
/// for one value. The launch has the shape that the ABI gives.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn route_to_experts(
    chosen: *const u32,
    ends: *mut u32,
    tokens: *mut u32,
    pairs: *mut u32,
    sorted: *mut Sorted,
    grid: RouteGrid,
) {
    let expert = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    if expert >= grid.experts {
        return;
    }
    let lane = warp::lane();
    // SAFETY: the pair exists.
    let of_pair =
        |pair: u32| if pair < grid.pairs { unsafe { *chosen.wrapping_add(pair as usize) } } else { u32::MAX };
    let (mut place, mut own) = (0, 0);
    let mut first = 0;
    while first < grid.pairs {
        let of_lane = of_pair(first + lane);
        place += warp::ballot(of_lane < expert).count_ones();
        own += warp::ballot(of_lane == expert).count_ones();
        first += WARP;
    }
    if lane == 0 {
        // SAFETY: the expert exists, and this warp writes its end. The first expert's warp writes
        // `sorted`.
        unsafe {
            *ends.wrapping_add(expert as usize) = place + own;
            if expert == 0 {
                *sorted = Sorted { pairs: grid.pairs, top_k: grid.top_k.divisor as u32 };
            }
        }
    }
    first = 0;
    while first < grid.pairs && own > 0 {
        let pair = first + lane;
        let is_own = of_pair(pair) == expert;
        let owns = warp::ballot(is_own);
        if is_own {
            let to = (place + (owns & ((1 << lane) - 1)).count_ones()) as usize;
            // SAFETY: each pair has a place, as there are no more before it than pairs.
            unsafe {
                *tokens.wrapping_add(to) = grid.top_k.divide_32(pair).0;
                *pairs.wrapping_add(to) = pair;
            }
        }
        place += owns.count_ones();
        first += WARP;
    }
}

/// Cuts experts' rows into token tiles, and schedules their work tiles: one warp.
///
/// # Safety
/// All pointers are to global memory, aligned. Only this kernel uses them. If `sorted` equals
/// `grid.sorted`, `ends` has the end of the sorted rows of each of `grid`'s experts, in ascending
/// order. Otherwise any values. `plan` has room for [`Plan::bytes`]. The launch has the shape that
/// the ABI gives.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn plan_experts(
    ends: *const u32,
    sorted: *const Sorted,
    plan: *mut Plan,
    grid: PlanGrid,
) {
    #[cfg(microscale_sm90)]
    {
        ptx::wait_for_previous_kernel();
        ptx::start_next_kernel();
    }
    let lane = warp::lane();
    let first = lane * grid.of_lane;
    // SAFETY: `sorted` points to a value.
    let sorted = unsafe { *sorted } == grid.sorted;
    let behind = grid.experts.min(first + grid.of_lane);
    // The rows of an expert start at the end of the previous expert's.
    let end_of = |expert: u32| {
        // SAFETY: the expert exists.
        if expert == 0 { 0 } else { unsafe { *ends.wrapping_add(expert as usize - 1) * grid.of_pair } }
    };
    let tile_rows = grid.tile_rows.divisor;
    let mut of_lane = 0;
    let mut expert = first;
    while expert < behind {
        // Both ends are loaded before `sorted` is known.
        let rows = end_of(expert + 1).wrapping_sub(end_of(expert));
        let rows = if sorted { rows } else { 0 };
        of_lane += grid.tile_rows.divide(rows + tile_rows - 1).0;
        expert += 1;
    }
    // The tiles of all lanes up to this one.
    let mut up_to = of_lane;
    let mut apart = 1;
    while apart < WARP {
        let before = warp::shuffle(up_to, lane.wrapping_sub(apart) % WARP);
        up_to += if lane >= apart { before } else { 0 };
        apart *= 2;
    }
    let all = warp::shuffle(up_to, WARP - 1);
    let tiles = plan.wrapping_add(1).cast::<ExpertTile>();
    let mut place = up_to - of_lane;
    let mut expert = first;
    while sorted && expert < behind {
        let (mut first, end) = (end_of(expert), end_of(expert + 1));
        while first < end {
            let behind = end.min(first + tile_rows);
            // SAFETY: `plan` has room for all token tiles, and this one is the lane's.
            unsafe {
                *tiles.wrapping_add(place as usize) = ExpertTile { expert, first, end: behind, padding: 0 }
            };
            (first, place) = (behind, place + 1);
        }
        expert += 1;
    }
    let mut empty = all + lane;
    while empty < grid.most_tiles {
        // SAFETY: `plan` has room for `most_tiles` token tiles, and this one is the lane's.
        unsafe {
            *tiles.wrapping_add(empty as usize) = ExpertTile { expert: 0, first: 0, end: 0, padding: 0 }
        };
        empty += WARP;
    }
    if lane == 0 {
        let schedule = Schedule::of_experts(grid.row_tiles, all, grid.k_iterations, grid.at_once);
        // SAFETY: the plan's head, which is this lane's.
        unsafe { *plan = Plan { schedule, tiles: all } };
    }
}
