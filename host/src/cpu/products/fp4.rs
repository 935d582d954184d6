//! Products of two rows of FP4 with the arithmetic of tensor cores: four k-steps at a time.
//!
//! [`fp4_dot`] defines the results. A term is exact in f32, and the sum of a k-step is exact in
//! f64. So adding a k-step to an accumulator is an f64 addition that is then truncated to the 24
//! bits of f32, if none of the five numbers loses bits when it is aligned. That holds while
//!
//! - the accumulator is zero, or not below 2^(e − 12), where e is the largest exponent of a term:
//!   its last bit is 2^−23 of it or more, and bits from 2^(e − 35) on survive.
//! - the accumulator is below 2^(s + 28), and e at most s + 27, where s is the smallest exponent of
//!   a term that is not zero: a term's last bit is 2^(s − 8).
//!
//! The first condition and the limit of the accumulator are checked for every four k-steps, and
//! [`fp4_dot::step`] repeats any that fail. [`Extent::fits`] checks the others once per result.
//!
//! Accumulators here are four times too large, because a term is made of quarters. In MXFP4, scales
//! are relative to the row's largest, so accumulators are too.

use microscale_formats::Format;
use microscale_formats::fp4_dot::{self, GROUP, GROUPS, STEP as K_STEP, Term};

use super::int8::{TILE_TOKENS, tiles};
use super::rows::{Row, Rows};
use crate::cpu::simd::int8::{Int8Products, Quarters};
use crate::cpu::simd::k_steps::{KSteps, Range};
use crate::cpu::simd::products::{OFFSET, Products, STEP};
use crate::cpu::simd::{LANES, Lanes};
use crate::elements::split_first;

/// Rows per panel.
pub(in crate::cpu) const ROWS: usize = 16;

/// K-steps per step: lane 4 · i + j has group i of k-step j.
const K_STEPS: usize = LANES / GROUPS;

/// Elements per step.
const ELEMENTS: usize = LANES * GROUP;

/// Steps per segment. Its decoded rows and a tile's activations fit the L1 cache.
const STEPS: usize = 4;

/// Exponent of the factor of accumulators, whose terms are made of quarters.
const QUARTERS: i32 = 2;

/// The largest distance of exponents in MXFP4 from the row's largest. Smaller scales become zero.
const SPAN: u8 = 60;

/// The group that a lane has.
const fn group_of_lane(lane: usize) -> usize {
    lane % K_STEPS * GROUPS + lane / K_STEPS
}

/// Four k-steps of a token.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Activations {
    /// Twice each element.
    codes: Quarters,
    /// Minus [`OFFSET`] times the sum of each group's codes.
    surplus: Lanes<i32>,
    scales: Lanes<f32>,
}

/// Four k-steps of a decoded row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Weights {
    /// Twice each element, plus [`OFFSET`].
    raised: Quarters,
    scales: Lanes<f32>,
}

/// The exponents of a row's scales.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Extent {
    /// The largest exponent, of any block.
    largest: i32,
    /// The smallest exponent of a block that is not zero, or `i32::MAX`.
    smallest: i32,
    /// True if a scale is NaN.
    is_nan: bool,
}

impl Extent {
    fn of(format: Format, row: Row<'_>) -> Self {
        let mut extent = Self { largest: i32::MIN, smallest: i32::MAX, is_nan: false };
        for (scale, codes) in row.scales.iter().zip(row.codes.chunks(format.block_bytes())) {
            let Some(exponent) = exponent(format, *scale) else { continue };
            extent.is_nan |= format.is_nan_scale(*scale);
            extent.largest = extent.largest.max(exponent);
            if codes.iter().any(|codes| codes & 0x77 != 0) {
                extent.smallest = extent.smallest.min(exponent);
            }
        }
        extent
    }

    /// Returns whether the result of two rows of `cols` elements needs no alignment of its terms.
    fn fits(format: Format, cols: usize, a: Self, b: Self) -> bool {
        if a.smallest == i32::MAX || b.smallest == i32::MAX {
            // All products are zero.
            return !(a.is_nan || b.is_nan);
        }
        let (largest, smallest) = (a.largest + b.largest, a.smallest + b.smallest);
        // In MXFP4, f32's smallest exponent must not exceed terms, nor sums f32's largest number.
        let sums_are_normal =
            format == Format::Nvfp4 || smallest >= -99 && largest + 6 + cols.ilog2() as i32 <= 126;
        !(a.is_nan || b.is_nan) && largest - smallest <= 27 && sums_are_normal
    }

