//! Pairs of thread blocks that share a work tile: before they leave their sums in memory, each gives the other half of them through shared
//! memory, so that both have half as many left, and those of twice as much of K.

use microscale_kernels_abi::gemm::stage::FRONT_BYTES;
use microscale_kernels_abi::launch::WARP;

use super::epilogue::tiles_of_sums;
use crate::{cluster, shared, warp, warp_group};

/// Adds to a warp's sums of a tile of 16 rows those of the other thread block: of the first half of the tokens in the first thread block of
/// the pair, of the others in the second. `base` is the address of shared memory, and `usual` says whether tensor cores could compute the sums;
/// returns whether they could compute both.
///
/// # Safety
/// The launch is in pairs. All lanes of all warps that multiply take part, the only ones that still use shared memory, and no other warp of the
/// thread block has this tile. [`cluster::wait`] must follow: the other one still reads.
#[inline(always)]
pub(super) unsafe fn add_up<const SUMS: usize, const HALF: usize>(
    base: u32,
    tile: u32,
    sums: &[f32; SUMS],
    usual: bool,
) -> ([f32; HALF], bool) {
    // With all of them the kernel has no pairs, and nobody calls this.
    const { assert!(HALF == SUMS || 2 * HALF == SUMS) };
    let (rank, of_warp) = (cluster::rank(), const { HALF as u32 * WARP * 4 });
    let tiles = const { tiles_of_sums::<SUMS>() };
    let given = base + FRONT_BYTES + tile * of_warp + warp::lane() * 16;
    let word = base + FRONT_BYTES + tiles * of_warp + tile * 4;
    // SAFETY: the caller's promise. Other warps' products have read what lies here.
    unsafe { warp_group::barrier_of::<1>(tiles * WARP) };
    let first = rank == 0;
    let at = |four: usize, k: usize| [sums[4 * four + k], sums[HALF + 4 * four + k]];
    for four in 0..HALF / 4 {
        let others = [0, 1, 2, 3].map(|k| {
            let [low, high] = at(four, k);
            if first { high.to_bits() } else { low.to_bits() }
        });
        // SAFETY: the place is this lane's.
        unsafe { shared::store_16(given + four as u32 * WARP * 16, others) };
    }
    if warp::lane() == 0 {
        // SAFETY: the word is this warp's.
        unsafe { shared::store(word, u32::from(usual)) };
    }
    // SAFETY: the caller's promise.
    unsafe {
        cluster::arrive();
        cluster::wait();
    }
    let [given, word] = [given, word].map(|address| cluster::address_of(address, rank ^ 1));
    let mut all = [0.0; HALF];
    // SAFETY: the other thread block has left them, and does not end before this one arrives again.
    let usual = unsafe {
        let mut four = 0;
        while four < HALF / 4 {
            let taken = const { if HALF / 4 < 4 { HALF / 4 } else { 4 } };
            let from = [0, 1, 2, 3].map(|i| given + (four + i % taken) as u32 * WARP * 16);
            let parts = if taken == 4 {
                cluster::load_four(from)
            } else {
                let [a, b] = cluster::load_two([from[0], from[1]]);
                [a, b, [0; 4], [0; 4]]
            };
            for i in 0..taken {
                for k in 0..4 {
                    let [low, high] = at(four + i, k);
                    let own = if first { low } else { high };
                    all[4 * (four + i) + k] = own + f32::from_bits(parts[i][k]);
                }
            }
            four += taken;
        }
        usual & (cluster::load(word) != 0)
    };
    // SAFETY: the caller's promise.
    unsafe { cluster::arrive() };
    (all, warp::ballot(usual) == u32::MAX)
}
