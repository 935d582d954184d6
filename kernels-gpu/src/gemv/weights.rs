//! Weights in four bits times activations in 16, by tensor cores: one reading of the weights for up to eight tokens.
//!
//! A tensor core multiplies a tile of 16 places of rows with eight places of tokens. In each step lane `4p + t` of a
//! warp loads chunks of 32 weights for places `p` and `p + 8`, and the same chunk of the activations at place `p`: a
//! product of matrices asks for just these. Which of a chunk's elements come at which depth is free as long as weights
//! and activations agree: those whose codes can be brought to the halves of a word together do.
//!
//! One token needs one place, so the other seven are given parts of the same row and of the same token, segments, and
//! what a segment of a row and another one of a token come to is ignored. A warp then reads 512 bytes of a row at once.
//!
//! Weights are scaled before they are multiplied: two bits times four are exact in either dtype, and powers of two are
//! where they leave the dtype's exponents some room. Rows with MXFP4 scales outside of that ([`Activations::USUAL`])
//! are computed by the definition, as all are whose rows are not whole chunks.
//!
//! The products of a step are summed by the tensor cores from zero, steps in f32, and the parts of a row in f64: in a
//! given order, so that results are the same each time, but not the bits of `microscale_formats::weights`, which says
//! how far they may be off.

use microscale_formats::dot::{CHUNK, STREAMS};
use microscale_formats::weights::{self, GROUP};
use microscale_formats::{E4m3, E8m0};
use microscale_kernels_abi::{
    ApplyGlobal, GlobalSlot, OutputDtype, WARP, WEIGHTS_THREADS, WeightsGrid, power_of_two,
};

use super::products::{Format as Products4, Mxfp4, Nvfp4};
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

/// How weights and activations of a dtype meet in the tensor cores.
trait Activations {
    type Dtype: Dtype;
    const OUTPUT: OutputDtype;
    /// By how many powers of two [`Self::weights`] are below the weights under scales that are the factors.
    const BELOW: i32;
    /// The exponents of MXFP4 scales under which scaled weights are exact, the first and the last.
    const USUAL: [u32; 2];
    /// Scaled weights are lower by this power of two, in NVFP4 and in MXFP4, so that they fit.
    const LOWERED: [i32; 2];

    /// A factor in both halves.
    fn factor(scale: f32) -> u32;

    /// The factors for two scales of NVFP4, given as bytes.
    #[inline(always)]
    fn factors(scales: u32) -> [u32; 2] {
        let [low, high] = Nvfp4::pair(scales);
        let raised = power_of_two(Self::BELOW - Self::LOWERED[0]);
        [Self::factor(low * raised), Self::factor(high * raised)]
    }

    /// Eight weights in four pairs, scaled.
    fn weights(codes: u32, factor: u32) -> [u32; 4];

    /// Eight activations in the pairs that [`Self::weights`] makes.
    fn pairs(activations: [u32; 4]) -> [u32; 4];

    /// sums + a · b.
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS];
}

/// With f16: a weight's bits, moved to where f16 has an exponent's last two bits and a significand's first, are the
/// weight times 2^-14. Its byte is the upper one of the f16.
struct WithF16;

impl Activations for WithF16 {
    type Dtype = F16;
    const OUTPUT: OutputDtype = OutputDtype::F16;
    const BELOW: i32 = if cfg!(microscale_fp4) { 0 } else { 14 };
    const USUAL: [u32; 2] = [107, 131];
    const LOWERED: [i32; 2] = [7, 3];

    #[inline(always)]
    fn factor(scale: f32) -> u32 {
        ptx::f16x2(scale, scale)
    }

    #[cfg(microscale_sm90)]
    #[inline(always)]
    fn factors(scales: u32) -> [u32; 2] {
        let raised = const { ((15 + Self::BELOW - Self::LOWERED[0]) as u32) << 10 };
        let pair = ptx::multiply_f16x2(ptx::e4m3x2_to_f16x2(scales), raised << 16 | raised);
        [ptx::permute(pair, 0, 0x1010), ptx::permute(pair, 0, 0x3232)]
    }

