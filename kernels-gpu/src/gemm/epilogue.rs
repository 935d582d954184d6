//! The epilogue of the GEMM: adds up what several thread blocks have of a work tile, scales, rounds and stores.

use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::experts::ExpertTile;
use microscale_kernels_abi::gemm::{MOST_TILES, TokenTile};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{QUAD, TILE_ROWS};
use microscale_kernels_abi::{Dtype as OutputDtype, Epilogue};

use super::scheduler::{Share, Task, Work, place, sharers};
use crate::arithmetic::Ptx;
use crate::product::copies::pin_in_register;
use crate::product::operand::Problem;
use crate::product::results::{Results, load};
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// The number that a warp adds to a counter if tensor cores could not compute its part.
const UNUSUAL: u32 = 1 << 16;

/// The problem, and where its results and sums go.
pub(super) struct Output<'a> {
    pub(super) problem: &'a Problem,
    pub(super) work: Work<'a>,
    /// A counter for each tile of 16 rows of shared work tiles, and where thread blocks leave their sums of these.
    pub(super) counters: *mut u32,
    pub(super) left: *mut u8,
}

/// The offset, among a lane's sums of a warp's tiles, of four of a tile.
const fn fours<const SUMS: usize>(tile: usize, four: usize) -> usize {
    (tile * (SUMS / 4) + four) * WARP as usize * 16
}

/// The token tile of which a lane has so many sums of a tile of 16 rows.
pub(super) const fn of_sums<const SUMS: usize>() -> TokenTile {
    let mut i = 0;
    while TokenTile::ALL[i].tokens() != SUMS as u32 * WARP / TILE_ROWS {
        i += 1;
    }
    TokenTile::ALL[i]
}

/// The tokens of a work tile of which a thread block has sums: all, or as one of a pair half of them.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The number of the part, and how many there are.
    rank: u32,
    of: u32,
}

impl Part {
    /// All tokens.
    pub(super) const ALL: Self = Self { rank: 0, of: 1 };

    /// Half of them.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn half(rank: u32) -> Self {
        Self { rank, of: 2 }
    }

    /// Returns whether no other thread blocks have sums of the part: if all that share a tile are those of a pair.
    #[inline(always)]
    fn is_all(self, work: &Work<'_>) -> bool {
        self.of > 1 && work.schedule.sharers.divisor as u32 == self.of
    }

    /// The first and the last thread block that have sums of the part of a shared work tile. From one to the next there are as many as parts.
    #[inline(always)]
    fn sharers(self, work: &Work<'_>, work_tile: u32) -> [u32; 2] {
        let [first, last] = sharers(work, work_tile);
        [first + self.rank, last + 1 - self.of + self.rank]
    }

    /// A task with the tokens of the part, of which a lane has so many sums.
    #[inline(always)]
    fn of<const SUMS: usize>(self, all: &Task) -> Task {
        if self.of == 1 {
            return *all;
        }
        let tokens = const { of_sums::<SUMS>().tokens() };
        let first = all.first + self.rank * tokens;
        Task { first, end: all.end.min(first + tokens), ..*all }
    }
}

