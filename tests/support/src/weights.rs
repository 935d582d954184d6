//! Weights times activations: inputs, and error bounds of results.

use std::thread::{available_parallelism, scope};

use microscale::formats::fp4_dot;
use microscale::{Format, QuantizedShape, QuantizedTensor};

use crate::oracle::{self, Exact, dot};

/// The kind of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Around 1.
    Common,
    /// Around 2^10.
    Large,
    /// Numbers of all magnitudes.
    Numbers,
    /// Subnormal numbers of the dtype, and slightly larger ones.
    Tiny,
    /// Any bits.
    Any,
}

impl Activations {
    /// Every kind.
    pub const ALL: [Self; 5] = [Self::Common, Self::Large, Self::Numbers, Self::Tiny, Self::Any];
}

/// Makes `count` activations.
pub fn activations<T: Exact>(count: usize, kind: Activations, random: &mut fastrand::Rng) -> Vec<T> {
    let one = |random: &mut fastrand::Rng| match kind {
        Activations::Common | Activations::Large => {
            let unit = if kind == Activations::Large { 1024.0 } else { 1.0 };
            T::round_f64((random.f64() + random.f64() + random.f64() - 1.5) * unit)
        }
        Activations::Numbers if T::LARGEST > 1e5 => {
            T::round_f64((random.f64() - 0.5) * 2f64.powi(random.i32(-133..100)))
        }
        Activations::Tiny => {
            let magnitude = 2f64.powi(T::SMALLEST_EXPONENT + random.i32(1..14));
            T::round_f64((random.f64() - 0.5) * magnitude)
        }
        _ => T::of_bits(random.u32(..) >> (32 - T::BITS)),
    };
    let fits = |x: &T| kind == Activations::Any || x.to_f64().is_finite();
    std::iter::repeat_with(|| one(random)).filter(fits).take(count).collect()
}

/// Error bound of a result before rounding: γ times the sum of the products' magnitudes, plus δ.
///
/// δ does not include the global scale.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    gamma: f64,
    delta: f64,
}

/// The instructions that multiply and add the elements of a segment.
#[derive(Clone, Copy, Debug)]
pub enum Instructions {
    /// Fused multiply-add of f32.
    Singles,
    /// Instructions for pairs of bf16.
    Pairs,
    /// Matrix tiles of bf16. Each activation consists of several bf16 parts.
    Tiles {
        /// Number of parts.
        parts: usize,
    },
}

/// The code of 1.
const ONE: u8 = 2;
/// Columns of a segment per k-iteration.
pub(crate) const K_ITERATION: usize = 128;
/// Number of `mma`s of a k-iteration. They form a chain that starts from zero.
const CHAIN: f64 = 8.0;
/// Maximum loss of an `mma` of 16 products, in units of 2^−23 of the sum of magnitudes so far.
///
/// The largest addend is not truncated: it is a product of two 11-bit numbers, or a 24-bit sum. If
/// all are added together, 16 others and their sum are truncated. If they are added in halves, as
/// on an A100, 8 others and a sum are truncated, twice. Adding one after the other, each rounded to
/// nearest, loses half of 16 units.
const LOST: f64 = 18.0;

impl Bound {
    /// The bound of exact results.
    pub const NONE: Self = Self { gamma: 0.0, delta: 0.0 };

    /// The bound of the reference, `microscale::formats::weights`.
    pub fn of_definition(weights: &QuantizedTensor) -> Self {
        let cols = weights.cols();
        Self {
            gamma: (16 + 2 * cols.div_ceil(1024)) as f64 * 2f64.powi(-24),
            delta: if weights.format() == Format::Mxfp4 { cols as f64 * 2f64.powi(-148) } else { 0.0 },
        }
    }

    /// The bound of the reference for f32 activations, whose terms all lose bits below f32's.
    ///
    /// A product with a 128th of a weight loses half of 2^−149, multiplied by 128 times the block
    /// scale. Adding a group loses half of that, as a 64th, and there are fewer groups.
    pub fn of_singles(weights: &QuantizedTensor, row: usize) -> Self {
        let most = largest_scale(weights, row).max(1.0);
        let delta = weights.cols() as f64 * 2f64.powi(-142) * most;
        Self { delta, ..Self::of_definition(weights) }
    }

