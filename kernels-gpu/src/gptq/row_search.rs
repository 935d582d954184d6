//! The search for the scale of a block in sixteen lanes, each with another candidate.

use microscale_formats::search::gptq::BlockBounds;
use microscale_formats::search::{Search, window};
use microscale_kernels_abi::gptq::{ROW_LANES, SCALE_BYTES, ScaleTable};

use super::descent::{Candidate, Descent, Rounding};
use crate::format::Searched;
use crate::hardware::{ptx, warp};

/// Lanes of a row as a signed number.
const LANES: i32 = ROW_LANES as i32;
/// Lanes of the first round that do not try a larger scale: one has codes 0, one the plain scale.
const OTHERS: i32 = 2;

/// The phase of a row's search.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// Larger scales, in the first round also codes 0 and the plain scale.
    Larger,
    /// Smaller scales.
    Smaller,
    /// The scale is chosen.
    Done,
}

/// The facts of a block that its search needs.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) plain: u8,
    /// The plain scale of 1.5 times the amax.
    pub(super) larger: u8,
    /// The amax in units.
    pub(super) amax: f32,
    pub(super) unit: f32,
    pub(super) bounds: BlockBounds,
}

/// The search of the lane's row. All lanes of a row have the same state, except for `best`.
pub(super) struct RowSearch {
    table: *const ScaleTable,
    rounding: Rounding,
    phase: Phase,
    plain: i32,
    /// The first and the last byte to try, besides the plain one.
    range: (i32, i32),
    /// The number of the candidate of the row's first lane.
    first: i32,
    /// The error of codes 0, and the largest magnitude that they round.
    zeros: (f32, f32),
    /// The error of the plain scale, infinite if it is not finite.
    plain_error: f32,
    /// The best other scale: its error and its byte.
    best: (f32, i32),
    /// Factors below this, in units, cannot win. NaN if nothing is known.
    limit: f32,
    /// Scales that were tried.
    pub(super) tried: u32,
}

/// The lane's number in its row.
#[inline(always)]
pub(super) fn lane_of_row() -> u32 {
    warp::lane() % ROW_LANES
}

/// The number of the row's first lane in the warp.
#[inline(always)]
fn first_lane() -> u32 {
    warp::lane() & ROW_LANES
}

/// A bit per lane of the row. All lanes of the warp call it.
#[inline(always)]
fn row_ballot(predicate: bool) -> u32 {
    warp::ballot(predicate) >> first_lane() & 0xFFFF
}

/// The number that a lane of the row has. All lanes of the warp call it.
#[inline(always)]
pub(super) fn of_lane(number: f32, lane: u32) -> f32 {
    f32::from_bits(warp::shuffle(number.to_bits(), first_lane() | lane))
}

/// The better of two scales: the smaller error, then the smaller byte.
#[inline(always)]
fn better(a: (f32, i32), b: (f32, i32)) -> (f32, i32) {
    if b.0 < a.0 || b.0 == a.0 && b.1 < a.1 { b } else { a }
}

/// The best scale of the row's lanes, in all of them. All lanes of the warp call it.
#[inline(always)]
fn best_of_row(mut best: (f32, i32)) -> (f32, i32) {
    let mut distance = 1;
    while distance < ROW_LANES {
        let error = f32::from_bits(warp::shuffle_xor(best.0.to_bits(), distance));
        best = better(best, (error, warp::shuffle_xor(best.1 as u32, distance) as i32));
        distance *= 2;
    }
    best
}

/// The candidate of a byte.
///
/// # Safety
/// `table` points to the table in global memory, and `byte` is one.
#[inline(always)]
pub(super) unsafe fn candidate(table: *const ScaleTable, byte: u32) -> Candidate {
    // SAFETY: the caller's promise.
    unsafe {
        let factors = (&raw const (*table).factors).cast::<f32>();
        let scalings = (&raw const (*table).scalings).cast::<f32>();
        Candidate { factor: *factors.add(byte as usize), scaling: *scalings.add(byte as usize) }
    }
}

impl RowSearch {
    /// Starts a search. Without one, the plain scale is chosen.
    ///
    /// # Safety
    /// `table` points to the table in global memory, for the lifetime of the search.
    #[inline(always)]
    pub(super) unsafe fn new<F: Searched>(
        search: u32,
        table: *const ScaleTable,
        rounding: Rounding,
        block: &Block,
    ) -> Self {
        const NONE: u32 = Search::None as u32;
        const FOUR_SIX: u32 = Search::FourSix as u32;
        const WINDOW: u32 = Search::Window as u32;
        let (low, high) = match search {
            FOUR_SIX => (block.larger, block.larger),
            WINDOW => window::<F>(block.plain),
            _ => (F::FIRST, F::LAST),
        };
        // A block of zeros keeps its scale.
        let searches = search != NONE && block.amax > 0.0;
        Self {
            table,
            rounding,
            phase: if searches { Phase::Larger } else { Phase::Done },
            plain: i32::from(block.plain),
            range: (i32::from(low), i32::from(high)),
            first: -OTHERS,
            zeros: (0.0, 0.0),
            plain_error: f32::INFINITY,
            best: (f32::INFINITY, i32::from(block.plain)),
            limit: 0.0,
            tried: u32::from(search != NONE),
        }
    }