    /// The exponent that scales in vectors are relative to.
    fn base(self, format: Format) -> i32 {
        if format == Format::Nvfp4 { 0 } else { self.largest.max(-127) }
    }
}

/// Returns the exponent of a scale, or `None` for zero.
fn exponent(format: Format, scale: u8) -> Option<i32> {
    match format {
        Format::Nvfp4 if scale == 0 => None,
        Format::Nvfp4 => Some(i32::from(scale >> 3).max(1) - 7),
        _ => Some(i32::from(scale) - 127),
    }
}

/// Returns 2^`exponent`, from 2^−1022 to 2^1023.
#[inline(always)]
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023).clamp(1, 2046) as u64) << 52)
}

/// The packed activations of all tokens.
///
/// Tokens form tiles of 8, 4, 2 and 1. A tile has its activations by step, then by token.
pub(in crate::cpu) struct Fp4Tokens {
    tokens: usize,
    steps: usize,
    activations: Vec<Activations>,
    /// The largest power of two of a step's scales.
    powers: Vec<f64>,
    extents: Vec<Extent>,
}

/// The activations of a tile of tokens.
struct TokenTile<'a> {
    first: usize,
    tokens: usize,
    activations: &'a [Activations],
    powers: &'a [f64],
}

impl Fp4Tokens {
    /// Allocates zeros for tokens of `cols` elements.
    pub(in crate::cpu) fn new(cols: usize, tokens: usize) -> Self {
        let steps = cols.div_ceil(ELEMENTS);
        let zeros = Activations { codes: [[[0; 4]; LANES]; 4], surplus: [0; LANES], scales: [0.0; LANES] };
        Self {
            tokens,
            steps,
            activations: vec![zeros; steps * tokens],
            powers: vec![0.0; steps * tokens],
            extents: vec![Extent { largest: 0, smallest: 0, is_nan: false }; tokens],
        }
    }

    /// The number of tokens.
    pub(in crate::cpu) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns each tile, to be packed.
    pub(in crate::cpu) fn tiles_mut(&mut self) -> impl Iterator<Item = TokenTileMut<'_>> {
        let (mut activations, mut powers) = (&mut self.activations[..], &mut self.powers[..]);
        let mut extents = &mut self.extents[..];
        let steps = self.steps;
        tiles(self.tokens).map(move |(first, tokens)| TokenTileMut {
            first,
            activations: split_first(&mut activations, steps * tokens),
            powers: split_first(&mut powers, steps * tokens),
            extents: split_first(&mut extents, tokens),
        })
    }

    fn tile(&self, first: usize, tokens: usize) -> TokenTile<'_> {
        let part = first * self.steps..(first + tokens) * self.steps;
        TokenTile { first, tokens, activations: &self.activations[part.clone()], powers: &self.powers[part] }
    }
}

/// A tile of tokens to pack.
pub(in crate::cpu) struct TokenTileMut<'a> {
    first: usize,
    activations: &'a mut [Activations],
    powers: &'a mut [f64],
    extents: &'a mut [Extent],
}

/// Packs the tokens of a tile.
#[inline(always)]
pub(in crate::cpu) fn pack<V: Products, D: Int8Products<V>>(
    bytes: D,
    format: Format,
    rows: Rows<'_>,
    tile: TokenTileMut<'_>,
) {
    let tokens = tile.extents.len();
    for (token, extent) in tile.extents.iter_mut().enumerate() {
        let row = rows.at(tile.first + token);
        *extent = Extent::of(format, row);
        let base = extent.base(format);
        let steps = tile.activations.iter_mut().zip(&mut *tile.powers).skip(token).step_by(tokens);
        for (step, (activations, power)) in steps.enumerate() {
            let (raised, scales, largest) = decoded::<V, D>(bytes, format, row, base, step);
            for (codes, raised) in activations.codes.iter_mut().zip(raised) {
                *codes = bytes.store(raised);
                for (codes, surplus) in codes.iter_mut().zip(&mut activations.surplus) {
                    for code in codes {
                        *code -= OFFSET as i8;
                        *surplus -= OFFSET * i32::from(*code);
                    }
                }
            }
            (activations.scales, *power) = (scales, largest);
        }
    }
}

