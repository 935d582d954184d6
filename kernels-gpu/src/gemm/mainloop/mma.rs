//! The mainloop for every GPU. Each warp has two tiles of 16 rows. All warps copy the next
//! K-iterations while they multiply one.

use microscale_kernels_abi::gemm::QUAD;

use crate::gemm::copies::{Copies, Ring, THREADS};
use crate::gemm::fragment::{FragmentLoader, out_of_range_is_zero};
use crate::gemm::params::{Launch, Params};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::TileScheduler;
use crate::gemm::weight_loader::stage_for;
use crate::hardware::warp::pin_in_register;
use crate::hardware::{shared, warp};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Tiles of 16 rows per warp.
const TILES: usize = 2;

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
    if warp::number() == 0 {
        // SAFETY: one warp calls it, with all lanes; the barrier follows.
        unsafe { params.launch.write_plan(&problem.routed) };
    }
    warp::barrier();
    let ring = Ring::new(&stage_shape, gemm.shared);
    let first_tile = warp::number() * TILES as u32;
    let table = if D::TABLE == 0 { 0 } else { pin_in_register(D::TABLE) };
    let lane_activations = stage_shape.codes_bytes() + warp::lane() * 16;
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let work_tile = params.work_tile::<T>(k_range);
        let row_tile = work_tile.row_tile;
        let problem = problem.of_expert::<F>(work_tile.expert);
        let mut copies = Copies::<F, T>::new(params, &problem, &stage_shape, &work_tile, ring);
        // All warps have finished with the stages of the previous work tile.
        warp::barrier();
        let mut i = 1;
        while i < ring.stages {
            // SAFETY: after the barrier no thread uses the ring.
            unsafe { copies.next() };
            i += 1;
        }
        let mut fragments = FragmentLoader::<F, T>::new(&problem, &stage_shape, first_tile, k_range.start);
        let mut accumulators = [T::Accumulators::ZEROS; TILES];
        let mut scale_offset = 0;
        let (mut left, mut stage) = (k_range.end - k_range.start, 0);
        while left > 0 {
            ring.wait_for_oldest();
            // Now all lanes' copies have arrived, and no lane reads the stage that is filled next.
            warp::barrier();
            let at = ring.stage(stage);
            // SAFETY: the stage that `next` fills held the previous K-iteration, which all lanes
            // have multiplied. The copies of this K-iteration have arrived.
            unsafe {
                copies.next();
                let loaded = fragments.load::<TILES>(at, 0, F::first_in_range::<D>());
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
            stage = ring.after(stage);
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
