//! The product of a row of 4-bit weights and a row of FP8 activations, with the arithmetic of
//! Hopper's tensor cores, to the bit.
//!
//! This is the sum that `wgmma.mma_async … k32.f32.e4m3.e4m3` computes for one result, and the f32
//! operations of the kernels around it.
//!
//! Source of the instruction's arithmetic: MMA-Sim, commit c785138 (arXiv 2511.10909), whose
//! authors compared it with an H100.
//!
//! # A k-step
//!
//! [`step`] adds [`STEP`] = 32 products of E4M3 numbers to an accumulator, an f32:
//!
//! 1. A product is exact. Its exponent is the sum of the exponents of both numbers, −6 for
//!    subnormal ones. A zero or subnormal accumulator has the exponent −126.
//! 2. The products and the accumulator are truncated toward zero to multiples of 2^(e − 13). e is
//!    the largest of the 33 exponents.
//! 3. Their sum is exact. It is truncated toward zero to 13 fraction bits.
//!
//! NaN and infinities become what IEEE 754 says.
//!
//! # A pack
//!
//! [`PACK`] = 128 columns are four k-steps, which start from +0. Each takes eight columns of each
//! block of 32. Weights are decoded to E4M3:
//!
//! - **MXFP4**: element · 2^([`PACK_EXPONENT`] − d). d is how far the block's scale exponent is
//!   below the largest one of the pack, b. This is exact for d up to [`WIDEST`]. Other blocks are
//!   left out here. The factor of the pack's sum is 2^(b − [`PACK_EXPONENT`]), or NaN if a scale
//!   is.
//! - **NVFP4**: element · scale / [`NVFP4_FACTOR`], rounded to the nearest E4M3, ties to even. This
//!   is not exact: products of a scale and an element have up to six significant bits, E4M3 has
//!   four. The factor is [`NVFP4_FACTOR`].
//!
//! # A row
//!
//! [`row`] adds the sums of the packs, in the order of K and starting from +0, each by a fused
//! multiplication and addition in f32:
//!
//! - with a scale per token: sum = pack · factor + sum, and in the end sum · scale;
//! - with a scale per pack: sum = pack · (factor · scale) + sum.
//!
//! Then products of blocks that were left out are added, in the order of K: sum = (element ·
//! 2^exponent · x) · scale + sum. Few checkpoints have any: their scales must differ by more than
//! 2^11 within 128 columns.
//!
//! A GPU that splits K adds the parts in f32 and gives other bits. Global scales multiply the sum
//! afterwards.
//!
//! # Sums of blocks
//!
//! [`block_row`] is for MXFP4 weights. A k-step has a block, and starts from +0. Weights are
//! decoded to E4M3 without their scale: element · 2^[`ELEMENT_EXPONENT`], which is exact. The sums
//! of blocks are added in the order of K, starting from +0, each by a fused multiplication and
//! addition in f32. Let f be 2^−[`ELEMENT_EXPONENT`]:
//!
//! - with a scale per token: sum = block · (f · block scale) + sum, and in the end sum · scale;
//! - with a scale per pack: sum = block · (f · block scale · scale) + sum.
//!
//! Where f · block scale would be infinite, block · f takes the place of block, and the factor has
//! no f. No block is left out. Blocks of the last pack past the end of the row are added as zeros
//! with scale byte 0.
//!
//! # Fast accumulation
//!
//! [`fast_row`] is for a scale per token. The k-steps of all packs add to one accumulator, which
//! starts from +0. b is the largest scale exponent of the whole row. The sum is multiplied by the
//! factor of b, then by the scale of the token. Then products of left-out blocks are added.
//!
//! # MXFP4 activations
//!
//! Rows of MXFP4 become E4M3 under one scale: [`mxfp4_activation`] and [`mxfp4_token_scale`]. Let d
//! be the distance of a block's scale exponent from the largest one of the row. Elements are exact
//! up to d = 14. Under smaller scales they are rounded to multiples of 2^−15 of the largest scale,
//! so they lose up to 2^−16 of it.
//!
//! # Error bound
//!
//! A k-step loses less than 34 units of 2^(e − 13). Decoded weights are normal numbers, and a
//! subnormal activation is at least 2^−3 of its power of two. So 2^e is at most eight times the
//! larger of the accumulator and the largest product. Truncation makes no magnitude larger: both
//! are at most M, the sum of the magnitudes of the pack's products. Four k-steps lose less than
//! 4 · 34 · 2^−10 · M in the worst case. Typically each loses 2^−13 of the largest product.
//! [`gamma`] is this bound with the roundings in f32.
//!
//! With sums of blocks, decoded weights of 0.5 are subnormal, too: at least 2^−1 of their power of
//! two. So 2^e is at most 16 times the largest product of the block. Its only k-step loses less
//! than 34 · 2^−9 of the sum of its magnitudes, half of a pack's bound. The other half exceeds the
//! three more f32 roundings per pack for any K below 2^26, so [`gamma`] holds here, too.
//!
//! With fast accumulation M is the sum of the magnitudes of the row's products, and each of K / 32
//! k-steps may lose 34 · 2^−10 · M: [`fast_gamma`]. From K = 1024 on, this bound is larger than M.
//! Typically a k-step loses up to 2^−13 of the accumulator, always toward zero.

