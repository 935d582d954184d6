//! The mainloop for compute capability 9.0. Some warps copy; warp groups decode weights and multiply them with all tokens at
//! once, each group while others decode.

use microscale_kernels_abi::gemm::{CODES_BYTES, Edition, FRONT_BYTES, GemmGrid, SCALES_BYTES};
use microscale_kernels_abi::launch::WARP;

use super::copies::{LaneRows, Source, decode, stage_bytes, usual_but_zeros};
use super::epilogue::Epilogue;
use super::scheduler::Shares;
use crate::product::copies::pin_in_register;
use crate::product::operand::Problem;
use crate::product::scheduler::warp_number;
use crate::product::tensor_cores::{Activations, Weights};
use crate::warp_group::{self, MultiplyTokens, Registers, core_matrices};
use crate::{mbarrier, ptx, warp};

/// Warps that multiply.
const MULTIPLIERS: u32 = Edition::Wgmma.multipliers();
/// Threads that multiply.
const MULTIPLYING: u32 = MULTIPLIERS * WARP;
/// Threads that copy.
const COPYING: u32 = Edition::Wgmma.copiers() * WARP;
/// Bytes of a stage's two barriers: one says that the stage is full, the other that it is empty.
const BARRIERS_BYTES: u32 = 16;

/// A place in the ring of stages, which all go around.
struct Place<const N: u32> {
    stage: u32,
    stages: u32,
    /// The parity of the round.
    parity: u32,
    /// The address of shared memory, where the barriers are.
    base: u32,
}

impl<const N: u32> Place<N> {
    /// The first stage in the first round.
    #[inline(always)]
    fn new(grid: &GemmGrid, base: u32) -> Self {
        Self { stage: 0, stages: grid.stages, parity: 0, base }
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
        self.base + FRONT_BYTES + self.stage * const { stage_bytes::<N>()[0] }
    }