/// Returns a step of a row: its codes [raised](Int8Products::raised), its scales, and the largest
/// power of two of a scale. `base` is the exponent that scales are relative to.
#[inline(always)]
fn decoded<V: Products, D: Int8Products<V>>(
    bytes: D,
    format: Format,
    row: Row<'_>,
    base: i32,
    step: usize,
) -> ([D::Bytes; 4], Lanes<f32>, f64) {
    let (codes, blocks) = (&row.codes[step * STEP..], ELEMENTS / format.block());
    let scale_bytes = &row.scales[step * blocks..];
    let mut permuted = [0; STEP];
    let (groups, _) = codes.as_chunks::<{ GROUP / 2 }>();
    for (lane, permuted) in permuted.as_chunks_mut::<{ GROUP / 2 }>().0.iter_mut().enumerate() {
        *permuted = groups.get(group_of_lane(lane)).copied().unwrap_or_default();
    }
    let (mut scales, mut largest) = ([0.0; LANES], 0);
    for (lane, scale) in scales.iter_mut().enumerate() {
        let block = group_of_lane(lane) * GROUP / format.block();
        let Some(byte) = scale_bytes.get(block).copied() else { continue };
        largest = largest.max(byte);
        *scale = match format {
            Format::Nvfp4 => E4M3[usize::from(byte & 0x7F)],
            _ => relative(byte, base),
        };
    }
    let power = exponent(format, largest).map_or(0.0, |exponent| power(exponent - base));
    (bytes.raised(&permuted), scales, power)
}

/// Values of E4M3 without a sign, and 0 for NaN.
const E4M3: [f32; 128] = {
    let mut values = [0.0; 128];
    let mut byte = 1;
    while byte < 127 {
        // Eighths of the significand, and a power of two.
        let (field, fraction) = (byte as u32 >> 3, byte as u32 & 7);
        let (eighths, exponent) = if field == 0 { (fraction, 1) } else { (8 + fraction, field) };
        values[byte] = eighths as f32 * f32::from_bits((exponent + 127 - 10) << 23);
        byte += 1;
    }
    values
};

/// Returns a scale of MXFP4 divided by 2^`base`, or 0 more than [`SPAN`] exponents below it.
#[inline(always)]
fn relative(byte: u8, base: i32) -> f32 {
    let below = base + 127 - i32::from(byte);
    if below > i32::from(SPAN) { 0.0 } else { f32::from_bits(((127 - below) as u32) << 23) }
}

/// Buffers of a task, reused by the thread's next task.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    /// The decoded segments of a panel.
    decoded: Vec<Weights>,
    /// The largest power of two of each decoded step's scales.
    powers: Vec<f64>,
    /// Accumulators by tile, row and token.
    accumulators: Vec<f64>,
}

/// The operands of a panel's products.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Operands<'a> {
    pub(in crate::cpu) format: Format,
    /// Up to [`ROWS`] rows of weights.
    pub(in crate::cpu) rows: &'a [Row<'a>],
    /// All tokens.
    pub(in crate::cpu) tokens: Rows<'a>,
    /// All tokens, packed.
    pub(in crate::cpu) x: &'a Fp4Tokens,
}

/// The definition: the products of all rows and tokens, by token.
pub(in crate::cpu) fn multiply_reference(operands: &Operands<'_>, sums: &mut [f32]) {
    for (token, sums) in sums.chunks_mut(operands.rows.len()).enumerate() {
        for (row, sum) in operands.rows.iter().zip(sums) {
            *sum = reference(operands, token, *row);
        }
    }
}

fn reference(operands: &Operands<'_>, token: usize, row: Row<'_>) -> f32 {
    let x = operands.tokens.at(token);
    fp4_dot::row(operands.format, (x.codes, x.scales), (row.codes, row.scales))
}