use crate::activations::GROUP;
use crate::arithmetic::Fused;
use crate::fp4_dot::{shifted, split, split_f32, truncated};
use crate::plan::power_of_two;
use crate::{E2m1, E4m3, E8m0, Format, mx};

/// Products of a k-step.
pub const STEP: usize = 32;

/// Columns of a pack, whose sum is added in f32.
pub const PACK: usize = GROUP;

/// Fraction bits of the largest exponent that survive truncation, and of sums.
pub const FRACTION_BITS: i32 = 13;

/// The exponent of the power of two that MXFP4 elements are multiplied by where they are decoded
/// without their scale: the difference of the exponent biases of E2M1 and E4M3.
pub const ELEMENT_EXPONENT: i32 = -6;

/// The largest scale byte of a block whose scale times 2^−[`ELEMENT_EXPONENT`] is finite in f32.
pub const LARGEST_FACTOR: u32 = 254 - -ELEMENT_EXPONENT as u32;

/// The exponent of the scale that MXFP4 elements with the largest scale of a pack have in E4M3:
/// 6 · 2^6 is at most 448.
pub const PACK_EXPONENT: i32 = 6;

/// The largest distance of a scale's exponent from the largest one of a pack for which elements
/// become normal E4M3 numbers: 0.5 · 2^(6 − 11) is 2^−6.
pub const WIDEST: u32 = 11;

/// MXFP4 activations whose scale is this many powers of two below the largest one of their row are
/// rounded to zeros: 6 · 2^(6 − 21) is less than half of the smallest E4M3 number.
const ALL_ZEROS: i32 = 21;

/// NVFP4 elements times their scale, up to 6 · 448, are divided by it to become E4M3 numbers.
pub const NVFP4_FACTOR: f32 = 8.0;

/// The fraction bits of an f32 that a sum does not have.
const LOST: u32 = (1 << (f32::MANTISSA_DIGITS as i32 - 1 - FRACTION_BITS)) - 1;

/// Adds 32 products to an accumulator.
pub fn step(accumulator: f32, a: &[E4m3; STEP], b: &[E4m3; STEP]) -> f32 {
    // Products, in units of 2^-6 of their exponents.
    let mut products = [(0, 0); STEP];
    for ((product, a), b) in products.iter_mut().zip(a).zip(b) {
        let (Some((x, ex)), Some((y, ey))) = (split(*a), split(*b)) else { return f32::NAN };
        let negative = (a.to_bits() ^ b.to_bits()) & 0x80 != 0;
        *product = (if negative { -x * y } else { x * y }, ex + ey);
    }
    if !accumulator.is_finite() {
        return accumulator;
    }
    let (significand, exponent) = split_f32(accumulator);
    let largest = products.iter().fold(exponent, |largest, (_, exponent)| largest.max(*exponent));
    let aligned =
        |significand: i32, exponent: i32| shifted(i64::from(significand), FRACTION_BITS + exponent - largest);
    let sum = aligned(significand, exponent - 23)
        + products.iter().map(|(product, exponent)| aligned(*product, exponent - 6)).sum::<i64>();
    f32::from_bits(truncated(sum, largest - FRACTION_BITS).to_bits() & !LOST)
}