    /// [`Self::empty`] of the stage before.
    #[inline(always)]
    fn empty_before(&self) -> u32 {
        let before = if self.stage == 0 { self.stages } else { self.stage } - 1;
        self.base + before * BARRIERS_BYTES + BARRIERS_BYTES / 2
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

/// Multiplies weights with activations.
///
/// # Safety
/// The contract of the kernels whose names have `wgmma`.
#[inline(always)]
pub(super) unsafe fn gemm<F: Weights, D, const N: u32, const SUMS: usize>(
    epilogue: &Epilogue<'_>,
    arranged: *const u8,
) where
    D: Activations + MultiplyTokens<SUMS>,
{
    let grid = epilogue.grid;
    let base = ptx::shared_address(warp::shared::<u128>().cast::<u8>());
    let number = warp_number();
    if warp::thread() == 0 {
        let mut i = 0;
        while i < grid.stages {
            let full = base + i * BARRIERS_BYTES;
            // SAFETY: the barriers are in front of the stages, and nobody uses them yet. Each thread that copies arrives with its
            // copies, and one more time for the activations.
            unsafe {
                mbarrier::init(full, COPYING + 1);
                mbarrier::init(full + BARRIERS_BYTES / 2, MULTIPLIERS);
            }
            i += 1;
        }
        mbarrier::fence_init();
    }
    warp::barrier();
    // With many sums, those that multiply take registers from those that copy.
    if number < MULTIPLIERS {
        if SUMS > 16 {
            warp_group::set_registers(Registers::Many);
        }
        // SAFETY: the caller's contract; whole warp groups are here.
        unsafe { multiply::<F, D, N, SUMS>(epilogue, base, number) };
    } else {
        if SUMS > 16 {
            warp_group::set_registers(Registers::Few);
        }
        // SAFETY: the caller's contract.
        unsafe { copy::<F, N>(epilogue.problem, arranged, grid, base) };
    }
}

/// Copies all that the thread block multiplies.
///
/// # Safety
/// The contract of the kernels; those warps call it that do not multiply.
#[inline(always)]
unsafe fn copy<F: Weights, const N: u32>(problem: &Problem, arranged: *const u8, grid: &GemmGrid, base: u32) {
    let activation_bytes = const { stage_bytes::<N>()[1] };
    let thread = warp::thread() - MULTIPLYING;
    let mut place = Place::<N>::new(grid, base);
    let mut shares = Shares::new(grid);
    while let Some(share) = shares.next() {
        let (row_tile, token_tile) = grid.token_tiles.divide_32(share.tile);
        let image = u64::from(token_tile) * grid.k_iterations.divisor + u64::from(share.start);
        let mut image = arranged.wrapping_add((image * u64::from(activation_bytes)) as usize);
        let mut weights = Source::<F, COPYING>::new(problem, row_tile, &share, thread);
        let mut left = share.end - share.start;
        while left > 0 {
            // In the first round nobody has to have done with the stage: the phase before the first counts as over.
            mbarrier::wait(place.empty(), place.parity ^ 1);
            let stage = place.address();
            // SAFETY: all warps have done with the stage; the image exists, and its bytes are a multiple of 16.
            unsafe {
                if thread == 0 {
                    mbarrier::arrive_expecting(place.full(), activation_bytes);
                    mbarrier::copy(stage + CODES_BYTES + SCALES_BYTES, image, activation_bytes, place.full());
                }
                weights.copy(stage);
                mbarrier::arrive_with_copies(place.full());
            }
            image = image.wrapping_add(activation_bytes as usize);
            place.advance();
            left -= 1;
        }
        shares.take(&share);
    }
}

/// Multiplies what the others copy. A warp has a tile of 16 rows, and a warp group four of them.
///
/// # Safety
/// The contract of the kernels; whole warp groups call it.
#[inline(always)]
unsafe fn multiply<F: Weights, D, const N: u32, const SUMS: usize>(
    epilogue: &Epilogue<'_>,
    base: u32,
    tile: u32,
) where
    D: Activations + MultiplyTokens<SUMS>,
{
    let (problem, grid) = (epilogue.problem, epilogue.grid);
    // With many sums no register is left for it.
    let table = if D::TABLE == 0 || SUMS > 32 { D::TABLE } else { pin_in_register(D::TABLE) };
    let mut place = Place::<N>::new(grid, base);
    let mut shares = Shares::new(grid);
    while let Some(share) = shares.next() {
        let mut rows = LaneRows::<F>::new(problem, tile, share.start);
        let mut sums = [0.0; SUMS];
        let mut far = 0;
        let mut left = share.end - share.start;
        let mut first = true;
        while left > 0 {
            // The same in all lanes, which a shuffle tells the assembler: descriptors are in uniform registers.
            let stage = warp::shuffle(place.address(), 0);
            mbarrier::wait(place.full(), place.parity);
            // Lanes may have seen the barrier one after the other.
            warp::sync();
            // SAFETY: the k-iteration is in the stage; the whole warp group is here.
            unsafe {
                let loaded = rows.load::<D>(stage);
                far = loaded.distance.max(far);
                let tokens = core_matrices::<N>(stage + CODES_BYTES + SCALES_BYTES);
                D::multiply_tokens(&mut sums, decode::<D, 0>(&loaded, table), tokens);
                // Now the last products of the stage before have been computed, too.
                done(place.empty_before(), !first);
                D::multiply_tokens(&mut sums, decode::<D, 1>(&loaded, table), tokens + 4 * N);
                D::multiply_tokens(&mut sums, decode::<D, 2>(&loaded, table), tokens + 8 * N);
                D::multiply_tokens(&mut sums, decode::<D, 3>(&loaded, table), tokens + 12 * N);
            }
            place.advance();
            first = false;
            left -= 1;
        }
        let share = shares.again();
        let (row_tile, _) = grid.token_tiles.divide_32(share.tile);
        // SAFETY: the whole warp group is here.
        unsafe {
            D::wait(&mut sums);
            done(place.empty_before(), true);
            let usual = far <= F::farthest::<D>() || usual_but_zeros::<F, D>(problem, row_tile, tile, &share);
            let usual = warp::ballot(usual) == u32::MAX;
            let barrier = || warp::barrier_of::<1, MULTIPLYING>();
            epilogue.finish::<F, D, SUMS, 1>(&share, tile, [sums], usual, barrier);
        }
        shares.take(&share);
    }
}

/// Says that the warp has done with a stage, given its barrier, if there is one.
///
/// # Safety
/// The warp has, and all its products with it have been computed. All lanes take part.
#[inline(always)]
unsafe fn done(barrier: u32, exists: bool) {
    // What other lanes have read comes before what the first one says.
    warp::sync();
    if exists && warp::lane() == 0 {
        // SAFETY: the barrier expects one arrival of each warp that multiplies.
        unsafe { mbarrier::arrive(barrier) };
    }
}
