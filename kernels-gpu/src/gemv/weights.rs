//! Weights in four bits times activations in 16, by tensor cores: one reading of the weights for up to eight tokens.
//!
//! A warp takes tiles of 16 rows. In each step its lanes load a chunk of 32 weights of rows `g` and `g + 8`, lane `4g + t` the chunk `t` of
//! the four that the step has in each row, and that chunk's activations of token `g`: a product of matrices asks for just these places. Which
//! of a chunk's elements come at which depth is free as long as weights and activations agree: those whose codes can be brought to
//! the halves of a word together do.
//!
//! Weights are scaled before they are multiplied: two bits times four are exact in either dtype, and powers of two are where they leave the
//! dtype's exponents some room. MXFP4 blocks outside of that ([`Activations::USUAL`]) have their rows computed by the definition,
//! as rows are that do not end in a whole chunk.
//!
//! The products of a step are summed by the tensor cores from zero, steps in f32, and the warps that share rows in f64: in a given order,
//! so that results are the same each time, but they are not the bits of `microscale_formats::weights`. How far tensor cores may be off
//! is in `microscale_kernels_abi`.

use microscale_formats::dot::{CHUNK, STREAMS};
use microscale_formats::weights::{self, GROUP};
use microscale_formats::{E4m3, E8m0};
use microscale_kernels_abi::{
    ApplyGlobal, GlobalSlot, OutputDtype, TILE_ROWS, TILE_TOKENS, WARP, WEIGHTS_THREADS, WeightsGrid,
    power_of_two,
};

use super::products::{Format as Codes4, Mxfp4, Nvfp4};
use super::{CHUNK_BYTES, Codes, Operand, Row, load_8, store, total};
use crate::dtype::{Bf16, Dtype, F16};
use crate::search::Ptx;
use crate::{ptx, warp};

/// Chunks of a row that a step has: one for each lane of four.
const QUAD: u32 = 4;
/// Warps in a thread block.
const WARPS: u32 = WEIGHTS_THREADS / WARP;
/// Sums that a lane has of a tile.
const SUMS: usize = 4;

/// What activations are, and weights become.
trait Activations: Dtype {
    const OUTPUT: OutputDtype;
    /// What [`Self::weights`] have to be multiplied with, as a power of two.
    const RAISE: i32;
    /// The exponents of MXFP4 scales under which scaled weights are exact, the first and the last.
    const USUAL: [u32; 2];

    /// Eight weights in four pairs.
    fn weights(codes: u32) -> [u32; 4];

    /// Eight activations in the pairs that [`Self::weights`] makes.
    fn pairs(activations: [u32; 4]) -> [u32; 4];

    /// A number in both halves.
    fn both(number: f32) -> u32;

    /// The product of both halves.
    fn scale(pair: u32, factor: u32) -> u32;

    /// sums + a · b.
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS];
}

/// The bits of elements 0 and 4, 1 and 5, 2 and 6, 3 and 7: signs where they belong, magnitudes `down` bits below the sign's.
#[inline(always)]
fn apart<const DOWN: u32>(codes: u32) -> [u32; 4] {
    const SIGNS: u32 = 0x8000_8000;
    let magnitudes = (0x7000_7000 >> DOWN) as u32;
    let pair = |up: u32| {
        let moved = if up >= DOWN { codes << (up - DOWN) } else { codes >> (DOWN - up) };
        (codes << up & SIGNS) | (moved & magnitudes)
    };
    [pair(12), pair(8), pair(4), pair(0)]
}