    /// The bound of a row with many tokens on a CPU.
    ///
    /// Each product goes through 256 roundings in its segment, and one for each segment. One more
    /// covers products of errors. Each loses half of 2^−149, as a 64th in NVFP4 and under the
    /// largest scale in MXFP4.
    ///
    /// With pairs of bf16, a pair goes through two roundings. An instruction loses 2^−126 of each
    /// of two sums, and flushes activations below 2^−126 to zero. Weights are at most 42 in NVFP4,
    /// and 6 in MXFP4.
    ///
    /// With tiles, a product goes through 16 roundings in its sum of 16, one when the two sums of
    /// 32 elements are added, and one for each part of 32 elements that is added to the segment's
    /// sum, 24 at most. Each of these 34 sums per 32 elements and part loses 2^−126. Flushed parts
    /// below 2^−126 add up to less than that.
    pub fn of_segments(weights: &QuantizedTensor, row: usize, instructions: Instructions) -> Self {
        let cols = weights.cols();
        let (unit, most) = match weights.format() {
            Format::Mxfp4 => (largest_scale(weights, row), 6.0),
            _ => (64.0, 42.0),
        };
        let lost = match instructions {
            Instructions::Singles => 2f64.powi(-150),
            Instructions::Pairs => (1.0 + most) * 2f64.powi(-126),
            // No part of an f16 is that small.
            Instructions::Tiles { parts: 2 } => 2.0 * 34.0 / 32.0 * 2f64.powi(-126),
            Instructions::Tiles { parts } => (34.0 / 32.0 * parts as f64 + most) * 2f64.powi(-126),
        };
        Self {
            gamma: (256 + cols.div_ceil(256) + 1) as f64 * 2f64.powi(-24),
            delta: cols as f64 * lost * unit,
        }
    }

    /// The bound of tensor cores, for rows without a fallback to the reference.
    ///
    /// Weights are scaled exactly: two bits times four, in either dtype. Each of a k-iteration's
    /// `mma`s loses at most `LOST` units. K-iterations are added in f32, the first to zero without
    /// a loss: n − 1 roundings of 2^−24. The n-th covers products of errors and rounding to f64. A
    /// row is divided between `segments` and between `slices`, and each part has its own sum.
    ///
    /// In f16, products are multiples of 2^−48, and nothing is lost below f32's normal numbers. In
    /// bf16, weights are lower by 2^16 in MXFP4 and 2^14 in NVFP4. A product loses at most `least`,
    /// and so does an `mma`'s sum, and there are no more sums than products. `least` is 2^−149 if
    /// subnormal numbers are supported, and 2^−126 otherwise.
    pub fn of_tensor_cores<T: Exact>(cols: usize, [segments, slices]: [usize; 2], least: f64) -> Self {
        let additions = cols.div_ceil(K_ITERATION * segments).div_ceil(slices) as f64;
        let is_bf16 = T::LARGEST > 1e5;
        Self {
            gamma: (2.0 * CHAIN * LOST + additions) * 2f64.powi(-24),
            delta: if is_bf16 { cols as f64 * least * 2f64.powi(16) } else { 0.0 },
        }
    }

    /// The bound of tensor cores that multiply FP4 by FP4, or of [`Self::of_gemm`], where activations
    /// are decoded to `T`. The products of the exponents of block scales are at most 1.
    pub fn of_fp4<T: Exact>(cols: usize, least: f64) -> Self {
        let native = Self { gamma: fp4_dot::gamma(cols), delta: fp4_dot::delta(cols, 1.0) };
        Self::of_gemm::<T>(cols, least).or(native)
    }

    /// The bound of a GEMM on tensor cores, for rows without a fallback to the reference.
    ///
    /// It differs from [`Self::of_tensor_cores`] in two points. The `mma`s of a split form one
    /// chain through all its k-iterations. Splits are added in f32, and there are no more of them
    /// than k-iterations. Two more roundings come from the global scale: its product
    /// with the sum, and the rounding of that product.
    pub fn of_gemm<T: Exact>(cols: usize, least: f64) -> Self {
        let k_iterations = cols.div_ceil(K_ITERATION) as f64;
        let one = Self::of_tensor_cores::<T>(cols, [1, 1], least);
        Self { gamma: (2.0 * CHAIN * LOST * k_iterations + k_iterations + 2.0) * 2f64.powi(-24), ..one }
    }

