//! The exchange of accumulators between the two thread blocks of a cluster.
//!
//! Both share a work tile, each with other K-iterations. Through shared memory, each gives the
//! other its accumulators of half of the tokens. Then each has twice the K-iterations of half of
//! the tokens, and half the partial sums to store.

use microscale_kernels_abi::gemm::stage::FRONT_BYTES;
use microscale_kernels_abi::launch::WARP;

use super::tile::{Array, Tile};
use crate::hardware::{cluster, shared, warp, warp_group};

/// Adds the other thread block's accumulators of a tile of 16 rows to the warp's own: of the first
/// half of the tokens in the cluster's first thread block, of the second half in the other. `base`
/// is the address of shared memory. Returns the sums, and whether both thread blocks' scales are in
/// range.
///
/// # Safety
/// The launch has clusters of two. All lanes of all consumer warps call it, each warp for its own
/// tile; no other warp uses shared memory any more. [`cluster::wait`] must follow, as the other
/// thread block still reads.
#[inline(always)]
pub(super) unsafe fn add<T: Tile>(
    base: u32,
    tile: u32,
    accumulators: &T::Accumulators,
    in_range: bool,
) -> (T::Half, bool) {
    let kept = const { T::Half::LEN };
    let (rank, warp_bytes) = (cluster::rank(), const { T::Half::LEN as u32 * WARP * 4 });
    let tiles = const { T::CONFIG.row_tiles() };
    let given = base + FRONT_BYTES + tile * warp_bytes + warp::lane() * 16;
    let word = base + FRONT_BYTES + tiles * warp_bytes + tile * 4;
    // SAFETY: all consumer warps call it. After it, their products have read the stages that are
    // overwritten.
    unsafe { warp_group::barrier_of::<1>(tiles * WARP) };
    let is_first = rank == 0;
    let at = |four: usize, k: usize| [accumulators.get(4 * four + k), accumulators.get(kept + 4 * four + k)];
    for four in 0..kept / 4 {
        let others = [0, 1, 2, 3].map(|k| {
            let [low, high] = at(four, k);
            if is_first { high.to_bits() } else { low.to_bits() }
        });
        // SAFETY: the ABI asserts that two stages have room for all warps' accumulators; these 16
        // bytes are the lane's.
        unsafe { shared::store_16(given + four as u32 * WARP * 16, others) };
    }
    if warp::lane() == 0 {
        // SAFETY: the word follows the accumulators, and is this warp's.
        unsafe { shared::store(word, u32::from(in_range)) };
    }
    // SAFETY: all lanes of the warp arrive and wait.
    unsafe {
        cluster::arrive();
        cluster::wait();
    }
    let [given, word] = [given, word].map(|address| cluster::address_of(address, rank ^ 1));
    let mut sums = T::Half::ZEROS;
    // SAFETY: the other thread block wrote them before the cluster's barrier. It does not end
    // before this warp arrives again.
    let in_range = unsafe {
        let mut four = 0;
        while four < kept / 4 {
            let taken = const { if T::Half::LEN / 4 < 4 { T::Half::LEN / 4 } else { 4 } };
            let from = [0, 1, 2, 3].map(|i| given + (four + i % taken) as u32 * WARP * 16);
            let others = if taken == 4 {
                cluster::load_four(from)
            } else {
                let [a, b] = cluster::load_two([from[0], from[1]]);
                [a, b, [0; 4], [0; 4]]
            };
            for i in 0..taken {
                for k in 0..4 {
                    let [low, high] = at(four + i, k);
                    let own = if is_first { low } else { high };
                    *sums.get_mut(4 * (four + i) + k) = own + f32::from_bits(others[i][k]);
                }
            }
            four += taken;
        }
        in_range & (cluster::load(word) != 0)
    };
    // SAFETY: all lanes of the warp arrive; the caller waits.
    unsafe { cluster::arrive() };
    (sums, warp::ballot(in_range) == u32::MAX)
}