    #[inline(always)]
    fn weights(codes: u32, factor: u32) -> [u32; 4] {
        #[cfg(not(microscale_fp4))]
        let [a, b, c, d] = {
            const SIGNS: u32 = 0x8080_8080;
            const MAGNITUDES: u32 = 0x0E0E_0E0E;
            let even = (codes << 4 & SIGNS) | (codes << 1 & MAGNITUDES);
            let odd = (codes & SIGNS) | (codes >> 3 & MAGNITUDES);
            let (first, second) = (0x1404, 0x3424);
            [
                ptx::permute(even, 0, first),
                ptx::permute(even, 0, second),
                ptx::permute(odd, 0, first),
                ptx::permute(odd, 0, second),
            ]
        };
        #[cfg(microscale_fp4)]
        let [a, b, c, d] = super::products::pairs(codes);
        let scale = |pair| ptx::multiply_f16x2(pair, factor);
        [scale(a), scale(b), scale(c), scale(d)]
    }

    #[inline(always)]
    fn pairs([a, b, c, d]: [u32; 4]) -> [u32; 4] {
        if cfg!(microscale_fp4) {
            return [a, b, c, d];
        }
        let (even, odd) = (0x5410, 0x7632);
        [ptx::permute(a, b, even), ptx::permute(c, d, even), ptx::permute(a, b, odd), ptx::permute(c, d, odd)]
    }

    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_f16(a, b, sums)
    }
}

/// With bf16, whose exponents lie across its bytes: signs and magnitudes are moved apart.
struct WithBf16;

impl Activations for WithBf16 {
    type Dtype = Bf16;
    const OUTPUT: OutputDtype = OutputDtype::Bf16;
    const BELOW: i32 = 126;
    const USUAL: [u32; 2] = [16, 142];
    const LOWERED: [i32; 2] = [14, 14];

    #[inline(always)]
    fn factor(scale: f32) -> u32 {
        ptx::bf16x2(scale, scale)
    }

    #[inline(always)]
    fn weights(codes: u32, factor: u32) -> [u32; 4] {
        const SIGNS: u32 = 0x8000_8000;
        const MAGNITUDES: u32 = 0x01C0_01C0;
        let scale = |pair| ptx::multiply_bf16x2(pair, factor);
        [
            scale((codes << 12 & SIGNS) | (codes << 6 & MAGNITUDES)),
            scale((codes << 8 & SIGNS) | (codes << 2 & MAGNITUDES)),
            scale((codes << 4 & SIGNS) | (codes >> 2 & MAGNITUDES)),
            scale((codes & SIGNS) | (codes >> 6 & MAGNITUDES)),
        ]
    }

    #[inline(always)]
    fn pairs([a, b, c, d]: [u32; 4]) -> [u32; 4] {
        let (low, high) = (0x5410, 0x7632);
        [ptx::permute(a, c, low), ptx::permute(a, c, high), ptx::permute(b, d, low), ptx::permute(b, d, high)]
    }

    #[inline(always)]
    fn multiply(a: [u32; 4], b: [u32; 2], sums: [f32; SUMS]) -> [f32; SUMS] {
        warp::multiply_bf16(a, b, sums)
    }
}

/// A format's scales.
trait Weights: Products4 {
    /// Where in [`Activations::LOWERED`] it is.
    const PLACE: usize;

    /// How far a chunk's scale is from the first that is to be used, if there are others: above the last one's distance
    /// for those below, too.
    #[inline(always)]
    fn distance<D: Activations>(_: u32) -> u32 {
        0
    }

    /// The largest distance of a scale that is to be used.
    fn farthest<D: Activations>() -> u32 {
        0
    }

    /// The factors of a chunk's halves, given the bytes of its scales.
    fn factors<D: Activations>(scales: u32) -> [u32; 2];

    /// A stream's sum and a group by the definition.
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32;
}

impl Weights for Nvfp4 {
    const PLACE: usize = 0;

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        D::factors(scales)
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_nvfp4::<Ptx>(sum, fraction, E4m3::from_bits(scale))
    }
}

impl Weights for Mxfp4 {
    const PLACE: usize = 1;

    #[inline(always)]
    fn distance<D: Activations>(scales: u32) -> u32 {
        scales.wrapping_sub(D::USUAL[0])
    }

    #[inline(always)]
    fn farthest<D: Activations>() -> u32 {
        D::USUAL[1] - D::USUAL[0]
    }

    #[inline(always)]
    fn factors<D: Activations>(scales: u32) -> [u32; 2] {
        // Some number under which zeros stay zeros, if the scale is not to be used.
        let distance = Self::distance::<D>(scales).min(Self::farthest::<D>());
        let raised = const { D::USUAL[0] as i32 + D::BELOW - D::LOWERED[1] } as u32;
        [D::factor(f32::from_bits((distance + raised) << 23)); 2]
    }