impl Output<'_> {
    /// The tokens of a share's work tile, of so many at most.
    #[inline(always)]
    pub(super) fn tokens(&self, share: &Share, tile: TokenTile) -> ExpertTile {
        let [_, number] = self.work.schedule.row_and_token_tile(share.tile);
        // SAFETY: the work tile exists, and so does its token tile.
        unsafe { self.problem.routed.tile(number, tile.tokens().trailing_zeros(), self.work.grid.tokens) }
    }

    /// Finishes a warp's part of a task, given the sums of some tiles of 16 rows, of which the first is `tile`, and of all tokens or a part. A
    /// lane has `OF_TILE` sums of all. `usual` says whether tensor cores could compute it.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, and no other warp of the thread block has these tiles.
    #[inline(always)]
    pub(super) unsafe fn finish<
        F: Weights,
        D: Activations,
        const OF_TILE: usize,
        const SUMS: usize,
        const OF_WARP: usize,
    >(
        &self,
        task: &Task,
        tile: u32,
        part: Part,
        mut sums: [[f32; SUMS]; OF_WARP],
        mut usual: bool,
    ) {
        let share = &task.share;
        if !share.is_whole(&self.work) && !part.is_all(&self.work) {
            let own = self.sums::<SUMS>(share.tile, warp::thread_block(), tile);
            for i in 0..OF_WARP {
                for j in 0..SUMS / 4 {
                    let four = [0, 1, 2, 3].map(|k| sums[i][4 * j + k].to_bits());
                    // SAFETY: the place is the thread block's, and these words of it the lane's.
                    unsafe { ptx::store_16(own.wrapping_add(fours::<SUMS>(i, j)), four) };
                }
            }
            // SAFETY: the caller's promise.
            let Some(all_usual) = (unsafe { self.count(share.tile, tile, part, usual) }) else { return };
            usual = all_usual;
            // SAFETY: all have left their sums.
            sums = unsafe {
                match SUMS {
                    ..=16 => self.left_sums::<SUMS, OF_WARP, 4>(share.tile, tile, part),
                    _ => self.left_sums::<SUMS, OF_WARP, 2>(share.tile, tile, part),
                }
            };
        }
        let problem = self.problem.of_expert::<F>(task.expert);
        let [row_tile, _] = self.work.schedule.row_and_token_tile(share.tile);
        let row = row_tile * const { of_sums::<OF_TILE>().rows() } + tile * TILE_ROWS;
        let task = part.of::<SUMS>(task);
        // SAFETY: the caller's promise; no other warp has these rows and tokens.
        unsafe {
            if usual {
                for i in 0..OF_WARP {
                    store::<F, D, SUMS>(&problem, row + i as u32 * TILE_ROWS, &task, &sums[i]);
                }
            } else {
                define::<F, D>(&problem, row, OF_WARP as u32 * TILE_ROWS, [task.first, task.end]);
            }
        }
    }

    /// The lane's sums of a warp's first tile, as a thread block leaves them of a shared work tile.
    #[inline(always)]
    fn sums<const SUMS: usize>(&self, work_tile: u32, block: u32, tile: u32) -> *mut u8 {
        let tile_bytes = const { SUMS as u32 * WARP * 4 };
        let place = u64::from(place(&self.work, work_tile, block))
            * u64::from(const { of_sums::<SUMS>().tiles() } * tile_bytes);
        let in_place = tile * tile_bytes + warp::lane() * 16;
        self.left.wrapping_add((place + u64::from(in_place)) as usize)
    }

    /// Adds up, in the order of K, what all thread blocks have left of the warp's part of a work tile, for `AT_ONCE` of which
    /// there are registers.
    ///
    /// # Safety
    /// The contract of the kernels; they have left it, and counted themselves afterwards.
    #[inline(always)]
    unsafe fn left_sums<const SUMS: usize, const OF_WARP: usize, const AT_ONCE: usize>(
        &self,
        work_tile: u32,
        tile: u32,
        part: Part,
    ) -> [[f32; SUMS]; OF_WARP] {
        let mut sums = [[0.0; SUMS]; OF_WARP];
        let [mut block, last] = part.sharers(&self.work, work_tile);
        while block <= last {
            let mut from = [self.left; AT_ONCE];
            for b in 0..AT_ONCE {
                from[b] = self.sums::<SUMS>(work_tile, (block + b as u32 * part.of).min(last), tile);
            }
            for i in 0..OF_WARP {
                for j in 0..SUMS / 4 {
                    let mut more = [[0; 4]; AT_ONCE];
                    for b in 0..AT_ONCE {
                        // SAFETY: the thread block has left them.
                        more[b] = unsafe { ptx::load_16_written(from[b].wrapping_add(fours::<SUMS>(i, j))) };
                    }
                    for b in 0..AT_ONCE {
                        for k in 0..4 {
                            // Nothing changes by −0.
                            let there = block + b as u32 * part.of <= last;
                            sums[i][4 * j + k] += if there { f32::from_bits(more[b][k]) } else { -0.0 };
                        }
                    }
                }
            }
            block += AT_ONCE as u32 * part.of;
        }
        sums
    }

    /// Counts this thread block among those whose warps have left their sums of a tile. The last one is told whether tensor cores
    /// could compute all of them.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, and have left their sums.
    #[inline(always)]
    unsafe fn count(&self, work_tile: u32, tile: u32, part: Part, usual: bool) -> Option<bool> {
        let [first, last] = part.sharers(&self.work, work_tile);
        let of_tiles = (work_tile - self.work.schedule.first_shared) * part.of + part.rank;
        let number = of_tiles * MOST_TILES + tile;
        let counter = self.counters.wrapping_add(number as usize);
        let mut told = 0;
        // All lanes' stores come before the first one's counting.
        warp::sync();
        if warp::lane() == 0 {
            let amount = 1 + if usual { 0 } else { UNUSUAL };
            // SAFETY: there is a counter for each tile of a shared work tile. Nobody counts any more once all have.
            unsafe {
                let counted = ptx::count(counter, amount) + amount;
                let all = counted % UNUSUAL == (last - first) / part.of + 1;
                if all {
                    *counter = 0;
                    told = 1 + u32::from(counted < UNUSUAL);
                }
            }
        }
        let told = warp::shuffle(told, 0);
        // The others' stores are visible to the first lane, which has counted, and now to all.
        warp::sync();
        (told != 0).then_some(told == 2)
    }
}