/// A row of weights: codes, two per byte, and one scale byte per block of NVFP4 or MXFP4.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// The format.
    pub format: Format,
    /// Codes, of whole blocks.
    pub codes: &'a [u8],
    /// Scales.
    pub scales: &'a [u8],
}

impl Weights<'_> {
    /// The element of a column.
    fn element(&self, column: usize) -> f32 {
        let byte = self.codes[column / 2];
        E2m1::from_bits(if column.is_multiple_of(2) { byte & 15 } else { byte >> 4 }).to_f32()
    }

    /// The columns of weights.
    fn columns(&self) -> usize {
        self.codes.len() * 2
    }

    /// The largest scale of a pack in MXFP4; 0 in NVFP4.
    fn base(&self, pack: usize) -> u8 {
        if self.format == Format::Nvfp4 {
            return 0;
        }
        let scales = self.scales.chunks(PACK / mx::BLOCK).nth(pack).unwrap_or(&[]);
        scales.iter().copied().max().unwrap_or(0)
    }

    /// The factor of sums of a pack with a base.
    fn factor(&self, base: u8) -> f32 {
        match E8m0::from_bits(base) {
            _ if self.format == Format::Nvfp4 => NVFP4_FACTOR,
            base if base.is_nan() => f32::NAN,
            base => base.to_f32() * power_of_two(-PACK_EXPONENT),
        }
    }

    /// Returns whether a block of MXFP4 is left out of the tensor cores' sums of a pack.
    fn is_left_out(&self, block: usize, base: u8) -> bool {
        self.format != Format::Nvfp4 && u32::from(base) - u32::from(self.scales[block]) > WIDEST
    }

    /// Returns the largest scale of all packs; 0 in NVFP4.
    pub fn row_base(&self) -> u8 {
        if self.format == Format::Nvfp4 { 0 } else { self.scales.iter().copied().max().unwrap_or(0) }
    }

    /// The weight of a column, decoded to E4M3; zero for one that is left out, or past the end.
    fn decoded(&self, column: usize, base: u8) -> E4m3 {
        if column >= self.columns() {
            return E4m3::from_bits(0);
        }
        E4m3::from_f32(self.element(column) * self.block_factor(column / self.format.block(), base))
    }

    /// The factor of the elements of a block before they are rounded to E4M3.
    fn block_factor(&self, block: usize, base: u8) -> f32 {
        let scale = self.scales[block];
        if self.format == Format::Nvfp4 {
            E4m3::from_bits(scale).to_f32() / NVFP4_FACTOR
        } else if self.is_left_out(block, base) {
            0.0
        } else {
            power_of_two(PACK_EXPONENT - i32::from(base - scale))
        }
    }

    /// Returns the decoded weights of a block by code, for the eight codes without a sign.
    pub fn magnitudes(&self, block: usize) -> [E4m3; 8] {
        let factor = self.block_factor(block, self.base(block * self.format.block() / PACK));
        core::array::from_fn(|code| E4m3::from_f32(E2m1::from_bits(code as u8).to_f32() * factor))
    }

    /// Returns the factor of sums of pack number `pack`.
    pub fn pack_factor(&self, pack: usize) -> f32 {
        self.factor(self.base(pack))
    }

    /// The weights of a pack in the order of its k-steps, decoded to E4M3 relative to a base.
    fn pack(&self, pack: usize, base: u8) -> Steps {
        in_steps(|column| self.decoded(pack * PACK + column, base))
    }

    /// Adds the products of blocks that are left out of the packs to the sum of a row.
    ///
    /// `x` and `scales` are as for [`row`].
    pub fn add_left_out<F: Fused>(&self, x: &[E4m3], scales: Scales<'_>, sum: f32) -> f32 {
        self.add_beyond::<F>(x, scales, sum, |pack| self.base(pack))
    }

    /// Adds the products of blocks that are left out under the base of each pack.
    fn add_beyond<F: Fused>(
        &self,
        x: &[E4m3],
        scales: Scales<'_>,
        mut sum: f32,
        base: impl Fn(usize) -> u8,
    ) -> f32 {
        for (block, x) in x.chunks(mx::BLOCK).enumerate() {
            let pack = block * mx::BLOCK / PACK;
            if !self.is_left_out(block, base(pack)) {
                continue;
            }
            let columns = (0..x.len()).map(|i| block * mx::BLOCK + i);
            if columns.clone().all(|column| self.element(column) == 0.0) {
                continue;
            }
            let scale = E8m0::from_bits(self.scales[block]).to_f32();
            for (column, x) in columns.zip(x) {
                sum = F::fma(self.element(column) * scale * x.to_f32(), scales.of(pack), sum);
            }
        }
        sum
    }

    /// Returns whether blocks of the row are left out of the packs.
    pub fn leaves_out(&self) -> bool {
        let is_left_out = |block: usize| self.is_left_out(block, self.base(block * mx::BLOCK / PACK));
        self.format != Format::Nvfp4 && (0..self.scales.len()).any(is_left_out)
    }
}

