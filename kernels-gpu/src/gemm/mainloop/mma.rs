//! The mainloop for every GPU. Each warp has two tiles of 16 rows. All warps copy the next
//! K-iterations while they multiply one.

use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::stage::FRONT_BYTES;

use crate::gemm::fragment::{FragmentLoader, out_of_range_is_zero};
use crate::gemm::params::{Launch, Params};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::{TileScheduler, WorkTile};
use crate::gemm::weight_loader::{WeightLoader, stage_for};
use crate::hardware::warp::pin_in_register;
use crate::hardware::{shared, warp};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Threads per thread block.
const THREADS: u32 = 256;
/// Tiles of 16 rows per warp.
const TILES: usize = 2;

/// A thread's copies of a work tile.
struct Copies<F, T> {
    weights: WeightLoader<F, T, THREADS>,
    /// The thread's first 16 bytes of the next K-iteration's activations, in global memory.
    activations: *const u8,
    /// K-iterations that are left.
    left: u32,
    /// The stage of the next K-iteration.
    stage: u32,
    /// Stages of the ring.
    stages: u32,
    stage_bytes: u32,
    /// The address of the first stage.
    ring: u32,
}

impl<F: WeightFormat, T: Tile> Copies<F, T> {
    /// Starts to copy the next K-iteration, if there is one. Each call commits a group of copies.
    ///
    /// # Safety
    /// The kernel's contract. No thread reads or writes the next stage.
    #[inline(always)]
    unsafe fn next(&mut self) {
        let activation_bytes = const { T::STAGE.activation_bytes() };
        if self.left > 0 {
            let stage = self.ring + self.stage * self.stage_bytes;
            // SAFETY: the stage is free, by the caller's promise. The packed activations have the
            // bytes of a full token tile for each K-iteration.
            unsafe {
                self.weights.copy(stage);
                for i in 0..activation_bytes / (THREADS * 16) {
                    let to = stage + const { T::STAGE.codes_bytes() } + (i * THREADS + warp::thread()) * 16;
                    shared::copy_16_once(to, self.activations.wrapping_add((i * THREADS * 16) as usize), 16);
                }
            }
            self.activations = self.activations.wrapping_add(activation_bytes as usize);
            self.left -= 1;
            self.stage = next_stage(self.stage, self.stages);
        }
        shared::commit_copies();
    }
}

/// The stage after `stage` in the ring.
#[inline(always)]
fn next_stage(stage: u32, stages: u32) -> u32 {
    if stage + 1 == stages { 0 } else { stage + 1 }
}

