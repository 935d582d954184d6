//! The mainloop for every GPU. Each warp has two tiles of 16 rows; all copy the next k-iterations while they multiply one.

use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::stage::FRONT_BYTES;

use super::copies::{LaneRows, Source, decode, stage_for, stage_of, usual_but_zeros};
use super::epilogue::{Output, Part};
use super::scheduler::{Shares, Work};
use super::tasks::Task;
use crate::product::copies::pin_in_register;
use crate::product::scheduler::warp_number;
use crate::product::tensor_cores::{Activations, Weights};
use crate::{shared, warp};

/// Threads of a thread block.
const THREADS: u32 = 256;
/// Tiles of a warp.
const TILES: usize = 2;

/// The part that a thread copies.
struct Copies<F, const N: u32> {
    weights: Source<F, N, 1, THREADS>,
    /// The thread's first 16 bytes of the next k-iteration's activations.
    activations: *const u8,
    /// K-iterations that are left.
    left: u32,
    /// The stage for the next one, the one behind the last, and the bytes of one.
    stage: u32,
    stages: u32,
    stage_bytes: u32,
    /// The address of the first stage.
    ring: u32,
}

impl<F: Weights, const N: u32> Copies<F, N> {
    /// Starts to copy the next k-iteration, if there is one. Each call makes a group of copies.
    ///
    /// # Safety
    /// The contract of the kernels; nobody reads or writes the next stage.
    #[inline(always)]
    unsafe fn next(&mut self) {
        let activation_bytes = const { stage_of::<N, 1>().activation_bytes() };
        if self.left > 0 {
            let stage = self.ring + self.stage * self.stage_bytes;
            // SAFETY: the caller's promise.
            unsafe {
                self.weights.copy(stage);
                for i in 0..activation_bytes / (THREADS * 16) {
                    let to = stage
                        + const { stage_of::<N, 1>().codes_bytes() }
                        + (i * THREADS + warp::thread()) * 16;
                    shared::copy_16_once(to, self.activations.wrapping_add((i * THREADS * 16) as usize), 16);
                }
            }
            self.activations = self.activations.wrapping_add(activation_bytes as usize);
            self.left -= 1;
            self.stage = following(self.stage, self.stages);
        }
        shared::commit_copies();
    }
}

/// The stage behind one.
#[inline(always)]
fn following(stage: u32, stages: u32) -> u32 {
    if stage + 1 == stages { 0 } else { stage + 1 }
}

/// Waits for the oldest of the lane's groups of copies, of which there is one less than stages.
#[inline(always)]
fn wait_for_oldest(stages: u32) {
    match stages {
        2 => shared::wait_for_copies::<0>(),
        3 => shared::wait_for_copies::<1>(),
        4 => shared::wait_for_copies::<2>(),
        5 => shared::wait_for_copies::<3>(),
        6 => shared::wait_for_copies::<4>(),
        7 => shared::wait_for_copies::<5>(),
        _ => shared::wait_for_copies::<6>(),
    }
}