/// The factor of sums: what it is, and as two numbers in f32.
#[derive(Clone, Copy)]
struct Factor {
    exact: f64,
    /// The factor towards zero, so that what is left is not negative.
    high: f32,
    low: f32,
    /// The two are the factor but for 2^-47 of it.
    fits: bool,
}

impl Factor {
    /// The powers of two between which factors are that fit.
    const FITTING: [f64; 2] = [power_of_two(-96) as f64, power_of_two(96) as f64];
    /// The factor of sums that were scaled before.
    const ONE: Self = Self { exact: 1.0, high: 1.0, low: 0.0, fits: true };

    #[inline(always)]
    fn new(exact: f64) -> Self {
        let nearest = exact as f32;
        let above = f64::from(nearest) > exact;
        let high = if above { f32::from_bits(nearest.to_bits().wrapping_sub(1)) } else { nearest };
        let low = (exact - f64::from(high)) as f32;
        Self { exact, high, low, fits: (Self::FITTING[0]..Self::FITTING[1]).contains(&exact) }
    }

    /// The factor and sums, brought under it in f64 where it does not fit. A product with a factor that fits is [`Self::scaled`].
    #[inline(always)]
    fn fitted<const SUMS: usize>(self, sums: &[f32; SUMS]) -> (Self, [f32; SUMS]) {
        if self.fits {
            return (self, *sums);
        }
        (Self::ONE, sums.map(|sum| (f64::from(sum) * self.exact) as f32))
    }

    /// The product of a sum and a factor that fits, rounded once. It may become the other neighbour where it is within 2^-22 units of the
    /// middle of two, or below 2^-100.
    #[inline(always)]
    fn scaled(self, sum: f32) -> f32 {
        // A minimum with NaN is the other number: the rest of an infinite sum has its sign or is finite, so that the sum stays what it is.
        let rest = (sum * self.low).min(f32::MAX);
        ptx::fma_f32(sum, self.high, rest)
    }
}

/// How lanes exchange sums of eight tokens until each has four rows of one, so that they store whole sectors. Before it, a lane has of
/// two rows, eight apart, results with two tokens.
struct Exchange {
    /// The token that the lane has afterwards, and the first row.
    token: u32,
    row: u32,
    /// Whether the lane gives the first token's results and keeps the second's, and whether it keeps the upper rows.
    second: bool,
    upper: bool,
    /// The halves of a kept and a gotten word to keep, and to give.
    keep: u32,
    give: u32,
}

