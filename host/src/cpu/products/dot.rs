//! The dot product of two quantized rows: the reference, and the version with vectors.

use microscale_formats::dot::{self, CHUNK, STREAMS, Sums};
use microscale_formats::{E4m3, E8m0, Format};

use super::rows::Row;
use crate::cpu::simd::products::{DoubledCodes, Products, STEP, e4m3_over_256};
use crate::cpu::simd::{LANES, Lanes};

/// The reference.
pub(in crate::cpu) fn reference(format: Format, a: Row<'_>, b: Row<'_>) -> f64 {
    let block = format.block();
    let mut sums = Sums::default();
    let codes = a.codes.chunks(block / 2).zip(b.codes.chunks(block / 2));
    for (i, ((x, y), (s, t))) in codes.zip(a.scales.iter().zip(b.scales)).enumerate() {
        let quarters = dot::quarters(x, y);
        let term = match format {
            Format::Nvfp4 => dot::nvfp4_term(quarters, E4m3::from_bits(*s), E4m3::from_bits(*t)),
            _ => dot::mxfp4_term(quarters, E8m0::from_bits(*s), E8m0::from_bits(*t)),
        };
        sums.add(i * block / CHUNK, term);
    }
    sums.total()
}

/// A vector, prepared to be multiplied by many rows.
pub(in crate::cpu) struct PackedVector {
    steps: Steps,
    /// True if a scale is NaN. Then all products are NaN.
    pub(in crate::cpu) nan: bool,
}

/// Steps of [`STEP`] bytes of codes. Zeros pad the last one.
enum Steps {
    Nvfp4(Vec<Step<Nvfp4>>),
    Mxfp4(Vec<Step<Mxfp4>>),
}

struct Step<S> {
    codes: DoubledCodes,
    scales: S,
}

/// The scales of sixteen blocks in the order of [`Products::quarters`], times 64.
///
/// The factor 64 makes up for quarters of sums and 256ths of the matrix's scales.
struct Nvfp4(Lanes<f32>);

/// The scales of eight blocks, divided by 4.
struct Mxfp4([f64; 8]);

/// The arithmetic that differs between the formats.
trait Scales {
    /// Scales per step.
    const COUNT: usize;

    /// Prepares the scales in `bytes`, which has [`Self::COUNT`] bytes.
    fn of(bytes: &[u8]) -> Self;

    /// Adds the terms of a step, given the scale bytes of the matrix.
    fn add<V: Products>(&self, simd: V, sums: V::Sums, quarters: V::Bits, bytes: &[u8]) -> V::Sums;
}

/// Even blocks first, then odd blocks.
const EVEN_THEN_ODD: [u8; LANES] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];

impl Scales for Nvfp4 {
    const COUNT: usize = 16;

    fn of(bytes: &[u8]) -> Self {
        Self(EVEN_THEN_ODD.map(|i| 64.0 * E4m3::from_bits(bytes[usize::from(i)]).to_f32()))
    }

    #[inline(always)]
    fn add<V: Products>(&self, simd: V, sums: V::Sums, quarters: V::Bits, bytes: &[u8]) -> V::Sums {
        let Some(bytes) = bytes.first_chunk() else { return sums };
        let scales = e4m3_over_256(simd, simd.bytes(bytes, &EVEN_THEN_ODD));
        let scales = simd.mul(scales, simd.load(&self.0));
        simd.add_halves(sums, simd.mul(simd.numbers(quarters), scales))
    }
}

impl Scales for Mxfp4 {
    const COUNT: usize = 8;

    fn of(bytes: &[u8]) -> Self {
        // The scale of the other operand is 1, and `mxfp4_scale` includes the quarter.
        Self(std::array::from_fn(|i| dot::mxfp4_scale(E8m0::from_bits(bytes[i]), E8m0::from_bits(127))))
    }

    #[inline(always)]
    fn add<V: Products>(&self, simd: V, sums: V::Sums, quarters: V::Bits, bytes: &[u8]) -> V::Sums {
        let Some(bytes) = bytes.first_chunk() else { return sums };
        simd.add_scaled(sums, quarters, bytes, &self.0)
    }
}

impl PackedVector {
    pub(in crate::cpu) fn of(format: Format, vector: Row<'_>) -> Self {
        let steps = match format {
            Format::Nvfp4 => Steps::Nvfp4(steps(vector)),
            _ => Steps::Mxfp4(steps(vector)),
        };
        Self { steps, nan: format.is_nan_scale(vector.max_scale()) }
    }
}

fn steps<S: Scales>(vector: Row<'_>) -> Vec<Step<S>> {
    let one = |(codes, scales): (&[u8], &[u8])| {
        let (mut filled, mut filled_scales) = ([0; STEP], [0; 16]);
        filled[..codes.len()].copy_from_slice(codes);
        filled_scales[..scales.len()].copy_from_slice(scales);
        Step { codes: DoubledCodes::of(&filled), scales: S::of(&filled_scales[..S::COUNT]) }
    };
    vector.codes.chunks(STEP).zip(vector.scales.chunks(S::COUNT)).map(one).collect()
}

/// The dot product of a row and a vector. No scale may be NaN.
#[inline(always)]
pub(in crate::cpu) fn dot<V: Products>(simd: V, row: Row<'_>, vector: &PackedVector) -> f64 {
    match &vector.steps {
        Steps::Nvfp4(steps) => sum::<V, _>(simd, row, steps),
        Steps::Mxfp4(steps) => sum::<V, _>(simd, row, steps),
    }
}

/// Adds all steps. Four steps have one chunk per stream.
#[inline(always)]
fn sum<V: Products, S: Scales>(simd: V, row: Row<'_>, steps: &[Step<S>]) -> f64 {
    let mut sums = [simd.no_sums(); 4];
    let (codes, last_codes) = row.codes.as_chunks::<{ 4 * STEP }>();
    let whole = codes.len();
    let (scales, last_scales) = row.scales.split_at(whole * 4 * S::COUNT);
    let (fours, last_steps) = steps.split_at(4 * whole);
    for ((codes, scales), steps) in
        codes.iter().zip(scales.chunks_exact(4 * S::COUNT)).zip(fours.as_chunks::<4>().0)
    {
        for i in 0..4 {
            sums[i] =
                step::<V, S>(simd, sums[i], &codes.as_chunks().0[i], &scales[i * S::COUNT..], &steps[i]);
        }
    }
    if !last_steps.is_empty() {
        let (mut codes, mut scales) = ([0; 4 * STEP], [0; 64]);
        codes[..last_codes.len()].copy_from_slice(last_codes);
        scales[..last_scales.len()].copy_from_slice(last_scales);
        for i in 0..4 {
            // A loop over the steps would not keep the sums in registers.
            if let Some(step_of) = last_steps.get(i) {
                sums[i] =
                    step::<V, S>(simd, sums[i], &codes.as_chunks().0[i], &scales[i * S::COUNT..], step_of);
            }
        }
    }
    let mut streams = [0.0; STREAMS];
    for (streams, sums) in streams.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
        *streams = simd.store_sums(sums);
    }
    Sums::of(streams).total()
}

#[inline(always)]
fn step<V: Products, S: Scales>(
    simd: V,
    sums: V::Sums,
    codes: &[u8; STEP],
    scales: &[u8],
    by: &Step<S>,
) -> V::Sums {
    by.scales.add(simd, sums, simd.quarters(codes, &by.codes), scales)
}

const _: () = assert!(STREAMS * CHUNK == 4 * 2 * STEP && LANES == 16);