/// Elements 0 and 4, 1 and 5, 2 and 6, 3 and 7.
#[inline(always)]
fn in_halves([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (low, high) = (0x5410, 0x7632);
    [ptx::permute(a, c, low), ptx::permute(a, c, high), ptx::permute(b, d, low), ptx::permute(b, d, high)]
}

impl Activations for F16 {
    const OUTPUT: OutputDtype = OutputDtype::F16;
    #[cfg(not(microscale_fp4))]
    const RAISE: i32 = 14;
    #[cfg(microscale_fp4)]
    const RAISE: i32 = 0;
    const USUAL: [u32; 2] = [107, 131];

    #[inline(always)]
    fn weights(codes: u32) -> [u32; 4] {
        #[cfg(not(microscale_fp4))]
        return apart::<3>(codes);
        #[cfg(microscale_fp4)]
        super::products::pairs(codes)
    }

    #[inline(always)]
    fn pairs(activations: [u32; 4]) -> [u32; 4] {
        if cfg!(microscale_fp4) { activations } else { in_halves(activations) }
    }

    #[inline(always)]
    fn both(number: f32) -> u32 {
        ptx::f16x2(number, number)
    }

    #[inline(always)]
    fn scale(pair: u32, factor: u32) -> u32 {
        ptx::multiply_f16x2(pair, factor)
    }

    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_f16(a, b, sums)
    }
}

impl Activations for Bf16 {
    const OUTPUT: OutputDtype = OutputDtype::Bf16;
    const RAISE: i32 = 126;
    const USUAL: [u32; 2] = [16, 142];

    #[inline(always)]
    fn weights(codes: u32) -> [u32; 4] {
        apart::<6>(codes)
    }

    #[inline(always)]
    fn pairs(activations: [u32; 4]) -> [u32; 4] {
        in_halves(activations)
    }

    #[inline(always)]
    fn both(number: f32) -> u32 {
        ptx::bf16x2(number, number)
    }

    #[inline(always)]
    fn scale(pair: u32, factor: u32) -> u32 {
        ptx::multiply_bf16x2(pair, factor)
    }

    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_bf16(a, b, sums)
    }
}

/// A format's scales.
trait Weights<D: Activations>: Codes4 {
    /// Scaled weights are lower by this power of two.
    const LOWERED: i32;
    /// The scales of a chunk that is not there.
    const ANY: u32;
    /// Whether there are no other scales than those to be used.
    const ALWAYS_USUAL: bool;

    /// The factors of a chunk's halves, given the bytes of its scales, and whether they are to be used.
    fn factors(chunk: &Chunk) -> ([u32; 2], bool);

    /// A stream's sum and a group by the definition.
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32;
}

impl<D: Activations> Weights<D> for Nvfp4 {
    const LOWERED: i32 = if D::RAISE == Bf16::RAISE { 14 } else { 7 };
    const ANY: u32 = 0;
    const ALWAYS_USUAL: bool = true;

    #[inline(always)]
    fn factors(chunk: &Chunk) -> ([u32; 2], bool) {
        let factors = Self::pair(chunk.scales)
            .map(|scale| D::both(scale * power_of_two(D::RAISE - <Self as Weights<D>>::LOWERED)));
        (factors, true)
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_nvfp4::<Ptx>(sum, fraction, E4m3::from_bits(scale))
    }
}

impl<D: Activations> Weights<D> for Mxfp4 {
    const LOWERED: i32 = if D::RAISE == Bf16::RAISE { 14 } else { 3 };
    const ANY: u32 = 127;
    const ALWAYS_USUAL: bool = false;

    #[inline(always)]
    fn factors(chunk: &Chunk) -> ([u32; 2], bool) {
        let [first, last] = D::USUAL;
        let usual = chunk.scales.wrapping_sub(first) <= last - first;
        let [a, b, c, d] = chunk.codes;
        // A block of zeros may have any scale that is a number.
        let zeros = (a | b | c | d) & 0x7777_7777 == 0 && chunk.scales != u32::from(E8m0::NAN.to_bits());
        let byte = if usual { chunk.scales } else { Self::any::<D>() };
        let raised = (D::RAISE - <Self as Weights<D>>::LOWERED) as u32;
        let factor = D::both(f32::from_bits(byte.wrapping_add(raised) << 23));
        ([factor; 2], usual || zeros)
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_mxfp4::<Ptx>(sum, fraction, E8m0::from_bits(scale))
    }
}