/// Waits for the oldest of the lane's `stages - 1` groups of copies.
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

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: WeightFormat, D: Activations, T: Tile>(params: &Params<'_>) {
    const {
        assert!(T::CONFIG.threads() == THREADS);
        T::MATCHES_THE_LIST
    };
    let (problem, Launch { gemm, .. }) = (params.problem, params.launch);
    let stage_shape = stage_for::<F, T>(problem);
    let [stage_bytes, activation_bytes] = [stage_shape.bytes(), stage_shape.activation_bytes()];
    if warp::number() == 0 {
        // SAFETY: one warp calls it, with all lanes; the barrier follows.
        unsafe { params.launch.write_plan(&problem.routed) };
    }
    warp::barrier();
    let ring = shared::address(warp::shared::<u128>().cast::<u8>()) + FRONT_BYTES;
    let first_tile = warp::number() * TILES as u32;
    let stages = stage_shape.count(gemm.shared);
    let table = if D::TABLE == 0 { 0 } else { pin_in_register(D::TABLE) };
    let lane_activations = stage_shape.codes_bytes() + warp::lane() * 16;
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let WorkTile { row_tile, token_tile, expert, .. } = params.work_tile::<T>(k_range);
        let problem = problem.of_expert::<F>(expert);
        let pack = u64::from(token_tile) * gemm.k_iterations.divisor + u64::from(k_range.start);
        let pack = pack * u64::from(activation_bytes) + u64::from(warp::thread() * 16);
        let mut copies = Copies::<F, T> {
            weights: WeightLoader::new(&problem, &stage_shape, row_tile, &k_range, warp::thread()),
            activations: params.packed.wrapping_add(pack as usize),
            left: k_range.end - k_range.start,
            stage: 0,
            stages,
            stage_bytes,
            ring,
        };
        // All warps have finished with the stages of the previous work tile.
        warp::barrier();
        let mut i = 1;
        while i < stages {
            // SAFETY: after the barrier no thread uses the ring.
            unsafe { copies.next() };
            i += 1;
        }
        let mut fragments = FragmentLoader::<F, T>::new(&problem, &stage_shape, first_tile, k_range.start);
        let mut accumulators = [T::Accumulators::ZEROS; TILES];
        let mut scale_offset = 0;
        let (mut left, mut stage) = (k_range.end - k_range.start, 0);
        while left > 0 {
            wait_for_oldest(stages);
            // Now all lanes' copies have arrived, and no lane reads the stage that is filled next.
            warp::barrier();
            let at = ring + stage * stage_bytes;
            // SAFETY: the stage that `next` fills held the previous K-iteration, which all lanes
            // have multiplied. The copies of this K-iteration have arrived.
            unsafe {
                copies.next();
                let loaded = fragments.load::<D, TILES>(at, 0);
                let factors = [loaded[0].factors::<F, D>(), loaded[1].factors::<F, D>()];
                scale_offset =
                    loaded[0].scale_offset::<F, D>().max(loaded[1].scale_offset::<F, D>()).max(scale_offset);
                // Written out: in a loop, LLVM would keep the fragments in local memory.
                let weights = [
                    loaded[0].decode::<D, 0>(&factors[0], table),
                    loaded[1].decode::<D, 0>(&factors[1], table),
                ];
                multiply::<D, T::Accumulators>(&mut accumulators, &weights, at + lane_activations);
                let weights = [
                    loaded[0].decode::<D, 1>(&factors[0], table),
                    loaded[1].decode::<D, 1>(&factors[1], table),
                ];
                let second = at + lane_activations + T::N * QUAD * 16;
                multiply::<D, T::Accumulators>(&mut accumulators, &weights, second);
                let weights = [
                    loaded[0].decode::<D, 2>(&factors[0], table),
                    loaded[1].decode::<D, 2>(&factors[1], table),
                ];
                let third = at + lane_activations + 2 * T::N * QUAD * 16;
                multiply::<D, T::Accumulators>(&mut accumulators, &weights, third);
                let weights = [
                    loaded[0].decode::<D, 3>(&factors[0], table),
                    loaded[1].decode::<D, 3>(&factors[1], table),
                ];
                let fourth = at + lane_activations + 3 * T::N * QUAD * 16;
                multiply::<D, T::Accumulators>(&mut accumulators, &weights, fourth);
            }
            stage = next_stage(stage, stages);
            left -= 1;
        }
        shared::wait_for_copies::<0>();
        let k_range = scheduler.recompute();
        // SAFETY: all lanes of all warps are here, each warp with its own two tiles.
        unsafe {
            let zero = |tile| out_of_range_is_zero::<F, D, T>(&problem, row_tile, tile, &k_range);
            let in_range =
                scale_offset <= F::last_in_range::<D>() || zero(first_tile) && zero(first_tile + 1);
            let in_range = F::ALWAYS_IN_RANGE || warp::ballot(in_range) == u32::MAX;
            let work_tile = params.work_tile::<T>(k_range);
            params.finish::<F, D, T, T::Accumulators, TILES>(
                &work_tile,
                first_tile,
                TokenSlice::ALL,
                accumulators,
                in_range,
            );
        }
        scheduler.advance(&k_range);
    }
}

/// Adds the products of a word of codes of each row with all tokens. `activations` is the address
/// of the first eight tokens' activations.
///
/// # Safety
/// The activations of all tokens are in shared memory. All lanes call it.
#[inline(always)]
unsafe fn multiply<D: Activations, A: Array>(
    accumulators: &mut [A; TILES],
    weights: &[[[u32; 4]; 2]; TILES],
    activations: u32,
) {
    for eight in 0..A::LEN / 4 {
        // SAFETY: the activations are in shared memory, and a lane's 16 bytes start on 16.
        let x = unsafe { shared::load_16(activations + eight as u32 * (8 * QUAD * 16)) };
        for tile in 0..TILES {
            let of_tile = &mut accumulators[tile];
            let mut four = [0, 1, 2, 3].map(|i| of_tile.get(4 * eight + i));
            four = D::multiply(weights[tile][0], [x[0], x[1]], four);
            four = D::multiply(weights[tile][1], [x[2], x[3]], four);
            for i in 0..4 {
                *of_tile.get_mut(4 * eight + i) = four[i];
            }
        }
    }
}