    /// The bound of tensor cores for one token, if no sum is infinite or NaN.
    ///
    /// The reference recomputes such sums. A group's 16 products come from a chain of four `mma`s
    /// that starts from zero. Each adds four products, besides zeros, and loses at most six units
    /// of 2^−23. Groups are added in f32, each with a rounding of 2^−24, and so are the sums of
    /// eight lanes in pairs. One more rounding covers products of errors and rounding to f64. A row
    /// is divided between two segments, each between four lanes, and between `slices`, and each
    /// part has its own sum.
    ///
    /// Sums are lower by 2^14 in f16, where products are multiples of 2^−39, and by 2^24 in bf16.
    /// There each `mma` loses at most five times `least`, for products and sums, under the group's
    /// scale. Adding the result outside of tensor cores loses 2^−150. Zeros lose nothing.
    pub fn of_one_token<T: Exact>(weights: &QuantizedTensor, slices: usize, least: f64) -> Self {
        let groups = weights.cols().div_ceil(256).div_ceil(slices) as f64 * 2.0;
        let all = (weights.cols() / 16) as f64;
        let format = weights.format();
        let blocks = weights.codes().chunks(format.block_bytes()).zip(weights.scales());
        let not_zeros = blocks.filter(|(codes, _)| codes.iter().any(|code| code & 0x77 != 0));
        let scales = not_zeros.map(|(_, scale)| oracle::value(format, ONE, *scale, None));
        let largest = scales.filter(|scale| scale.is_finite()).fold(0.0, f64::max);
        let [under_scales, lower] = if T::LARGEST > 1e5 { [20.0 * largest, 24.0] } else { [0.0, 14.0] };
        Self {
            gamma: (2.0 * 4.0 * 6.0 + groups + 3.0 + 1.0) * 2f64.powi(-24),
            delta: all * (least * under_scales + 2f64.powi(-150)) * lower.exp2(),
        }
    }

    /// Returns the maximum error, given the magnitudes' sum under the global scale, and the scale
    /// itself.
    pub fn error(self, magnitudes: f64, scale: f64) -> f64 {
        self.gamma * magnitudes + self.delta * scale
    }

    /// Returns the larger of two bounds.
    pub fn or(self, other: Self) -> Self {
        Self { gamma: self.gamma.max(other.gamma), delta: self.delta.max(other.delta) }
    }

    /// Returns twice the bound, for the distance of two results.
    pub fn twice(self) -> Self {
        Self { gamma: 2.0 * self.gamma, delta: 2.0 * self.delta }
    }
}

/// Returns the largest scale of a row that is a number.
fn largest_scale(weights: &QuantizedTensor, row: usize) -> f64 {
    let blocks = weights.blocks_per_row();
    let scales = weights.scales()[row * blocks..][..blocks].iter();
    let values = scales.map(|scale| oracle::value(weights.format(), ONE, *scale, None));
    values.filter(|scale| scale.is_finite()).fold(0.0, f64::max)
}

/// Returns the segments of each token. They fill the tile columns that `tokens` tokens leave free.
pub fn segments(tokens: usize) -> usize {
    8 / tokens.next_power_of_two().min(8)
}

/// Exact products to compare results with.
#[derive(Debug)]
pub struct ExactProducts {
    rows: usize,
    /// Row by row, one token after the other.
    products: Vec<Product>,
    /// The factor of the global scale.
    scale: f64,
}

/// Minimum number of multiplications for which threads pay off.
const LARGE: usize = 1 << 21;

#[derive(Clone, Copy, Debug)]
enum Product {
    /// A sum and the sum of its terms' magnitudes, under the global scale.
    Number { exact: f64, magnitudes: f64 },
    /// Some terms are not finite, so the sum is NaN or an infinity.
    NotFinite(f64),
    /// A sum that may exceed f32's range.
    Large,
}

impl ExactProducts {
    /// Computes the products of weights and each token's activations.
    ///
    /// Large products use their own threads instead of rayon's. A waiting thread of rayon may start
    /// another test that waits for this product.
    pub fn of<T: Exact>(weights: &QuantizedTensor, x: &[T], tokens: usize) -> Self {
        let (rows, cols) = (weights.rows(), weights.cols());
        let under = |sum| dot::under(sum, weights.global_scale());
        let x: Vec<f64> = x[..tokens * cols].iter().map(|x| x.to_f64()).collect();
        let product = |elements: &[(f64, f64)], token: usize| {
            let x = &x[token * cols..][..cols];
            let dot::Weighted { sum, magnitudes, not_finite } =
                dot::weighted_elements(elements.iter().copied(), x);
            match not_finite {
                // Half of the limit at which the reference's streams overflow.
                _ if magnitudes >= 2f64.powi(133) && !not_finite.is_nan() => Product::Large,
                0.0 => Product::Number { exact: under(sum.to_f64()), magnitudes: under(magnitudes) },
                _ => Product::NotFinite(not_finite),
            }
        };
        let of_row = |row: usize| {
            let elements: Vec<_> = dot::elements(weights, row).collect();
            (0..tokens).map(|token| product(&elements, token)).collect::<Vec<_>>()
        };
        let threads =
            if rows * cols * tokens < LARGE { 1 } else { available_parallelism().map_or(1, usize::from) };
        let mut by_row = vec![Vec::new(); rows];
        let rows_a_thread = rows.div_ceil(threads).max(1);
        scope(|scope| {
            for (i, by_row) in by_row.chunks_mut(rows_a_thread).enumerate() {
                let of_row = &of_row;
                let mut compute = move || {
                    for (products, row) in by_row.iter_mut().zip(i * rows_a_thread..) {
                        *products = of_row(row);
                    }
                };
                if threads == 1 {
                    compute();
                } else {
                    scope.spawn(compute);
                }
            }
        });
        let products = (0..tokens).flat_map(|token| by_row.iter().map(move |of_row| of_row[token])).collect();
        Self { rows, products, scale: under(1.0) }
    }

