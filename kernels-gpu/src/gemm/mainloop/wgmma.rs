//! The mainloop for compute capability 9.0. Some warps copy; warp groups decode weights and multiply them with all tokens at
//! once, each group while others decode.

use microscale_kernels_abi::gemm::stage::{
    FRONT_BYTES, MOST_STAGES, ScalePieces, Stage, WORD_OFFSET, multiplied_tokens,
};
use microscale_kernels_abi::gemm::{PACK_COLUMNS as COLUMNS, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::copies::{LaneRows, Source, decode, rows_of, stage_for, stage_of, usual_but_zeros};
use super::epilogue::{Output, Part};
use super::pairs;
use super::scheduler::{Share, Shares, Work};
use super::tasks::{Task, Tasks};
use crate::product::operand::Problem;
use crate::product::scheduler::warp_number;
use crate::product::tensor_cores::{Activations, Weights};
use crate::warp_group::{self, MultiplyFewer, MultiplyTokens, Registers, core_matrices};
use crate::{cluster, mbarrier, ptx, shared, warp};

/// Warps that multiply.
const fn multipliers<const N: u32>() -> u32 {
    rows_of::<N>() / TILE_ROWS
}

/// Threads that copy.
const COPYING: u32 = 4 * WARP;
/// Bytes of a stage's two barriers: one says that the stage is full, the other that it is empty.
const BARRIERS_BYTES: u32 = 16;

/// A place in the ring of stages, which all go around.
#[derive(Clone, Copy)]
struct Place {
    stage: u32,
    stages: u32,
    stage_bytes: u32,
    /// The parity of the round.
    parity: u32,
    /// The address of shared memory, where the barriers are.
    base: u32,
}

impl Place {
    /// The first stage in the first round, in shared memory of so many bytes.
    #[inline(always)]
    fn new(stage: &Stage, shared: u32, base: u32) -> Self {
        let (stages, stage_bytes) = (stage.count(shared), stage.bytes());
        Self { stage: 0, stages, stage_bytes, parity: 0, base }
    }

    /// The barrier on which copies arrive.
    #[inline(always)]
    fn full(&self) -> u32 {
        self.base + self.stage * BARRIERS_BYTES
    }

    /// The barrier on which warps arrive that have done with the stage.
    #[inline(always)]
    fn empty(&self) -> u32 {
        self.full() + BARRIERS_BYTES / 2
    }

    /// The address of the stage.
    #[inline(always)]
    fn address(&self) -> u32 {
        self.base + FRONT_BYTES + self.stage * self.stage_bytes
    }

    /// [`Self::empty`] of the stage before.
    #[inline(always)]
    fn empty_before(&self) -> u32 {
        let before = if self.stage == 0 { self.stages } else { self.stage } - 1;
        self.base + before * BARRIERS_BYTES + BARRIERS_BYTES / 2
    }

    /// Waits until the stage is full, and returns its address.
    #[inline(always)]
    fn wait(&self) -> u32 {
        mbarrier::wait(self.full(), self.parity);
        // Lanes may have seen the barrier one after the other.
        warp::sync();
        self.address()
    }

    /// The next place, if there is one; else this one.
    #[inline(always)]
    fn next_if(&self, there: bool) -> Self {
        let mut next = *self;
        if there {
            next.advance();
        }
        next
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.stage += 1;
        if self.stage == self.stages {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}

/// Multiplies weights with activations. `HALF` of a lane's sums are those of half of the tokens, or all where thread blocks are in no pairs.
///
/// The kernel in front arranges the activations, which are waited for. It has waited for all that is in front of it before it started this
/// one, so that weights and the plan of experts' rows are there.
///
/// # Safety
/// The contract of the kernels whose names have `wgmma`.
#[inline(always)]
pub(super) unsafe fn gemm<
    F: Weights,
    D,
    const N: u32,
    const SUMS: usize,
    const HALF: usize,
    const IMAGES: u32,
>(
    epilogue: &Output<'_>,
    arranged: *const u8,
) where
    D: Activations + MultiplyTokens<SUMS> + MultiplyFewer,
{
    let base = shared::address(warp::shared::<u128>().cast::<u8>());
    let number = warp_number();
    // In shared memory, so that the assembler knows nothing of it: it would copy a known one to a register wherever it is used.
    let table = warp::shared::<u32>().wrapping_add(WORD_OFFSET as usize / 4);
    // Two warps at once.
    if warp::thread() < MOST_STAGES {
        let full = base + warp::thread() * BARRIERS_BYTES;
        // SAFETY: the barriers are in front of the stages, and nobody uses them yet. Each thread that copies arrives with its
        // copies, and one more time for the activations.
        unsafe {
            mbarrier::init(full, COPYING + 1);
            mbarrier::init(full + BARRIERS_BYTES / 2, const { multipliers::<N>() });
        }
        mbarrier::fence_init();
    } else if number == 1 {
        // SAFETY: nobody uses the word yet.
        unsafe {
            if warp::lane() == 0 {
                *table = D::TABLE;
            }
            epilogue.work.write_plan(&epilogue.problem.routed, N);
        }
    }
    // With many sums, those that multiply take registers from those that copy.
    if number < const { multipliers::<N>() } {
        warp::barrier();
        if SUMS > 64 {
            warp_group::set_registers(Registers::Many);
        }
        // SAFETY: the caller's contract; whole warp groups are here.
        unsafe { multiply::<F, D, N, SUMS, HALF, IMAGES>(epilogue, base, number, *table) };
        return;
    }
    if SUMS > 64 {
        warp_group::set_registers(Registers::Few);
    }
    let Output { problem, work: Work { grid, .. }, .. } = *epilogue;
    // SAFETY: the caller's contract.
    unsafe {
        // Thread blocks in pairs never have experts' rows.
        if HALF < SUMS || problem.routed.plan.is_null() {
            // The first task is found before the barrier, behind which the plan in shared memory is.
            let most_tokens = grid.most_tokens(N);
            let work = Work { grid, schedule: &grid.schedule, most_tokens: &most_tokens };
            copy::<F, N, IMAGES>(&Output { work, ..*epilogue }, arranged, base, true);
        } else {
            warp::barrier();
            copy::<F, N, IMAGES>(epilogue, arranged, base, false);
        }
    }
}

/// Copies all that the thread block multiplies. `waits` says that the barrier of all threads is still to come, behind which those of
/// stages are there to arrive on.
///
/// # Safety
/// The contract of the kernels; those warps call it that do not multiply.
#[inline(always)]
unsafe fn copy<F: Weights, const N: u32, const IMAGES: u32>(
    epilogue: &Output<'_>,
    arranged: *const u8,
    base: u32,
    mut waits: bool,
) {
    let grid = epilogue.work.grid;
    let thread = warp::thread() - const { multipliers::<N>() * WARP };
    let of_stage = stage_for::<F, N, IMAGES>(epilogue.problem, *epilogue.work.most_tokens);
    let mut place = Place::new(&of_stage, grid.shared, base);
    let mut tasks = Tasks::new(base);
    let mut arranged_all = false;
    let mut shares = Shares::new(epilogue.work);
    while let Some(share) = shares.next() {
        let task = epilogue.task(share, N);
        let Task { row_tile, token_tile, .. } = task;
        let problem = epilogue.problem.of_expert::<F>(task.expert);
        let image = u64::from(token_tile) * grid.k_iterations.divisor + u64::from(share.start);
        let all_bytes = const { stage_of::<N, IMAGES>().activation_bytes() };
        let mut image = arranged.wrapping_add((image * u64::from(all_bytes)) as usize);
        // The first tokens are in front.
        let bytes = all_bytes / N * multiplied_tokens(N, task.end - task.first);
        let mut weights = Source::<F, N, IMAGES, COPYING>::new(&problem, &of_stage, row_tile, &share, thread);
        let k_iterations = share.end - share.start;
        let mut left = k_iterations;
        if waits {
            warp::barrier();
            waits = false;
        }
        while left > 0 {
            // In the first round nobody has to have done with the stage: the phase before the first counts as over.
            mbarrier::wait(place.empty(), place.parity ^ 1);
            // SAFETY: all warps have done with the stage.
            unsafe {
                weights.copy(place.address());
                mbarrier::arrive_with_copies(place.full());
            }
            if thread == 0 {
                if !arranged_all {
                    ptx::wait_for_kernel_in_front();
                    arranged_all = true;
                }
                // SAFETY: as above; the image exists, and its bytes are a multiple of 16.
                unsafe {
                    if left == k_iterations {
                        tasks.give(&task);
                    }
                    mbarrier::arrive_expecting(place.full(), bytes);
                    let to = place.address() + const { stage_of::<N, IMAGES>().codes_bytes() };
                    mbarrier::copy(to, image, bytes, place.full());
                }
                image = image.wrapping_add(all_bytes as usize);
            }
            place.advance();
            left -= 1;
        }
        tasks.advance();
        shares.take(&share);
    }
    if waits {
        warp::barrier();
    }
}

/// Multiplies what the others copy. A warp has a tile of 16 rows, and a warp group four of them.
///
/// # Safety
/// The contract of the kernels; whole warp groups call it.
#[inline(always)]
unsafe fn multiply<F: Weights, D, const N: u32, const SUMS: usize, const HALF: usize, const IMAGES: u32>(
    epilogue: &Output<'_>,
    base: u32,
    tile: u32,
    table: u32,
) where
    D: Activations + MultiplyTokens<SUMS> + MultiplyFewer,
{
    let problem = epilogue.problem;
    let of_stage = stage_for::<F, N, IMAGES>(problem, *epilogue.work.most_tokens);
    let mut place = Place::new(&of_stage, epilogue.work.grid.shared, base);
    let alike =
        (problem.shape.rows * problem.shape.blocks).is_multiple_of(u64::from(ScalePieces::MOST.bytes));
    if Shares::new(epilogue.work).next().is_none() {
        return;
    }
    let mut tasks = Tasks::new(base);
    loop {
        place.wait();
        // SAFETY: its first stage is full.
        let Task { share, expert, first, end, .. } = unsafe { tasks.next() };
        // Only if they begin elsewhere in their pieces than the first one's do the expert's own scales matter.
        let of_expert = problem.of_expert::<F>(if alike { 0 } else { expert });
        let mut rows = LaneRows::<F, N, IMAGES>::new(&of_expert, &of_stage, tile, share.start);
        let mut sums = [0.0; SUMS];
        let images = images_of::<IMAGES>(problem, &share);
        // SAFETY: the whole warp group is here, and in each case all of it: they have the same tokens.
        let (sums_of, rows, place) = (&mut sums, &mut rows, &mut place);
        let far = unsafe {
            let multiplied = multiplied_tokens(N, end - first);
            match warp::shuffle(multiplied, 0) {
                96 if has_fewer::<N>() => {
                    mainloop::<F, D, N, 48, SUMS, IMAGES>(sums_of, rows, place, images, table)
                }
                128 if has_fewer::<N>() => {
                    mainloop::<F, D, N, 64, SUMS, IMAGES>(sums_of, rows, place, images, table)
                }
                160 if has_fewer::<N>() => {
                    mainloop::<F, D, N, 80, SUMS, IMAGES>(sums_of, rows, place, images, table)
                }
                192 if has_fewer::<N>() => {
                    mainloop::<F, D, N, 96, SUMS, IMAGES>(sums_of, rows, place, images, table)
                }
                _ => mainloop::<F, D, N, SUMS, SUMS, IMAGES>(sums_of, rows, place, images, table),
            }
        };
        // SAFETY: the whole warp group is here. Nobody gives another task in this one's place before it has finished.
        unsafe {
            let task = tasks.next();
            let usual = far <= F::farthest::<D>() || {
                let problem = problem.of_expert::<F>(task.expert);
                usual_but_zeros::<F, D, N, IMAGES>(&problem, task.row_tile, tile, &task.share)
            };
            let usual = warp::ballot(usual) == u32::MAX;
            if HALF < SUMS {
                let (half, usual) = pairs::add_up::<SUMS, HALF>(base, tile, &sums, usual);
                let part = Part::half(cluster::rank());
                epilogue.finish::<F, D, SUMS, HALF, 1>(&task, tile, part, [half], usual);
                cluster::wait();
            } else {
                epilogue.finish::<F, D, SUMS, SUMS, 1>(&task, tile, Part::ALL, [sums], usual);
            }
            // Thread blocks in pairs have one task each.
            if HALF < SUMS || tasks.next_is_last() {
                return;
            }
        }
        tasks.advance();
    }
}

/// Images of a share that have columns: the last k-iteration may have one less.
#[inline(always)]
fn images_of<const IMAGES: u32>(problem: &Problem, share: &Share) -> u32 {
    let of_row = (problem.shape.cols as u32).div_ceil(COLUMNS);
    of_row.min(share.end * IMAGES) - share.start * IMAGES
}

/// Returns whether fewer tokens than a token tile has can be multiplied of it.
const fn has_fewer<const N: u32>() -> bool {
    multiplied_tokens(N, 1) < N
}

/// Adds all products of a share to the first `FIRST` of a lane's sums, those of as many tokens, and leaves the others. Returns the
/// largest [distance](Weights::distance) of the scales.
///
/// # Safety
/// The contract of the kernels; whole warp groups call it.
#[inline(always)]
unsafe fn mainloop<F: Weights, D, const N: u32, const FIRST: usize, const SUMS: usize, const IMAGES: u32>(
    sums: &mut [f32; SUMS],
    rows: &mut LaneRows<F, N, IMAGES>,
    place: &mut Place,
    images: u32,
    table: u32,
) -> u32
where
    D: Activations + MultiplyTokens<FIRST>,
{
    let Some(sums) = sums.first_chunk_mut::<FIRST>() else { return 0 };
    let mut far = 0;
    let mut left = images;
    let mut first = true;
    let mut stage = place.wait();
    // SAFETY: the k-iteration is in the stage.
    let [mut loaded] = unsafe { rows.load::<D, 1>(stage, 0) };
    while left > 0 {
        // The same in all lanes, which a shuffle tells the assembler: descriptors are in uniform registers.
        let at = warp::shuffle(stage, 0) + const { stage_of::<N, IMAGES>().codes_bytes() };
        let mut tokens = core_matrices(at);
        for image in 0..IMAGES {
            let now = loaded;
            let factors = now.factors::<F, D>();
            far = now.distance::<F, D>().max(far);
            // SAFETY: the k-iteration is in the stage; the whole warp group is here.
            unsafe {
                D::multiply_tokens(sums, decode::<D, 0>(&now, &factors, table), tokens);
                if image == 0 {
                    // Now the last products of the stage before have been computed, too.
                    done(place.empty_before(), !first);
                }
                D::multiply_tokens(sums, decode::<D, 1>(&now, &factors, table), tokens + 32);
                // The next image's weights are loaded while this one's are decoded. Behind the last one, its own are again.
                if image + 1 < IMAGES {
                    [loaded] = rows.load::<D, 1>(stage, image + 1);
                } else {
                    stage = place.next_if(left > 1).wait();
                    [loaded] = rows.load::<D, 1>(stage, 0);
                }
                D::multiply_tokens(sums, decode::<D, 2>(&now, &factors, table), tokens + 64);
                D::multiply_tokens(sums, decode::<D, 3>(&now, &factors, table), tokens + 96);
            }
            tokens += const { N * COLUMNS * 2 / 16 };
            left -= 1;
            if left == 0 {
                break;
            }
        }
        place.advance();
        first = false;
    }
    // SAFETY: the whole warp group is here.
    unsafe {
        D::wait(sums);
        done(place.empty_before(), true);
    }
    far
}

/// Says that the warp has done with a stage, given its barrier, if there is one.
///
/// # Safety
/// The warp has, and all its products with it have been computed. All lanes take part.
#[inline(always)]
unsafe fn done(barrier: u32, exists: bool) {
    // Other lanes' reads come before the first one's arrival.
    warp::sync();
    if exists && warp::lane() == 0 {
        // SAFETY: the barrier expects one arrival of each warp that multiplies.
        unsafe { mbarrier::arrive(barrier) };
    }
}