/// Multiplies weights with activations.
///
/// # Safety
/// The contract of the kernels whose names have `mma`.
#[inline(always)]
pub(super) unsafe fn gemm<F: Weights, D: Activations, const N: u32, const SUMS: usize>(
    epilogue: &Output<'_>,
    arranged: *const u8,
) {
    let (problem, Work { grid, .. }) = (epilogue.problem, epilogue.work);
    let of_stage = stage_for::<F, N, 1>(problem, N);
    let [stage_bytes, activation_bytes] = [of_stage.bytes(), of_stage.activation_bytes()];
    if warp_number() == 0 {
        // SAFETY: the caller's contract.
        unsafe { epilogue.work.write_plan(&problem.routed, N) };
    }
    warp::barrier();
    let ring = shared::address(warp::shared::<u128>().cast::<u8>()) + FRONT_BYTES;
    let first_tile = warp_number() * TILES as u32;
    let stages = of_stage.count(grid.shared);
    let table = if D::TABLE == 0 { 0 } else { pin_in_register(D::TABLE) };
    let of_lane = of_stage.codes_bytes() + warp::lane() * 16;
    let mut shares = Shares::new(epilogue.work);
    while let Some(share) = shares.next() {
        let Task { row_tile, token_tile, expert, .. } = epilogue.task(share, N);
        let problem = problem.of_expert::<F>(expert);
        let image = u64::from(token_tile) * grid.k_iterations.divisor + u64::from(share.start);
        let image = image * u64::from(activation_bytes) + u64::from(warp::thread() * 16);
        let mut copies = Copies::<F, N> {
            weights: Source::new(&problem, &of_stage, row_tile, &share, warp::thread()),
            activations: arranged.wrapping_add(image as usize),
            left: share.end - share.start,
            stage: 0,
            stages,
            stage_bytes,
            ring,
        };
        // All warps have done with the stages of the share before.
        warp::barrier();
        let mut i = 1;
        while i < stages {
            // SAFETY: nobody uses the ring.
            unsafe { copies.next() };
            i += 1;
        }
        let mut rows = LaneRows::<F, N, 1>::new(&problem, &of_stage, first_tile, share.start);
        let mut sums = [[0.0; SUMS]; TILES];
        let mut far = 0;
        let (mut left, mut stage) = (share.end - share.start, 0);
        while left > 0 {
            wait_for_oldest(stages);
            // Now all lanes' copies have arrived, and nobody reads the stage any more that is filled next.
            warp::barrier();
            let at = ring + stage * stage_bytes;
            // SAFETY: the stage that is filled is that of the k-iteration before; this one's has arrived.
            unsafe {
                copies.next();
                let loaded = rows.load::<D, TILES>(at, 0);
                let factors = [loaded[0].factors::<F, D>(), loaded[1].factors::<F, D>()];
                far = loaded[0].distance::<F, D>().max(loaded[1].distance::<F, D>()).max(far);
                // Written out: the compiler keeps a loop's indices in memory.
                let weights = [
                    decode::<D, 0>(&loaded[0], &factors[0], table),
                    decode::<D, 0>(&loaded[1], &factors[1], table),
                ];
                multiply::<D, SUMS>(&mut sums, &weights, at + of_lane);
                let weights = [
                    decode::<D, 1>(&loaded[0], &factors[0], table),
                    decode::<D, 1>(&loaded[1], &factors[1], table),
                ];
                multiply::<D, SUMS>(&mut sums, &weights, at + of_lane + N * QUAD * 16);
                let weights = [
                    decode::<D, 2>(&loaded[0], &factors[0], table),
                    decode::<D, 2>(&loaded[1], &factors[1], table),
                ];
                multiply::<D, SUMS>(&mut sums, &weights, at + of_lane + 2 * N * QUAD * 16);
                let weights = [
                    decode::<D, 3>(&loaded[0], &factors[0], table),
                    decode::<D, 3>(&loaded[1], &factors[1], table),
                ];
                multiply::<D, SUMS>(&mut sums, &weights, at + of_lane + 3 * N * QUAD * 16);
            }
            stage = following(stage, stages);
            left -= 1;
        }
        shared::wait_for_copies::<0>();
        let share = shares.again();
        // SAFETY: the caller's contract; all warps are here.
        unsafe {
            let usual = |tile| usual_but_zeros::<F, D, N, 1>(&problem, row_tile, tile, &share);
            let usual = far <= F::farthest::<D>() || usual(first_tile) && usual(first_tile + 1);
            let usual = warp::ballot(usual) == u32::MAX;
            let task = epilogue.task(share, N);
            epilogue.finish::<F, D, SUMS, SUMS, TILES>(&task, first_tile, Part::ALL, sums, usual);
        }
        shares.take(&share);
    }
}

/// Adds the products of a word of codes of each row with all tokens, whose activations for the first eight are at an address.
///
/// # Safety
/// They are in shared memory; all lanes take part.
#[inline(always)]
unsafe fn multiply<D: Activations, const SUMS: usize>(
    sums: &mut [[f32; SUMS]; TILES],
    weights: &[[[u32; 4]; 2]; TILES],
    activations: u32,
) {
    for eight in 0..SUMS / 4 {
        // SAFETY: the caller's promise.
        let x = unsafe { shared::load_16(activations + eight as u32 * (8 * QUAD * 16)) };
        for tile in 0..TILES {
            let of_tile = &mut sums[tile];
            let mut four = [0, 1, 2, 3].map(|i| of_tile[4 * eight + i]);
            four = D::multiply(weights[tile][0], [x[0], x[1]], four);
            four = D::multiply(weights[tile][1], [x[2], x[3]], four);
            for i in 0..4 {
                of_tile[4 * eight + i] = four[i];
            }
        }
    }
}