/// The numbers of a pack, by k-step.
type Steps = [[E4m3; STEP]; PACK / STEP];

/// Returns the place of a pack's column among the numbers of its k-steps, one after another.
pub const fn place(column: usize) -> usize {
    column % 32 / 8 * STEP + column / 32 * 8 + column % 8
}

/// Returns the activations of a pack in the order of its k-steps.
fn activations(x: &[E4m3], pack: usize) -> Steps {
    in_steps(|column| x.get(pack * PACK + column).copied().unwrap_or(E4m3::from_bits(0)))
}

/// Returns the numbers of a pack in the order of its k-steps, given the number of each column.
fn in_steps(of_column: impl Fn(usize) -> E4m3) -> Steps {
    let mut steps = [[E4m3::from_bits(0); STEP]; PACK / STEP];
    for column in 0..PACK {
        steps[place(column) / STEP][place(column) % STEP] = of_column(column);
    }
    steps
}

/// The scales of a row of activations.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// One for all columns.
    Token(f32),
    /// One per pack.
    Packs(&'a [f32]),
}

impl Scales<'_> {
    /// The scale of a pack's columns.
    fn of(self, pack: usize) -> f32 {
        match self {
            Self::Token(scale) => scale,
            Self::Packs(scales) => scales[pack],
        }
    }

    /// Returns the factor of a pack's sum, given the factor of its weights.
    pub fn factor(self, of_weights: f32, pack: usize) -> f32 {
        match self {
            Self::Token(_) => of_weights,
            Self::Packs(scales) => of_weights * scales[pack],
        }
    }

    /// Applies the scale of the token to the sum of all packs.
    pub fn finish(self, sum: f32) -> f32 {
        match self {
            Self::Token(scale) => sum * scale,
            Self::Packs(_) => sum,
        }
    }
}

/// Returns the product of two rows, without global scale.
///
/// `x` lacks the columns that pad the last block of the weights.
pub fn row<F: Fused>(weights: Weights<'_>, x: &[E4m3], scales: Scales<'_>) -> f32 {
    let mut sum = 0f32;
    for pack in 0..weights.columns().div_ceil(PACK) {
        let steps = weights.pack(pack, weights.base(pack));
        let x = activations(x, pack);
        let products = steps.iter().zip(&x).fold(0.0, |sum, (weights, x)| step(sum, weights, x));
        sum = F::fma(products, scales.factor(weights.pack_factor(pack), pack), sum);
    }
    weights.add_left_out::<F>(x, scales, scales.finish(sum))
}