impl Exchange {
    #[inline(always)]
    fn new() -> Self {
        // Computed here, for a shuffle is not moved: before the mainloop, the compiler's choice, it would take registers of it.
        let lane = pin_in_register(warp::lane());
        let (of_eight, quarter) = (lane / QUAD, lane % QUAD);
        let [second, upper] = [of_eight % 2 == 1, of_eight / 2 % 2 == 1];
        // The halves by their bytes: the even row's first. A lane that keeps the second token's has the odd row.
        let [lower_halves, upper_halves] = if second { [0x1054, 0x3276] } else { [0x5410, 0x7632] };
        let [keep, give] = if upper { [upper_halves, lower_halves] } else { [lower_halves, upper_halves] };
        Self {
            token: quarter * 2 + of_eight % 2,
            row: of_eight / 4 * 4 + if upper { TILE_ROWS / 2 } else { 0 },
            second,
            upper,
            keep,
            give,
        }
    }

    /// The lane's four rows, given for each token a word of its results of both rows.
    #[inline(always)]
    fn of(&self, [first, second]: [u32; 2]) -> [u32; 2] {
        let [kept, given] = if self.second { [second, first] } else { [first, second] };
        let got = warp::shuffle_xor(given, QUAD);
        let [kept, given] = [self.keep, self.give].map(|halves| ptx::permute(kept, got, halves));
        let got = warp::shuffle_xor(given, 2 * QUAD);
        if self.upper { [got, kept] } else { [kept, got] }
    }
}

/// Words of places that a lane has of a token tile, at most.
const PLACES: usize = TokenTile::N256.tokens() as usize / WARP as usize;

/// Stores the results of a tile of 16 rows and a token tile.
///
/// # Safety
/// The contract of the kernels; all lanes take part, and no other warp has these rows and tokens.
#[inline(always)]
unsafe fn store<F: Weights, D: Activations, const SUMS: usize>(
    problem: &Problem,
    first_row: u32,
    &Task { first, end, scale, .. }: &Task,
    sums: &[f32; SUMS],
) {
    let lowered = f64::from(power_of_two(const { D::LOWERED[F::INDEX] }));
    let (factor, sums) = Factor::new(problem.weights.scaled_by(lowered, scale)).fitted(sums);
    if problem.results.epilogue.steps != 0 {
        // SAFETY: the caller's promise.
        return unsafe { store_with_steps::<D, SUMS>(problem, first_row, [first, end], sums, factor) };
    }
    let exchange = Exchange::new();
    let (rows, row) = (problem.shape.rows as u32, first_row + exchange.row);
    let count = end.saturating_sub(first);
    let of_lane = if row < rows { count } else { 0 };
    let out = problem.results.out.wrapping_add(row as usize * 2);
    let whole = (problem.results.out as usize | rows as usize * 2).is_multiple_of(8);
    // Each lane finds the places of some tokens, and the others ask it.
    let mut places = [0; PLACES];
    for i in 0..(SUMS * 2).div_ceil(WARP as usize) {
        let token = (first + i as u32 * WARP + warp::lane()).min(end - 1);
        // SAFETY: the token exists.
        places[i] = unsafe { problem.place(token) };
    }
    for four in 0..SUMS / 4 {
        if four as u32 * 8 >= count {
            break;
        }
        // A word has both rows' results with one token.
        let words = [0, 1].map(|token| {
            let [low, high] = [0, 2].map(|row| factor.scaled(sums[4 * four + row + token]));
            D::rounded(high, low)
        });
        let four_rows = exchange.of(words);
        let in_tile = four as u32 * 8 + exchange.token;
        let place = warp::shuffle(places[four / 4], in_tile % WARP);
        if in_tile < of_lane {
            let to = out.cast::<u16>().wrapping_add((u64::from(place) * u64::from(rows)) as usize);
            // SAFETY: the results exist, and are this lane's; they are whole words where rows are.
            unsafe {
                if whole {
                    *to.cast::<u64>() = u64::from(four_rows[0]) | u64::from(four_rows[1]) << 32;
                } else {
                    for i in 0..4 {
                        if row + (i as u32) < rows {
                            *to.wrapping_add(i) = (four_rows[i / 2] >> (i % 2 * 16)) as u16;
                        }
                    }
                }
            }
        }
    }
}