    #[inline(always)]
    fn add_group(sum: f32, fraction: f32, scale: u8) -> f32 {
        weights::add_mxfp4::<Ptx>(sum, fraction, E8m0::from_bits(scale))
    }
}

/// A chunk of a row: its codes and the bytes of its scales.
#[derive(Clone, Copy)]
struct Chunk {
    codes: Codes,
    scales: u32,
}

/// What a lane loads for a step.
type Step<const TILES: usize> = [[Chunk; 2]; TILES];

/// Where a lane's chunks lie.
struct Lane<const TILES: usize> {
    /// Of each tile's places `p` and `p + 8`.
    rows: [[Row; 2]; TILES],
    /// The activations of its token.
    activations: *const u8,
    /// The number of a row's last chunk.
    last: u32,
}

impl<const TILES: usize> Lane<TILES> {
    /// Loads a chunk of each row: the last one in the place of those behind it.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn load<F: Weights>(&self, chunk: u32) -> Step<TILES> {
        let place = chunk.min(self.last);
        let mut step = [[Chunk { codes: [0; 4], scales: 0 }; 2]; TILES];
        for (loaded, row) in step.as_flattened_mut().iter_mut().zip(self.rows.as_flattened()) {
            let codes = row.codes.wrapping_add((place * CHUNK_BYTES) as usize);
            let scales = row.scales.wrapping_add((place * F::BLOCKS) as usize);
            // SAFETY: the chunk is in the row; whole chunks lie on multiples of 16 bytes, and their scales on one of
            // their number.
            unsafe {
                loaded.codes = ptx::load_16_once_here(codes);
                loaded.scales =
                    if F::BLOCKS == 1 { ptx::load_u8_here(scales) } else { ptx::load_u16_here(scales) };
            }
        }
        step
    }

    /// Loads a chunk of the token's activations, eight at a time: zeros if it is not there.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn activations<D: Activations>(&self, chunk: u32) -> [[u32; 4]; 4] {
        let place = chunk.min(self.last);
        let activations = self.activations.wrapping_add((place * CHUNK as u32 * D::Dtype::BYTES) as usize);
        let activations = if chunk == place { activations } else { (&raw const NOTHING).cast() };
        // SAFETY: the chunk is in the row, and lies on a multiple of 16 bytes.
        let load = |i: usize| D::pairs(unsafe { ptx::load_16_here(activations.wrapping_add(16 * i)) });
        [load(0), load(1), load(2), load(3)]
    }

    /// Whether all chunks from one on, so many apart, whose scales are not to be used are zeros under a number.
    ///
    /// # Safety
    /// As for the kernels.
    #[inline(always)]
    unsafe fn usual_but_zeros<F: Weights, D: Activations>(&self, mut chunk: u32, apart: u32) -> bool {
        let mut usual = true;
        while chunk <= self.last {
            // SAFETY: the chunk is in the rows.
            let step = unsafe { self.load::<F>(chunk) };
            for Chunk { codes: [a, b, c, d], scales } in step.as_flattened() {
                let zeros = (a | b | c | d) & 0x7777_7777 == 0 && *scales != u32::from(E8m0::NAN.to_bits());
                usual &= zeros || F::distance::<D>(*scales) <= F::farthest::<D>();
            }
            chunk += apart;
        }
        usual
    }
}

/// A chunk of activations that are not there.
static NOTHING: [u128; 4] = [0; 4];

/// The products of the words `I` of two chunks, under their scales, added to sums.
#[inline(always)]
fn multiply<D: Activations, const I: usize>(
    sums: [f32; SUMS],
    rows: &[Chunk; 2],
    factors: [u32; 2],
    activations: [u32; 4],
) -> [f32; SUMS] {
    let [a, b, c, d] = D::weights(rows[0].codes[I], factors[0]);
    let [e, f, g, h] = D::weights(rows[1].codes[I], factors[1]);
    let sums = D::multiply([a, e, b, f], [activations[0], activations[1]], sums);
    D::multiply([c, g, d, h], [activations[2], activations[3]], sums)
}

