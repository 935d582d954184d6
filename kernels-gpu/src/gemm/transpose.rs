//! The transpose of results between the lanes of a warp, so that lanes store whole sectors.

use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};

use crate::hardware::{ptx, warp};

/// The transpose of the results of 16 rows and eight tokens. Before it, a lane has two rows, eight
/// apart, of two tokens. After it, a lane has four rows of one token.
pub(super) struct Transpose {
    /// The lane's token after the transpose.
    pub(super) token: u32,
    /// The lane's first row after the transpose.
    pub(super) row: u32,
    /// True if the lane keeps the second token's results, and gives the first's.
    keeps_second: bool,
    /// True if the lane keeps the upper rows.
    keeps_upper: bool,
    /// The bytes to keep of a kept and a received word.
    keep: u32,
    /// The bytes to give of a kept and a received word.
    give: u32,
}

impl Transpose {
    /// The transpose of this lane.
    #[inline(always)]
    pub(super) fn new() -> Self {
        // A shuffle stays where it is. Without it, LLVM computes the fields before the mainloop and
        // keeps them in registers.
        let lane = warp::pin_in_register(warp::lane());
        let (of_eight, quarter) = (lane / QUAD, lane % QUAD);
        let [second, upper] = [of_eight % 2 == 1, of_eight / 2 % 2 == 1];
        // The bytes of the even row come first. A lane that keeps the second token has the odd row.
        let [lower_halves, upper_halves] = if second { [0x1054, 0x3276] } else { [0x5410, 0x7632] };
        let [keep, give] = if upper { [upper_halves, lower_halves] } else { [lower_halves, upper_halves] };
        Self {
            token: quarter * 2 + of_eight % 2,
            row: of_eight / 4 * 4 + if upper { TILE_ROWS / 2 } else { 0 },
            keeps_second: second,
            keeps_upper: upper,
            keep,
            give,
        }
    }

    /// The lane's four rows. `[first, second]` are words with both rows of a token.
    #[inline(always)]
    pub(super) fn apply(&self, [first, second]: [u32; 2]) -> [u32; 2] {
        let [kept, given] = if self.keeps_second { [second, first] } else { [first, second] };
        let got = warp::shuffle_xor(given, QUAD);
        let [kept, given] = [self.keep, self.give].map(|halves| ptx::permute(kept, got, halves));
        let got = warp::shuffle_xor(given, 2 * QUAD);
        if self.keeps_upper { [got, kept] } else { [kept, got] }
    }
}