    /// Returns whether the rows of the warp are done. All lanes of the warp call it.
    #[inline(always)]
    pub(super) fn all_done(&self) -> bool {
        warp::ballot(self.phase != Phase::Done) == 0
    }

    /// The byte that the search chose, once it is done.
    #[inline(always)]
    pub(super) fn chosen(&self) -> u8 {
        (if self.best.0 < self.plain_error { self.best.1 } else { self.plain }) as u8
    }

    /// The number of the lane's candidate.
    #[inline(always)]
    fn number(&self) -> i32 {
        self.first + lane_of_row() as i32
    }

    /// The byte of a candidate. It may be out of range.
    #[inline(always)]
    fn byte(&self, number: i32) -> i32 {
        match self.phase {
            Phase::Larger if number < 0 => self.plain,
            Phase::Larger => (self.plain + 1).max(self.range.0) + number,
            Phase::Smaller => (self.plain - 1).min(self.range.1) - number,
            Phase::Done => i32::from(self.chosen()),
        }
    }

    /// The candidate of a byte that may be out of range.
    #[inline(always)]
    fn candidate_of(&self, byte: i32) -> Candidate {
        // SAFETY: the table is there as long as the search, and the byte is limited.
        unsafe { candidate(self.table, byte.clamp(0, SCALE_BYTES as i32 - 1) as u32) }
    }

    /// The lane's candidate, or the chosen scale.
    #[inline(always)]
    pub(super) fn candidate(&self) -> Candidate {
        let candidate = self.candidate_of(self.byte(self.number()));
        // Codes 0: all codes have the value 0.
        let zeros = self.phase == Phase::Larger && self.number() == -OTHERS;
        Candidate { factor: if zeros { 0.0 } else { candidate.factor }, ..candidate }
    }

    /// Returns whether a smaller scale may win.
    #[inline(always)]
    fn may_try(&self, byte: i32, unit: f32) -> bool {
        let factor = self.candidate_of(byte).factor * unit;
        // Nothing is known if the limit is NaN.
        byte >= self.range.0 && (factor >= self.limit || self.limit.is_nan())
    }

    /// Takes the results of the lanes' candidates, and goes on. All lanes of the warp call it.
    #[inline(always)]
    pub(super) fn take<const N: usize>(&mut self, block: &Block, descent: &Descent<N>) {
        let (number, byte) = (self.number(), self.byte(self.number()));
        let zeros = (of_lane(descent.error, 0), of_lane(descent.largest, 0));
        let plain_error = of_lane(descent.error, 1);
        if self.phase == Phase::Larger && self.first == -OTHERS {
            self.zeros = zeros;
            self.plain_error = if plain_error <= f32::MAX { plain_error } else { f32::INFINITY };
        }
        let stops = if self.phase == Phase::Larger {
            // Under all larger scales codes stay zero.
            let scaling = self.candidate_of(byte).scaling;
            number > -OTHERS && self.rounding.magnitude(self.zeros.1, scaling) == 0.0
        } else {
            // Neither this scale nor a smaller one can win.
            !self.may_try(byte, block.unit)
        };
        let all_stops = row_ballot(stops);
        let goes_on_before = all_stops & ((1 << lane_of_row()) - 1) == 0;
        let tries = goes_on_before
            && match self.phase {
                Phase::Larger => number >= 0 && byte <= self.range.1,
                Phase::Smaller => !stops,
                Phase::Done => false,
            };
        self.tried += row_ballot(tries).count_ones();
        if tries {
            self.best = better(self.best, (descent.error, byte));
        }
        let best = best_of_row(self.best);
        let ends = match self.phase {
            Phase::Larger => all_stops != 0 || self.byte(self.first + LANES - 1) >= self.range.1,
            Phase::Smaller => all_stops != 0,
            Phase::Done => false,
        };
        if !ends {
            self.first += LANES;
            return;
        }
        self.best = best;
        if self.phase == Phase::Smaller {
            self.phase = Phase::Done;
            return;
        }
        let least = if best.0 < self.plain_error { best.0 } else { self.plain_error };
        let [zeros_root, least_root] = [self.zeros.0, least].map(ptx::square_root);
        self.limit = block.bounds.least_factor(zeros_root, least_root, block.amax);
        (self.phase, self.first) = (Phase::Smaller, 0);
        let next = self.byte(0);
        if next < 0 || next >= self.plain || !self.may_try(next, block.unit) {
            self.phase = Phase::Done;
        }
    }
}