/// [`store`] with steps before. A lane stores results where it has sums; of a gate's, whose two rows are in two lanes, each stores those
/// with one token.
///
/// # Safety
/// As for [`store`], with the factor of the sums, which fits.
#[inline(always)]
unsafe fn store_with_steps<D: Activations, const SUMS: usize>(
    problem: &Problem,
    first_row: u32,
    [mut first, end]: [u32; 2],
    mut sums: [f32; SUMS],
    factor: Factor,
) {
    let results = &problem.results;
    let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
    let rows = problem.shape.rows as u32;
    let own = [first_row + of_eight, first_row + TILE_ROWS / 2 + of_eight];
    let bias = own.map(|row| {
        let there = results.epilogue.has(Epilogue::BIAS) && row < rows;
        // SAFETY: there is a value for each row.
        if there { unsafe { load(results.bias, u64::from(row), D::OUTPUT) } } else { 0.0 }
    });
    // As many tokens as lanes at a time, written out once, for the text would be very long otherwise.
    let fours = const { if SUMS > 16 { 4 } else { SUMS / 4 } };
    while first < end {
        // SAFETY: the token exists.
        let place = unsafe { problem.place((first + warp::lane()).min(end - 1)) };
        for four in 0..fours {
            let in_tile = four as u32 * 8 + quarter * 2;
            let places = [0, 1].map(|i| warp::shuffle(place, (in_tile + i) % WARP));
            for half in 0..2 {
                let values = [0, 1].map(|i| factor.scaled(sums[4 * four + 2 * half + i]) + bias[half]);
                let there = [0, 1].map(|i| own[half] < rows && first + in_tile + i < end);
                // SAFETY: the results exist where they are there, and are this lane's.
                unsafe { store_pair::<D>(problem, own[half], values, places, there) };
            }
        }
        // All the way around: of sums that stay where they are, the compiler would write the loop out after all.
        let before = sums;
        for i in 0..SUMS {
            sums[i] = before[(i + 4 * fours) % SUMS];
        }
        first += fours as u32 * 8;
    }
}

/// Stores results of a row with two tokens, in given rows of results, where they are there.
///
/// # Safety
/// The contract of the kernels; all lanes take part, and [`QUAD`] lanes apart are those of an even row and the one behind.
#[inline(always)]
unsafe fn store_pair<D: Activations>(
    problem: &Problem,
    row: u32,
    values: [f32; 2],
    places: [u32; 2],
    mut there: [bool; 2],
) {
    let Results { out, residual, epilogue, .. } = problem.results;
    let (mut values, mut at) = (values, row);
    if epilogue.has(Epilogue::GATED) {
        // Even rows are gates. Lanes give each other what the other needs, and each has one token.
        let odd = row % 2 == 1;
        let [given, kept] = if odd { values } else { [values[1], values[0]] };
        let got = f32::from_bits(warp::shuffle_xor(given.to_bits(), QUAD));
        let (gate, up) = if odd { (got, kept) } else { (kept, got) };
        values = [epilogue.gate.of::<Ptx>(gate, up); 2];
        there = [there[0] && !odd, there[1] && odd];
        at = row / 2;
    }
    let dtype = if epilogue.has(Epilogue::F32_RESULTS) { OutputDtype::F32 } else { D::OUTPUT };
    for i in 0..2 {
        if there[i] {
            let index = u64::from(places[i]) * epilogue.results(problem.shape.rows) + u64::from(at);
            let mut value = values[i];
            // SAFETY: the caller's promise; there is a residual for each result.
            unsafe {
                if epilogue.has(Epilogue::RESIDUAL) {
                    value += load(residual, index, dtype);
                }
                if dtype == OutputDtype::F32 {
                    let canonical = if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() };
                    *out.cast::<u32>().wrapping_add(index as usize) = canonical;
                } else {
                    *out.cast::<u16>().wrapping_add(index as usize) = D::rounded(value, value) as u16;
                }
            }
        }
    }
}

/// Computes and stores the results of some rows and a token tile by the definition.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
unsafe fn define<F: Weights, D: Activations>(
    problem: &Problem,
    first_row: u32,
    count: u32,
    tokens: [u32; 2],
) {
    let end = (problem.shape.rows as u32).min(first_row + count);
    let mut row = first_row;
    while row < end {
        // SAFETY: the caller's promise.
        unsafe { problem.define::<F, D>(u64::from(row), tokens) };
        row += 1;
    }
}