/// Returns the product of a row of MXFP4 weights and a row of activations with sums of blocks,
/// without global scale.
///
/// `x` lacks the columns that pad the last block of the weights.
pub fn block_row<F: Fused>(weights: Weights<'_>, x: &[E4m3], scales: Scales<'_>) -> f32 {
    const UNIT: f32 = power_of_two(-ELEMENT_EXPONENT);
    let mut sum = 0f32;
    for block in 0..weights.scales.len().next_multiple_of(PACK / STEP) {
        let byte = weights.scales.get(block).copied().unwrap_or(0);
        let columns: [usize; STEP] = core::array::from_fn(|i| block * STEP + i);
        let element = |column| if column < weights.columns() { weights.element(column) } else { 0.0 };
        let elements = columns.map(|column| E4m3::from_f32(element(column) * power_of_two(ELEMENT_EXPONENT)));
        let x = columns.map(|column| x.get(column).copied().unwrap_or(E4m3::from_bits(0)));
        let (product, scale) = (step(0.0, &elements, &x), E8m0::from_bits(byte).to_f32());
        let (product, factor) =
            if u32::from(byte) <= LARGEST_FACTOR { (product, UNIT * scale) } else { (product * UNIT, scale) };
        sum = F::fma(product, scales.factor(factor, block * STEP / PACK), sum);
    }
    scales.finish(sum)
}

/// Returns the product of two rows with fast accumulation, without global scale.
///
/// `x` lacks the columns that pad the last block of the weights. `base` is the largest scale of the
/// row, also for a part of it.
pub fn fast_row<F: Fused>(weights: Weights<'_>, base: u8, x: &[E4m3], token_scale: f32) -> f32 {
    let mut sum = 0f32;
    for pack in 0..weights.columns().div_ceil(PACK) {
        let steps = weights.pack(pack, base);
        let x = activations(x, pack);
        sum = steps.iter().zip(&x).fold(sum, |sum, (weights, x)| step(sum, weights, x));
    }
    let sum = sum * weights.factor(base) * token_scale;
    weights.add_beyond::<F>(x, Scales::Token(token_scale), sum, |_| base)
}

/// Returns the scale of a row of MXFP4 activations in E4M3: the largest scale of its blocks times
/// 2^−[`PACK_EXPONENT`] and alpha; NaN if that scale is NaN.
pub fn mxfp4_token_scale(largest: E8m0, alpha: f32) -> f32 {
    if largest.is_nan() { f32::NAN } else { largest.to_f32() * power_of_two(-PACK_EXPONENT) * alpha }
}

/// Returns an MXFP4 activation in E4M3, rounded to nearest, ties to even, given the scale of its
/// block and the largest one of its row, `largest`.
pub fn mxfp4_activation(element: E2m1, scale: E8m0, largest: E8m0) -> E4m3 {
    // From `ALL_ZEROS` on, elements are rounded to zeros.
    let below = i32::from(largest.to_bits().saturating_sub(scale.to_bits())).min(ALL_ZEROS);
    E4m3::from_f32(element.to_f32() * power_of_two(PACK_EXPONENT - below))
}

/// Returns γ of the error bound for rows of `cols` columns: the error is at most γ times the sum of
/// the magnitudes of the products of decoded weights, activations and scales.
pub fn gamma(cols: usize) -> f64 {
    let packs = cols.div_ceil(PACK) as f64;
    let steps = (PACK / STEP) as f64;
    let lost = steps * (STEP + 2) as f64 * f64::from(power_of_two(3 - FRACTION_BITS));
    lost + (packs + 3.0) * f64::from(f32::EPSILON)
}

