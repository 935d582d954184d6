//! Storing the results of a warp: scaling sums, what follows a product, rounding, and lanes that exchange rows.

use microscale_formats::plan::power_of_two;
use microscale_formats::Dtype as OutputDtype;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{ApplyGlobal, Epilogue};

use super::tasks::Task;
use crate::arithmetic::Ptx;
use crate::product::copies::pin_in_register;
use crate::product::operand::Problem;
use crate::product::results::{Results, load};
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// The factor of sums, as two numbers in f32: it but for 2^-46 of it.
#[derive(Clone, Copy)]
struct Factor {
    /// Below the factor, so that `low` is positive; 0 if there is none.
    high: f32,
    low: f32,
}

impl Factor {
    /// The powers of two between which global scales are that have factors.
    const FITTING: [f32; 2] = [power_of_two(-64), power_of_two(64)];
    const NONE: Self = Self { high: 0.0, low: 0.0 };
    /// The factor of sums that are scaled.
    const ONE: Self = Self::exactly(1.0);

    /// The factor that is a number.
    #[inline(always)]
    const fn exactly(number: f32) -> Self {
        let high = f32::from_bits(number.to_bits() - 1);
        Self { high, low: number - high }
    }

    /// The factor by which a global scale is applied, or none if the scale is too large or too small.
    #[inline(always)]
    fn of(apply: ApplyGlobal, global: f32) -> Self {
        let fits = (Self::FITTING[0]..Self::FITTING[1]).contains(&global);
        match apply {
            ApplyGlobal::Absent => Self::ONE,
            _ if !fits => Self::NONE,
            ApplyGlobal::Multiplier => Self::exactly(global),
            ApplyGlobal::Divisor => {
                let nearest = 1.0 / global;
                // The rest is exact.
                let above = ptx::fma_f32(-nearest, global, 1.0) <= 0.0;
                let high = if above { f32::from_bits(nearest.to_bits() - 1) } else { nearest };
                Self { high, low: ptx::fma_f32(-high, global, 1.0) * nearest }
            }
        }
    }

    /// This and an exponent of two more.
    #[inline(always)]
    fn raised(self, exponent: i32) -> Self {
        let by = power_of_two(exponent);
        Self { high: self.high * by, low: self.low * by }
    }

    /// The product of a sum and the factor, rounded once. It may become the other neighbour where it is within 2^-21 units of the middle of
    /// two, or below 2^-100. Both parts are positive, so that an infinite sum stays what it is.
    #[inline(always)]
    fn scaled(self, sum: f32) -> f32 {
        ptx::fma_f32(sum, self.high, sum * self.low)
    }
}

/// How lanes exchange sums of eight tokens until each has four rows of one, so that they store whole sectors. Before it, a lane has of
/// two rows, eight apart, results with two tokens.
struct Exchange {
    /// The token that the lane has afterwards, and the first row.
    token: u32,
    row: u32,
    /// True if the lane gives the first token's results and keeps the second's, and if it keeps the upper rows.
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
const PLACES: usize = 256 / WARP as usize;

/// Stores the results of a tile of 16 rows and the tokens of a task.
///
/// # Safety
/// The contract of the kernels; all lanes take part, and no other warp has these rows and tokens.
#[inline(always)]
pub(super) unsafe fn store<F: Weights, D: Activations, const SUMS: usize>(
    problem: &Problem,
    first_row: u32,
    &Task { first, end, scale, .. }: &Task,
    sums: &[f32; SUMS],
) {
    let lowered = const { D::LOWERED[F::INDEX] };
    let apply = problem.weights.apply;
    let mut factor = Factor::of(apply, scale).raised(lowered);
    let mut sums = *sums;
    if factor.high == 0.0 {
        let exact = apply.scaled(f64::from(power_of_two(lowered)), scale);
        sums = sums.map(|sum| (f64::from(sum) * exact) as f32);
        factor = Factor::ONE;
    }
    if problem.results.epilogue.steps != 0 {
        // SAFETY: the caller's promise.
        return unsafe { store_with_steps::<D, SUMS>(problem, first_row, [first, end], sums, factor) };
    }
    let exchange = Exchange::new();
    let (rows, row) = (problem.shape.rows as u32, first_row + exchange.row);
    let count = end.saturating_sub(first);
    let of_lane = if row < rows { count } else { 0 };
    let out = problem.results.out.wrapping_add(row as usize * 2);
    let whole = (problem.results.out as u32 | rows * 2).is_multiple_of(8);
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
        let to = ptx::behind(out, warp::shuffle(places[four / 4], in_tile % WARP), rows * 2).cast_mut();
        let there = in_tile < of_lane;
        // SAFETY: the results exist where they are there, and are this lane's; they are whole words where rows are.
        unsafe {
            if whole {
                ptx::store_8_if(there, to, four_rows);
            } else {
                for i in 0..4 {
                    let result = four_rows[i / 2] >> (i % 2 * 16);
                    ptx::store_2_if(there && row + (i as u32) < rows, to.wrapping_add(2 * i), result);
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
pub(super) unsafe fn define<F: Weights, D: Activations>(
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