impl Mxfp4 {
    const fn any<D: Activations>() -> u32 {
        <Self as Weights<D>>::ANY
    }
}

/// A chunk of a row: its codes and the bytes of its scales.
#[derive(Clone, Copy)]
struct Chunk {
    codes: Codes,
    scales: u32,
}

/// What a lane loads for a step.
#[derive(Clone, Copy)]
struct Step<const TILES: usize> {
    /// Of each tile's rows `g` and `g + 8`.
    rows: [[Chunk; 2]; TILES],
    /// A chunk of activations, eight at a time.
    activations: [[u32; 4]; 4],
}

/// Where a lane's chunks lie.
struct Lane<const TILES: usize> {
    rows: [[Row; 2]; TILES],
    /// The activations of its token; null if there is none.
    activations: *const u8,
    chunks: u32,
}

impl<const TILES: usize> Lane<TILES> {
    /// Loads what the lane has of a step.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn load<F: Weights<D>, D: Activations>(&self, chunk: u32) -> Step<TILES> {
        let none = Chunk { codes: [0; 4], scales: F::ANY };
        let mut step = Step { rows: [[none; 2]; TILES], activations: [[0; 4]; 4] };
        if chunk < self.chunks {
            // SAFETY: the chunk is in the rows; whole chunks lie on multiples of 16 bytes, and their scales on one of their number.
            unsafe {
                let places = step.rows.as_flattened_mut().iter_mut().zip(self.rows.as_flattened());
                for (loaded, row) in places {
                    let scales = row.scales.wrapping_add((chunk * F::BLOCKS) as usize);
                    loaded.codes = ptx::load_16_once(row.codes.wrapping_add((chunk * CHUNK_BYTES) as usize));
                    loaded.scales =
                        if F::BLOCKS == 1 { u32::from(*scales) } else { u32::from(*scales.cast::<u16>()) };
                }
                if !self.activations.is_null() {
                    let first = self.activations.wrapping_add((chunk * CHUNK as u32 * D::BYTES) as usize);
                    let load = |i: usize| ptx::load_16(first.wrapping_add(16 * i));
                    step.activations = [load(0), load(1), load(2), load(3)];
                }
            }
        }
        step
    }
}

/// The products of the words `I` of two chunks, under their scales, added to sums.
#[inline(always)]
fn multiply<D: Activations, const I: usize>(
    sums: [f32; SUMS],
    rows: &[Chunk; 2],
    factors: [u32; 2],
    activations: [u32; 4],
) -> [f32; SUMS] {
    let scaled = |row: usize| {
        let [a, b, c, d] = D::weights(rows[row].codes[I]);
        let scale = |pair| D::scale(pair, factors[row]);
        [scale(a), scale(b), scale(c), scale(d)]
    };
    let ([a, b, c, d], [e, f, g, h]) = (scaled(0), scaled(1));
    let sums = D::multiply([a, e, b, f], [activations[0], activations[1]], sums);
    D::multiply([c, g, d, h], [activations[2], activations[3]], sums)
}

/// The sums of a step, added to those before it. Gives whether all scales are to be used.
#[inline(always)]
fn add<F: Weights<D>, D: Activations, const TILES: usize>(
    sums: &mut [[f32; SUMS]; TILES],
    step: &Step<TILES>,
) -> bool {
    let mut usual = true;
    let [a, b, c, d] = step.activations;
    let activations = [D::pairs(a), D::pairs(b), D::pairs(c), D::pairs(d)];
    for (sums, rows) in sums.iter_mut().zip(&step.rows) {
        let [(low, low_usual), (high, high_usual)] = [F::factors(&rows[0]), F::factors(&rows[1])];
        usual &= low_usual && high_usual;
        // Written out: the compiler keeps a loop's indices in memory.
        let of_step = multiply::<D, 0>([0.0; SUMS], rows, [low[0], high[0]], activations[0]);
        let of_step = multiply::<D, 1>(of_step, rows, [low[0], high[0]], activations[1]);
        let of_step = multiply::<D, 2>(of_step, rows, [low[1], high[1]], activations[2]);
        let of_step = multiply::<D, 3>(of_step, rows, [low[1], high[1]], activations[3]);
        for i in 0..SUMS {
            sums[i] += of_step[i];
        }
    }
    usual
}