/// The products of all rows and tokens, by token.
#[inline(always)]
pub(in crate::cpu) fn multiply<V: KSteps, D: Int8Products<V>>(
    simd: V,
    bytes: D,
    operands: &Operands<'_>,
    sums: &mut [f32],
    scratch: &mut Scratch,
) {
    let Operands { format, rows, x, .. } = *operands;
    let mut extents = [Extent { largest: 0, smallest: 0, is_nan: false }; ROWS];
    for (extent, row) in extents.iter_mut().zip(rows) {
        *extent = Extent::of(format, *row);
    }
    let extents = &extents[..rows.len()];
    let zeros = Weights { raised: [[[0; 4]; LANES]; 4], scales: [0.0; LANES] };
    scratch.decoded.resize(ROWS * STEPS, zeros);
    scratch.powers.resize(ROWS * STEPS, 0.0);
    scratch.accumulators.clear();
    scratch.accumulators.resize(rows.len() * x.tokens, 0.0);
    for first in (0..x.steps).step_by(STEPS) {
        let steps = (x.steps - first).min(STEPS);
        for (i, (row, extent)) in rows.iter().zip(extents).enumerate() {
            for step in 0..steps {
                let base = extent.base(format);
                let (raised, scales, power) = decoded::<V, D>(bytes, format, *row, base, first + step);
                let decoded = &mut scratch.decoded[i * STEPS + step];
                for (quarter, raised) in decoded.raised.iter_mut().zip(raised) {
                    *quarter = bytes.store(raised);
                }
                decoded.scales = scales;
                scratch.powers[i * STEPS + step] = power;
            }
        }
        for (token, tokens) in tiles(x.tokens) {
            let tile = x.tile(token, tokens);
            let activations = &tile.activations[first * tokens..][..steps * tokens];
            let powers = &tile.powers[first * tokens..][..steps * tokens];
            let accumulators = &mut scratch.accumulators[token * rows.len()..][..tokens * rows.len()];
            for (i, accumulators) in accumulators.chunks_exact_mut(tokens).enumerate() {
                let segment = Segment {
                    format,
                    weights: &scratch.decoded[i * STEPS..][..steps],
                    row_powers: &scratch.powers[i * STEPS..][..steps],
                    row: extents[i],
                    activations,
                    powers,
                    extents: &x.extents[tile.first..][..tokens],
                };
                match tile.tokens {
                    1 => segment.multiply::<V, D, 1>(simd, bytes, accumulators),
                    2 => segment.multiply::<V, D, 2>(simd, bytes, accumulators),
                    4 => segment.multiply::<V, D, 4>(simd, bytes, accumulators),
                    _ => segment.multiply::<V, D, TILE_TOKENS>(simd, bytes, accumulators),
                }
            }
        }
    }
    let elements = x.steps * ELEMENTS;
    for (first, tokens) in tiles(x.tokens) {
        for token in first..first + tokens {
            for (i, (row, extent)) in rows.iter().zip(extents).enumerate() {
                let accumulator = scratch.accumulators[first * rows.len() + i * tokens + token - first];
                let by = x.extents[token];
                sums[token * rows.len() + i] = if Extent::fits(format, elements, *extent, by) {
                    (accumulator * power(extent.base(format) + by.base(format) - QUARTERS)) as f32
                } else {
                    reference(operands, token, *row)
                };
            }
        }
    }
}

/// A segment of a row of weights and a tile of tokens.
struct Segment<'a> {
    format: Format,
    weights: &'a [Weights],
    row_powers: &'a [f64],
    row: Extent,
    activations: &'a [Activations],
    powers: &'a [f64],
    extents: &'a [Extent],
}