    /// Takes exact sums, row by row, one token after the other.
    pub fn of_sums(rows: usize, sums: impl Iterator<Item = f64>) -> Self {
        let products = sums.map(|exact| Product::Number { exact, magnitudes: exact.abs() }).collect();
        Self { rows, products, scale: 1.0 }
    }

    /// Returns the number of products.
    pub fn count(&self) -> usize {
        self.products.len()
    }

    /// Returns an exact product and its maximum error before rounding under `bound`.
    ///
    /// `None` for products that are not finite, or large.
    pub fn number(&self, index: usize, bound: &Bound) -> Option<(f64, f64)> {
        match self.products[index] {
            Product::Number { exact, magnitudes } => Some((exact, bound.error(magnitudes, self.scale))),
            _ => None,
        }
    }

    /// Checks all results, and counts results more than one number away from the exact ones.
    ///
    /// # Errors
    /// Returns a message about the first result that is too far off.
    pub fn check<T: Exact>(&self, found: &[T], bound: &Bound) -> Result<usize, String> {
        self.check_some(found, bound, |_| true)
    }

    /// [`Self::check`] for some rows.
    ///
    /// # Errors
    /// Returns a message about the first result that is too far off.
    pub fn check_some<T: Exact>(
        &self,
        found: &[T],
        bound: &Bound,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<usize, String> {
        if found.len() != self.products.len() {
            return Err(format!("{} results instead of {}", found.len(), self.products.len()));
        }
        let mut far = 0;
        for (i, (y, product)) in found.iter().zip(&self.products).enumerate() {
            let (token, row) = (i / self.rows, i % self.rows);
            if !wanted(row) {
                continue;
            }
            match *product {
                Product::Large => {}
                Product::NotFinite(what) => {
                    if y.bits() != T::round_f64(what).bits() {
                        return Err(format!("{y:?} is not {what}: token {token}, row {row}"));
                    }
                }
                Product::Number { exact, magnitudes } => {
                    let error = bound.error(magnitudes, self.scale);
                    near(*y, exact, error).map_err(|wrong| format!("{wrong}: token {token}, row {row}"))?;
                    let right = T::round_f64(exact);
                    let same_sign = (right.bits() ^ y.bits()) >> (T::BITS - 1) == 0;
                    far += usize::from(!same_sign || right.bits().abs_diff(y.bits()) > 1);
                }
            }
        }
        Ok(far)
    }
}

/// Checks that a result is within `error` plus half a unit in the last place of the exact one.
///
/// # Errors
/// Returns a message about the result if it is too far off.
pub fn near<T: Exact>(y: T, exact: f64, error: f64) -> Result<(), String> {
    let found = y.to_f64();
    // Above the largest number is infinity, and below it a number at the dtype's usual distance.
    let magnitude = T::round_f64(found.abs().min(T::LARGEST));
    let below = if magnitude.to_f64() == T::LARGEST { T::of_bits(magnitude.bits() - 1) } else { magnitude };
    let ulp = T::of_bits(below.bits() + 1).to_f64() - below.to_f64();
    let near = if found.is_infinite() {
        exact.abs() >= T::LARGEST + 0.5 * ulp - error && (exact < 0.0) == (found < 0.0)
    } else {
        (found - exact).abs() <= 0.5 * ulp + error
    };
    if near { Ok(()) } else { Err(format!("{y:?} is not {exact:e} ± {error:e}")) }
}

/// Returns MXFP4's smallest and largest scale for which weights are exact and products in range.
///
/// The dtype is the activations'.
pub fn usual_scales<T: Exact>() -> [u8; 2] {
    if T::LARGEST > 1e5 { [16, 142] } else { [107, 131] }
}

/// Returns whether GPUs fall back to the reference for a row of MXFP4.
///
/// True if a block with nonzero codes has a scale outside [`usual_scales`].
pub fn is_unusual<T: Exact>(weights: &QuantizedTensor, row: usize) -> bool {
    let QuantizedShape { format, .. } = weights.shape();
    if format != Format::Mxfp4 {
        return false;
    }
    let [first, last] = usual_scales::<T>();
    let (blocks, bytes) = (weights.blocks_per_row(), weights.format().block_bytes());
    let codes = weights.codes()[row * blocks * bytes..][..blocks * bytes].chunks(bytes);
    let scales = &weights.scales()[row * blocks..][..blocks];
    codes
        .zip(scales)
        .any(|(codes, scale)| !(first..=last).contains(scale) && codes.iter().any(|code| code & 0x77 != 0))
}