/// The sums of a step, added to those before it, and the largest distance of its scales.
#[inline(always)]
fn add<F: Weights, D: Activations, const TILES: usize>(
    sums: &mut [[f32; SUMS]; TILES],
    far: &mut u32,
    step: &Step<TILES>,
    [a, b, c, d]: [[u32; 4]; 4],
) {
    for (sums, rows) in sums.iter_mut().zip(step) {
        for chunk in rows {
            *far = F::distance::<D>(chunk.scales).max(*far);
        }
        let [low, high] = [F::factors::<D>(rows[0].scales), F::factors::<D>(rows[1].scales)];
        // Written out: the compiler keeps a loop's indices in memory.
        let of_step = multiply::<D, 0>([0.0; SUMS], rows, [low[0], high[0]], a);
        let of_step = multiply::<D, 1>(of_step, rows, [low[0], high[0]], b);
        let of_step = multiply::<D, 2>(of_step, rows, [low[1], high[1]], c);
        let of_step = multiply::<D, 3>(of_step, rows, [low[1], high[1]], d);
        for i in 0..SUMS {
            sums[i] += of_step[i];
        }
    }
}

/// A row's sum with a token's activations, by the definition.
///
/// # Safety
/// As for the kernels; all lanes of the warp take part.
#[inline(always)]
unsafe fn defined<F: Weights, D: Activations>(row: Row, activations: *const u8, cols: u64) -> f64 {
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
                fraction = ptx::fma_f32(weight, D::Dtype::widen(&[u32::from(bits), 0, 0, 0], 0), fraction);
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
    unsafe fn define<F: Weights, D: Activations>(&self, row: u64, tokens: [u32; 2]) {
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
unsafe fn cut<F: Weights, D: Activations>(job: Job) {
    let row = u64::from(warp::thread_block()) * u64::from(WARPS) + u64::from(warp::thread() / WARP);
    if row < job.grid.rows {
        // SAFETY: the whole warp is here, and its row is its own.
        unsafe { job.define::<F, D>(row, [0, job.grid.tokens]) };
    }
}

/// A number over 2^`bits`, and what is left.
#[inline(always)]
fn parts(number: u32, bits: u32) -> (u32, u32) {
    (number >> bits, number & ((1 << bits) - 1))
}

/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn weigh<F: Weights, D: Activations, const TILES: usize>(job: Job) {
    let grid = &job.grid;
    let (block, lot) = grid.lots.divide_32(warp::thread_block());
    let (number, lane) = (warp::thread() / WARP, warp::lane());
    let (group, split) = parts(number, grid.split_bits);
    let (place, segment) = parts(lane / QUAD, grid.segment_bits);
    let first_row =
        |group: u32| ((u64::from(block) << grid.group_bits()) + u64::from(group)) << grid.group_row_bits();
    let before = first_row(group);
    let tokens = [lot << grid.lot_bits(), grid.tokens.min((lot + 1) << grid.lot_bits())];
    let (splits, group_rows) = (1 << grid.split_bits, 1 << grid.group_row_bits());

    let mut of_lane = Lane {
        rows: [[job.weights.row::<F>(0, 0); 2]; TILES],
        // What tokens that are not there come to is not stored.
        activations: job.token((tokens[0] + place).min(tokens[1] - 1)),
        last: (grid.cols / CHUNK as u64) as u32 - 1,
    };
    for (row, i) in of_lane.rows.as_flattened_mut().iter_mut().zip(0..) {
        // Past the last row it is taken again.
        let number = before + u64::from((i << grid.lot_bits()) + place);
        *row = job.weights.row::<F>(number.min(grid.rows - 1), grid.blocks);
    }

    let mut sums = [[0.0; SUMS]; TILES];
    let mut far = 0;
    let each_bits = const { QUAD.ilog2() } + grid.segment_bits;
    let steps = (of_lane.last >> each_bits) + 1;
    let apart = 1 << (each_bits + grid.split_bits);
    let start = (split << each_bits) + segment * QUAD + lane % QUAD;
    let (mut step, mut chunk) = (split, start);
    // A step's weights are on their way while another one is computed. They take turns in two places, so that nothing
    // is moved. Loads behind branches stay where they are; the assembler moves others to where they are needed. SAFETY,
    // of these and those below: the rows are the operands', by the caller's contract.
    let mut a = unsafe { of_lane.load::<F>(chunk) };
    let mut b = a;
    while step < steps {
        // SAFETY: as above.
        let activations = unsafe {
            if step + splits < steps {
                b = of_lane.load::<F>(chunk + apart);
            }
            of_lane.activations::<D>(chunk)
        };
        add::<F, D, TILES>(&mut sums, &mut far, &a, activations);
        if step + splits >= steps {
            break;
        }
        // SAFETY: as above.
        let activations = unsafe {
            if step + 2 * splits < steps {
                a = of_lane.load::<F>(chunk + 2 * apart);
            }
            of_lane.activations::<D>(chunk + apart)
        };
        add::<F, D, TILES>(&mut sums, &mut far, &b, activations);
        (step, chunk) = (step + 2 * splits, chunk + 2 * apart);
    }

    // SAFETY: as above.
    let usual = far <= F::farthest::<D>() || unsafe { of_lane.usual_but_zeros::<F, D>(start, apart) };
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
    while output < 1 << (grid.group_bits() + grid.group_row_bits() + grid.lot_bits()) {
        let (rest, in_group) = parts(output, grid.group_row_bits());
        let (group, of_lot) = parts(rest, grid.lot_bits());
        let (row, token) = (first_row(group) + u64::from(in_group), tokens[0] + of_lot);
        let (mut sum, mut all_usual) = (0.0, 1);
        let mut part = 0;
        while part < splits << grid.segment_bits {
            let (split, segment) = parts(part, grid.segment_bits);
            let number = (group << grid.split_bits) + split;
            // Where the tensor core has it: places 8 rows apart, and two side by side of tokens, are in one lane.
            let (half, place) = parts(in_group, grid.lot_bits());
            let [place, token_place] = [place, of_lot].map(|place| (place << grid.segment_bits) + segment);
            let i = half * 2 + token_place % 2;
            let from = (number * SUMS as u32 * TILES as u32 + i) * WARP + place * QUAD + token_place / 2;
            // SAFETY: written by a lane of this block before the barrier.
            unsafe {
                sum += f64::from(*shared.wrapping_add(from as usize));
                all_usual &= *flags.wrapping_add(number as usize);
            }
            part += 1;
        }
        if row < grid.rows && token < tokens[1] && all_usual != 0 {
            // SAFETY: the result exists, and is this thread's.
            unsafe {
                job.store::<D>(row, token, sum * f64::from(power_of_two(const { D::LOWERED[F::PLACE] })))
            };
        }
        output += WEIGHTS_THREADS;
    }
    if F::farthest::<D>() > 0 {
        let mut all_usual = 1;
        let mut i = 0;
        while i < splits {
            // SAFETY: as above.
            all_usual &= unsafe { *flags.wrapping_add(((group << grid.split_bits) + i) as usize) };
            i += 1;
        }
        let mut in_group = split;
        while all_usual == 0 && in_group < group_rows && before + u64::from(in_group) < grid.rows {
            // SAFETY: the warps of a group share its rows, and nobody stored them above.
            unsafe { job.define::<F, D>(before + u64::from(in_group), tokens) };
            in_group += splits;
        }
    }
}

/// The entry points.
macro_rules! entries {
    ($($name:ident = $body:expr,)+) => {$(
        /// Multiplies weights with activations.
        ///
        /// # Safety
        /// `codes` and `scales` hold the rows of `grid`'s matrix, linear, on multiples of 8 bytes and of 1;
        /// `activations` holds its tokens, without gaps, aligned to their dtype. But for the kernels that end in `cut`,
        /// rows are whole chunks and start on 16 bytes, their scales on one of their number in a chunk, and activations
        /// on 16 bytes. `out` has room for a result a token and row, aligned to its dtype. `global` is a slot. All in
        /// global memory; `out` overlaps nothing, and nothing writes the others meanwhile. The launch shape and the
        /// size of shared memory are those that `microscale_kernels_abi` gives.
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
    nvfp4_gemv_weights_f16_tiles1 = weigh::<Nvfp4, WithF16, 1>,
    nvfp4_gemv_weights_f16_tiles2 = weigh::<Nvfp4, WithF16, 2>,
    nvfp4_gemv_weights_f16_cut = cut::<Nvfp4, WithF16>,
    nvfp4_gemv_weights_bf16_tiles1 = weigh::<Nvfp4, WithBf16, 1>,
    nvfp4_gemv_weights_bf16_tiles2 = weigh::<Nvfp4, WithBf16, 2>,
    nvfp4_gemv_weights_bf16_cut = cut::<Nvfp4, WithBf16>,
    mxfp4_gemv_weights_f16_tiles1 = weigh::<Mxfp4, WithF16, 1>,
    mxfp4_gemv_weights_f16_tiles2 = weigh::<Mxfp4, WithF16, 2>,
    mxfp4_gemv_weights_f16_cut = cut::<Mxfp4, WithF16>,
    mxfp4_gemv_weights_bf16_tiles1 = weigh::<Mxfp4, WithBf16, 1>,
    mxfp4_gemv_weights_bf16_tiles2 = weigh::<Mxfp4, WithBf16, 2>,
    mxfp4_gemv_weights_bf16_cut = cut::<Mxfp4, WithBf16>,
}