impl Segment<'_> {
    /// Adds the products to the accumulators of `N` tokens.
    #[inline(always)]
    fn multiply<V: KSteps, D: Int8Products<V>, const N: usize>(&self, simd: V, bytes: D, stored: &mut [f64]) {
        // Fours of tokens. Zeros pad them.
        let mut accumulators = [[0.0; 4]; TILE_TOKENS / 4];
        let mut ranges = [Range { lowest: [0.0; 4], limits: [f64::MAX; 4] }; TILE_TOKENS / 4];
        let (accumulators, ranges) = (&mut accumulators[..N.div_ceil(4)], &mut ranges[..N.div_ceil(4)]);
        accumulators.as_flattened_mut()[..N].copy_from_slice(stored);
        for (token, extent) in self.extents.iter().enumerate() {
            // Zeros have no limit.
            let smallest = self.row.smallest.saturating_add(extent.smallest).min(1000);
            let limit = smallest - self.row.base(self.format) - extent.base(self.format) + 28;
            ranges[token / 4].limits[token % 4] = power(limit + QUARTERS);
        }
        let steps = self.activations.as_chunks::<N>().0.iter().zip(self.powers.as_chunks::<N>().0);
        for (step, (x, powers)) in steps.enumerate() {
            let weights = &self.weights[step];
            let raised = load(bytes, &weights.raised);
            let scales = simd.load(&weights.scales);
            let row_power = self.row_powers[step] * power(QUARTERS - 12);
            for (four, (accumulators, range)) in accumulators.iter_mut().zip(&mut *ranges).enumerate() {
                let mut sums = [simd.sums_of_groups(simd.splat(0.0)); 4];
                for (token, sums) in sums.iter_mut().enumerate().take(N) {
                    let x = &x[4 * four + token];
                    let groups = bytes.add_groups(&x.surplus, raised, load(bytes, &x.codes));
                    let scaled = simd.mul(simd.numbers(groups), scales);
                    *sums = simd.sums_of_groups(simd.mul(scaled, simd.load(&x.scales)));
                    range.lowest[token] = row_power * powers[4 * four + token];
                }
                let before = *accumulators;
                if !simd.add_k_steps(sums, accumulators, range) {
                    *accumulators = self.repeat(step, 4 * four, x, &before);
                }
            }
        }
        stored.copy_from_slice(&accumulators.as_flattened()[..N]);
    }

    /// Repeats a step for up to four tokens, by the definition. Returns their accumulators.
    #[cold]
    #[inline(never)]
    fn repeat(&self, step: usize, first: usize, x: &[Activations], before: &[f64; 4]) -> [f64; 4] {
        let mut after = [0.0; 4];
        for (token, x) in x[first..].iter().take(4).enumerate() {
            let base = self.row.base(self.format) + self.extents[first + token].base(self.format);
            let mut sum = (before[token] * power(base - QUARTERS)) as f32;
            for k_step in 0..K_STEPS {
                let term = |group| self.term(&self.weights[step], x, group * K_STEPS + k_step, base);
                sum = fp4_dot::step(sum, std::array::from_fn(|group| Some(term(group))));
            }
            after[token] = f64::from(sum) * power(QUARTERS - base);
        }
        after
    }

    /// The term of a lane. Scales are relative to `base`.
    fn term(&self, weights: &Weights, x: &Activations, lane: usize, base: i32) -> Term {
        let scales = [weights.scales[lane], x.scales[lane]];
        if scales.contains(&0.0) {
            return Term::ZERO;
        }
        let pairs = weights.raised.iter().zip(&x.codes).flat_map(|(a, b)| a[lane].iter().zip(&b[lane]));
        let quarters: i32 = pairs.map(|(a, b)| (i32::from(*a) - OFFSET) * i32::from(*b)).sum();
        // Subnormal E4M3 has the exponent of its smallest normal number.
        let smallest = if self.format == Format::Nvfp4 { -6 } else { -127 };
        let exponents = scales.map(|scale| ((scale.to_bits() >> 23) as i32 - 127).max(smallest));
        let significand = |i: usize| (f64::from(scales[i]) * power(3 - exponents[i])) as i32;
        Term {
            significand: quarters * significand(0) * significand(1),
            exponent: exponents[0] + exponents[1] + base,
        }
    }
}

#[inline(always)]
fn load<V: Products, D: Int8Products<V>>(bytes: D, [a, b, c, d]: &Quarters) -> [D::Bytes; 4] {
    [bytes.load(a), bytes.load(b), bytes.load(c), bytes.load(d)]
}

const _: () = assert!(K_STEP * K_STEPS == ELEMENTS && STEP == ELEMENTS / 2);