/// A row's sum with a token's activations, by the definition.
///
/// # Safety
/// As for the kernels; all lanes of the warp take part.
#[inline(always)]
unsafe fn defined<F: Weights<D>, D: Activations>(row: Row, activations: *const u8, cols: u64) -> f64 {
    let mut sum = 0.0;
    let mut start = u64::from(warp::lane()) * CHUNK as u64;
    while start < cols {
        let mut first = start;
        while first < cols && first < start + CHUNK as u64 {
            // SAFETY: the group exists, and has codes and a scale even where its row ends before.
            let ([low, high], scale) = unsafe {
                (
                    load_8(row.codes.wrapping_add((first / 2) as usize)),
                    *row.scales.wrapping_add((first / (2 * F::BLOCK_BYTES)) as usize),
                )
            };
            let codes = u64::from(low) | u64::from(high) << 32;
            let mut fraction = 0.0;
            let mut i = 0;
            while i < GROUP as u64 && first + i < cols {
                let code = (codes >> (4 * i)) as u32;
                // The bits moved to those of an f32 are the weight times 2^-126.
                let weight = f32::from_bits((code & 7) << 22 | code << 28 & 1 << 31) * power_of_two(126 - 7);
                // SAFETY: the activation exists.
                let bits = unsafe { *activations.wrapping_add(((first + i) * 2) as usize).cast::<u16>() };
                fraction = ptx::fma_f32(weight, D::widen(&[u32::from(bits), 0, 0, 0], 0), fraction);
                i += 1;
            }
            sum = F::add_group(sum, fraction, scale);
            first += GROUP as u64;
        }
        start += (STREAMS * CHUNK) as u64;
    }
    64.0 * total([f64::from(sum)])
}

/// The operands of a kernel.
struct Job {
    weights: Operand,
    activations: *const u8,
    out: *mut u8,
    grid: WeightsGrid,
}

impl Job {
    #[inline(always)]
    fn token(&self, token: u32) -> *const u8 {
        self.activations.wrapping_add((u64::from(token) * self.grid.cols * 2) as usize)
    }

    /// Stores a sum of a row and a token.
    ///
    /// # Safety
    /// As for the kernels; nobody else stores this one.
    #[inline(always)]
    unsafe fn store<D: Activations>(&self, row: u64, token: u32, sum: f64) {
        // SAFETY: the caller's promise.
        unsafe {
            store(self.out, u64::from(token) * self.grid.rows + row, self.weights.scaled(sum), D::OUTPUT)
        }
    }

    /// A row with tokens, by the definition.
    ///
    /// # Safety
    /// As for the kernels; all lanes of the warp take part, and no other warp has this row and token.
    #[inline(always)]
    unsafe fn define<F: Weights<D>, D: Activations>(&self, row: u64, tokens: [u32; 2]) {
        let [mut token, end] = tokens;
        while token < end {
            // SAFETY: the row and the token exist; one lane stores.
            unsafe {
                let weights = self.weights.row::<F>(row, self.grid.blocks);
                let sum = defined::<F, D>(weights, self.token(token), self.grid.cols);
                if warp::lane() == 0 {
                    self.store::<D>(row, token, sum);
                }
            }
            token += 1;
        }
    }
}

/// A row a warp.
///
/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn cut<F: Weights<D>, D: Activations>(job: Job) {
    let row = u64::from(warp::thread_block()) * u64::from(WARPS) + u64::from(warp::thread() / WARP);
    if row < job.grid.rows {
        // SAFETY: the whole warp is here, and its row is its own.
        unsafe { job.define::<F, D>(row, [0, job.grid.tokens]) };
    }
}