/// Returns γ of [`gamma`] for [`fast_row`].
pub fn fast_gamma(cols: usize) -> f64 {
    cols.div_ceil(PACK) as f64 * gamma(0) + 3.0 * f64::from(f32::EPSILON)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::MulAdd;

    /// Knuth's linear congruential generator.
    fn random(mut state: u64) -> impl FnMut() -> u32 {
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        }
    }

    /// The step by its definition, in f64: sums of 33 numbers of 16 bits are exact.
    fn defined(accumulator: f32, a: &[E4m3; STEP], b: &[E4m3; STEP]) -> f32 {
        let exponent = |x: f32, least: i32| match x {
            0.0 => -126,
            x => (x.abs().log2().floor() as i32).max(least),
        };
        let products = a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32() * b.to_f32()));
        let of_pair = |(a, b): (&E4m3, &E4m3)| exponent(a.to_f32(), -6) + exponent(b.to_f32(), -6);
        let largest = a.iter().zip(b).map(of_pair).fold(exponent(accumulator, -126), i32::max);
        let unit = 2f64.powi(largest - 13);
        let sum: f64 = products.chain([accumulator.into()]).map(|x| (x / unit).trunc() * unit).sum();
        if sum == 0.0 {
            return 0.0;
        }
        let unit = 2f64.powi((sum.abs().log2().floor() as i32).max(-126) - 13);
        ((sum / unit).trunc() * unit) as f32
    }

    #[test]
    fn steps_keep_13_fraction_bits() {
        let mut random = random(1);
        for round in 0..20_000 {
            let narrow = round % 2 == 0;
            let mut code = || loop {
                let bits = random() as u8;
                let code = E4m3::from_bits(if narrow { bits & 0x9F } else { bits });
                if !code.is_nan() {
                    return code;
                }
            };
            let (a, b) = (core::array::from_fn(|_| code()), core::array::from_fn(|_| code()));
            let exponent = (random() % 36) as i32 - 20;
            let mut accumulator = (random() as i32 as f32) * 2f32.powi(exponent - 31);
            if round % 7 == 0 {
                accumulator = 0.0;
            }
            let (found, right) = (step(accumulator, &a, &b), defined(accumulator, &a, &b));
            assert_eq!(found.to_bits(), right.to_bits(), "{accumulator:e}: {found:e} is not {right:e}");
            assert_eq!(found.to_bits() & 0x3FF, 0, "more than 13 fraction bits: {found:e}");
        }
    }

    #[test]
    fn mxfp4_weights_lose_nothing() {
        for below in 0..=255u8 {
            let scales = [200, 200u8.saturating_sub(below)];
            // Codes 0 to 15 twice in the second block.
            let mut codes = [0; 32];
            for (i, byte) in codes[16..].iter_mut().enumerate() {
                *byte = (2 * i % 16) as u8 | (((2 * i + 1) % 16) << 4) as u8;
            }
            let weights = Weights { format: Format::Mxfp4, codes: &codes, scales: &scales };
            for column in 32..64 {
                let exact =
                    E2m1::from_bits((column % 16) as u8).to_f32() * E8m0::from_bits(scales[1]).to_f32();
                let decoded = weights.decoded(column, scales[0]).to_f32() * weights.factor(scales[0]);
                let left_out = u32::from(scales[0] - scales[1]) > WIDEST;
                assert_eq!(left_out, weights.is_left_out(1, weights.base(0)));
                assert_eq!(decoded, if left_out { 0.0 } else { exact }, "{below} below, column {column}");
            }
        }
    }

    #[test]
    fn mxfp4_activations_are_within_the_documented_error() {
        let largest = E8m0::from_bits(200);
        let token_scale = mxfp4_token_scale(largest, 1.0);
        for below in 0..=200u8 {
            let scale = E8m0::from_bits(200 - below);
            for code in 0..16 {
                let element = E2m1::from_bits(code);
                let exact = f64::from(element.to_f32()) * f64::from(scale.to_f32());
                let found = mxfp4_activation(element, scale, largest).to_f32();
                let error = (f64::from(found) * f64::from(token_scale) - exact).abs();
                let allowed = if below <= 14 { 0.0 } else { f64::from(largest.to_f32()) * 2f64.powi(-16) };
                assert!(error <= allowed, "{below} below, code {code}: {found:e}");
            }
        }
        assert!(mxfp4_token_scale(E8m0::NAN, 1.0).is_nan());
        assert_eq!(mxfp4_token_scale(E8m0::MIN, 2.0).to_bits(), 1 << (149 - 132));
    }

    #[test]
    fn rows_are_within_the_error_bound() {
        let mut random = random(7);
        for round in 0..400 {
            let cols = [64, 128, 320, 512][round % 4];
            let spread = [4, 16, 40][round % 3];
            let codes: [u8; 256] = core::array::from_fn(|_| random() as u8);
            let scales: [u8; 16] = core::array::from_fn(|_| (100 + random() % spread) as u8);
            let x: [E4m3; 512] = core::array::from_fn(|_| E4m3::from_f32((random() % 1000) as f32 - 500.0));
            let of_packs: [f32; 4] = core::array::from_fn(|_| 1e-3 * (1 + random() % 9) as f32);
            let weights =
                Weights { format: Format::Mxfp4, codes: &codes[..cols / 2], scales: &scales[..cols / 32] };
            for scales_of_x in [Scales::Token(of_packs[0]), Scales::Packs(&of_packs)] {
                let (mut sum, mut magnitudes) = (0.0, 0.0);
                for column in 0..cols {
                    let scale = match scales_of_x {
                        Scales::Token(scale) => scale,
                        Scales::Packs(scales) => scales[column / PACK],
                    };
                    let weight = weights.element(column) * E8m0::from_bits(scales[column / 32]).to_f32();
                    let product = f64::from(weight) * f64::from(x[column].to_f32()) * f64::from(scale);
                    sum += product;
                    magnitudes += product.abs();
                }
                let found = f64::from(row::<MulAdd>(weights, &x[..cols], scales_of_x));
                // Left-out products add a rounding each.
                let left_out = 256.0 * f64::from(f32::EPSILON);
                let bound = (gamma(cols) + left_out) * magnitudes;
                assert!((found - sum).abs() <= bound, "{found:e} is not {sum:e} within {bound:e}");
                let of_blocks = f64::from(block_row::<MulAdd>(weights, &x[..cols], scales_of_x));
                let bound = gamma(cols) * magnitudes;
                assert!((of_blocks - sum).abs() <= bound, "{of_blocks:e} is not {sum:e} within {bound:e}");
                if let Scales::Token(scale) = scales_of_x {
                    let fast = fast_row::<MulAdd>(weights, weights.row_base(), &x[..cols], scale);
                    let bound = (fast_gamma(cols) + left_out) * magnitudes;
                    assert!(
                        (f64::from(fast) - sum).abs() <= bound,
                        "{fast:e} is not {sum:e} within {bound:e}"
                    );
                    // A row of one pack has one base and one sum.
                    assert!(cols > PACK || fast.to_bits() == (found as f32).to_bits());
                }
            }
        }
    }

    #[test]
    fn blocks_keep_their_value_under_any_scale() {
        // 0.5 and 6 are the smallest and the largest element.
        let codes: [u8; 32] = core::array::from_fn(|i| [0x71, 0x00][i / 16]);
        let x = [E4m3::from_f32(power_of_two(-6)); 64];
        let sum_of_products = 16.0 * 6.5 / 64.0;
        let sum = |scales: &[u8]| {
            let weights = Weights { format: Format::Mxfp4, codes: &codes, scales };
            block_row::<MulAdd>(weights, &x, Scales::Token(1.0))
        };
        for byte in 0..=254 {
            // Zeros under the largest scale add nothing.
            let right = sum_of_products * E8m0::from_bits(byte).to_f32();
            assert_eq!(sum(&[byte, 254]), right, "{byte}");
        }
        assert!(sum(&[127, 255]).is_nan() && sum(&[255, 0]).is_nan());
        // Two blocks of the pack are past the end of the row: zeros times an infinite scale.
        let weights = Weights { format: Format::Mxfp4, codes: &codes, scales: &[127, 127] };
        assert!(block_row::<MulAdd>(weights, &x, Scales::Packs(&[f32::INFINITY])).is_nan());
    }

    #[test]
    fn nan_and_infinities_stay() {
        let zeros = [E4m3::from_bits(0); STEP];
        let mut nan = zeros;
        nan[31] = E4m3::NAN;
        assert!(step(0.0, &nan, &zeros).is_nan() && step(f32::NAN, &zeros, &zeros).is_nan());
        assert_eq!(step(f32::INFINITY, &zeros, &zeros), f32::INFINITY);
        assert_eq!(step(-0.0, &zeros, &zeros).to_bits(), 0);
    }
}