/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn weigh<F: Weights<D>, D: Activations, const TILES: usize>(job: Job) {
    let rows_a_group = const { TILES as u32 * TILE_ROWS };
    let grid = &job.grid;
    let (block, lot) = grid.lots.divide_32(warp::thread_block());
    let (number, lane) = (warp::thread() / WARP, warp::lane());
    let (group, split) = (number / grid.splits, number % grid.splits);
    let groups = WARPS / grid.splits;
    let before = (u64::from(block) * u64::from(groups) + u64::from(group)) * u64::from(rows_a_group);
    let tokens = [lot * TILE_TOKENS, grid.tokens.min((lot + 1) * TILE_TOKENS)];

    let token = tokens[0] + lane / QUAD;
    let mut of_lane = Lane {
        rows: [[job.weights.row::<F>(0, 0); 2]; TILES],
        activations: if token < tokens[1] { job.token(token) } else { core::ptr::null() },
        chunks: (grid.cols / CHUNK as u64) as u32,
    };
    for (slot, i) in of_lane.rows.as_flattened_mut().iter_mut().zip(0..) {
        // Past the last row it is taken again.
        let row = (before + u64::from(i * (TILE_ROWS / 2) + lane / QUAD)).min(grid.rows - 1);
        *slot = job.weights.row::<F>(row, grid.blocks);
    }

    let mut sums = [[0.0; SUMS]; TILES];
    let mut usual = true;
    let steps = of_lane.chunks.div_ceil(QUAD);
    let next = grid.splits * QUAD;
    let (mut step, mut chunk) = (split, split * QUAD + lane % QUAD);
    // A step is on its way while another is computed. They take turns in two places, so that nothing is moved.
    // SAFETY, of these and those below: the rows are the operands', by the caller's contract.
    let mut a = unsafe { of_lane.load::<F, D>(chunk) };
    while step < steps {
        // SAFETY: as above.
        let b = unsafe { of_lane.load::<F, D>(chunk + next) };
        usual &= add::<F, D, TILES>(&mut sums, &a);
        if step + grid.splits >= steps {
            break;
        }
        // SAFETY: as above.
        a = unsafe { of_lane.load::<F, D>(chunk + 2 * next) };
        usual &= add::<F, D, TILES>(&mut sums, &b);
        (step, chunk) = (step + 2 * grid.splits, chunk + 2 * next);
    }

    let all_usual = warp::ballot(usual) == u32::MAX;
    let shared = warp::shared::<f32>();
    let per_warp = const { (TILES * SUMS) as u32 * WARP };
    let flags = shared.wrapping_add((WARPS * per_warp) as usize).cast::<u32>();
    // SAFETY: each lane has its own places in the memory that the launch gives, and each warp a flag.
    unsafe {
        let mut place = shared.wrapping_add((number * per_warp + lane) as usize);
        for sum in sums.as_flattened() {
            *place = *sum;
            place = place.wrapping_add(WARP as usize);
        }
        if lane == 0 {
            *flags.wrapping_add(number as usize) = u32::from(all_usual);
        }
    }
    warp::barrier();
    let mut output = warp::thread();
    let outputs = groups * rows_a_group * TILE_TOKENS;
    while output < outputs {
        let (in_group, rest) = (output % rows_a_group, output / rows_a_group);
        let (of_lot, group) = (rest % TILE_TOKENS, rest / TILE_TOKENS);
        let row = (u64::from(block) * u64::from(groups) + u64::from(group)) * u64::from(rows_a_group)
            + u64::from(in_group);
        let token = tokens[0] + of_lot;
        // Where the tensor core has it: rows 8 apart and tokens side by side are in one lane.
        let (tile, in_tile) = (in_group / TILE_ROWS, in_group % TILE_ROWS);
        let i = tile * SUMS as u32 + in_tile / (TILE_ROWS / 2) * 2 + of_lot % 2;
        let place = i * WARP + in_tile % (TILE_ROWS / 2) * QUAD + of_lot / 2;
        let (mut sum, mut all) = (0.0, 1);
        let mut split = 0;
        while split < grid.splits {
            let number = group * grid.splits + split;
            // SAFETY: written by a lane of this block before the barrier.
            unsafe {
                sum += f64::from(*shared.wrapping_add((number * per_warp + place) as usize));
                all &= *flags.wrapping_add(number as usize);
            }
            split += 1;
        }
        if row < grid.rows && token < tokens[1] && all != 0 {
            // SAFETY: the result exists, and is this thread's.
            unsafe { job.store::<D>(row, token, sum * f64::from(power_of_two(F::LOWERED))) };
        }
        output += WEIGHTS_THREADS;
    }
    if !F::ALWAYS_USUAL {
        let mut all = 1;
        let mut i = 0;
        while i < grid.splits {
            // SAFETY: as above.
            all &= unsafe { *flags.wrapping_add((group * grid.splits + i) as usize) };
            i += 1;
        }
        if all == 0 {
            let mut in_group = split;
            while in_group < rows_a_group && before + u64::from(in_group) < grid.rows {
                // SAFETY: the warps of a group share its rows, and nobody stored them above.
                unsafe { job.define::<F, D>(before + u64::from(in_group), tokens) };
                in_group += grid.splits;
            }
        }
    }
}

/// The entry points.
macro_rules! entries {
    ($($name:ident = $body:expr,)+) => {$(
        /// Multiplies weights with activations.
        ///
        /// # Safety
        /// `codes` and `scales` hold the rows of `grid`'s matrix, linear, on multiples of 8 bytes and of 1; `activations` holds its
        /// tokens, without gaps, aligned to their dtype. But for the kernels that end in `cut`, rows are whole chunks and start on 16
        /// bytes, their scales on one of their number in a chunk, and activations on 16 bytes. `out` has room for a result a token and row,
        /// aligned to its dtype. `global` is a slot. All in global memory; `out` overlaps nothing, and nothing writes the others meanwhile.
        /// The launch shape and the size of shared memory are those that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            codes: *const u8,
            scales: *const u8,
            global: *const GlobalSlot,
            activations: *const u8,
            out: *mut u8,
            grid: WeightsGrid,
            apply: ApplyGlobal,
        ) {
            let weights = Operand { codes, scales, global, apply };
            // SAFETY: the same contract.
            unsafe { $body(Job { weights, activations, out, grid }) }
        }
    )+};
}

entries! {
    nvfp4_gemv_weights_f16_rows16 = weigh::<Nvfp4, F16, 1>,
    nvfp4_gemv_weights_f16_rows32 = weigh::<Nvfp4, F16, 2>,
    nvfp4_gemv_weights_f16_cut = cut::<Nvfp4, F16>,
    nvfp4_gemv_weights_bf16_rows16 = weigh::<Nvfp4, Bf16, 1>,
    nvfp4_gemv_weights_bf16_rows32 = weigh::<Nvfp4, Bf16, 2>,
    nvfp4_gemv_weights_bf16_cut = cut::<Nvfp4, Bf16>,
    mxfp4_gemv_weights_f16_rows16 = weigh::<Mxfp4, F16, 1>,
    mxfp4_gemv_weights_f16_rows32 = weigh::<Mxfp4, F16, 2>,
    mxfp4_gemv_weights_f16_cut = cut::<Mxfp4, F16>,
    mxfp4_gemv_weights_bf16_rows16 = weigh::<Mxfp4, Bf16, 1>,
    mxfp4_gemv_weights_bf16_rows32 = weigh::<Mxfp4, Bf16, 2>,
    mxfp4_gemv_weights_bf16_cut = cut::<Mxfp4, Bf16>,
}
