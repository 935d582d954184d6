//! [`ErrorStats`]: sums over pairs of an original and its approximation, and metrics such as SQNR.

use std::ops::AddAssign;

use microscale_formats::errors::ErrorSums;
use rayon::prelude::*;

use super::round_trip::RoundTrip;
use crate::cpu::Isa;
use crate::element::Element;
use crate::elements::{Elements, by_dtype};
use crate::error::Result;
use crate::shape::Shape;
use crate::view::QuantizedView;

/// Sums over pairs of an original element and its approximation, and the common metrics.
///
/// Sums are f64, in an order that does not depend on the number of threads, so a metric is the same
/// in every run. Pairs with a non-finite element are excluded and counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ErrorStats {
    /// Number of pairs, including excluded ones.
    pairs: u64,
    sums: ErrorSums,
}

/// Elements per task of a thread.
const PART: usize = 1 << 14;
/// Elements per partial sum. They fit in the first-level cache.
const BUFFER: usize = 1024;

impl ErrorStats {
    /// Compares slices of equal length, the original first.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn between<A: Element, B: Element>(original: &[A], approximation: &[B]) -> Self {
        Self::default().and_between(original, approximation)
    }

    /// Adds the comparison of further pairs to [`Self::between`].
    ///
    /// In bands of a multiple of 16384 pairs, the sums equal the sums of all pairs in one call, to
    /// the bit.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn and_between<A: Element, B: Element>(self, original: &[A], approximation: &[B]) -> Self {
        self.and_parts(&Self::parts_between(original, approximation))
    }

    /// Returns the partial sums of [`Self::between`], one per 16384 pairs, for [`Self::and_parts`].
    ///
    /// Threads that compare different bands of a tensor return parts, and one of them adds the
    /// parts in order. The result does not depend on which band was done first.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn parts_between<A: Element, B: Element>(original: &[A], approximation: &[B]) -> Vec<Self> {
        assert_eq!(original.len(), approximation.len(), "slices of different lengths cannot be compared");
        Self::parts_of_elements(Elements::of(original), Elements::of(approximation))
    }

    /// [`Self::parts_between`] without type parameters, so that it is compiled once.
    fn parts_of_elements(original: Elements<'_>, approximation: Elements<'_>) -> Vec<Self> {
        let (isa, len) = (Isa::best(), original.len());
        let parts = (0..len.div_ceil(PART)).into_par_iter().map(|i| {
            let (mut sum, part) = (Self::default(), i * PART);
            let mut buffer = [0.0f32; BUFFER];
            for start in (part..len.min(part + PART)).step_by(BUFFER) {
                let wide = &mut buffer[..BUFFER.min(len - start)];
                by_dtype!(Elements, approximation => {
                    let values = &approximation[start..];
                    wide.iter_mut().zip(values).for_each(|(wide, b)| *wide = Element::to_f32(*b));
                });
                sum += Self::of_part(wide.len(), isa.errors(original.part(start, wide.len()), wide));
            }
            sum
        });
        parts.collect()
    }

    /// Compares a matrix with its quantized form.
    ///
    /// # Errors
    /// The errors of [`crate::quantize`] about shapes.
    pub fn of_quantized<'a, T: Element>(
        values: &[T],
        shape: Shape,
        tensor: impl Into<QuantizedView<'a>>,
    ) -> Result<Self> {
        Self::default().and_quantized(values, shape, tensor)
    }

    /// Adds the comparison of further rows to [`Self::of_quantized`].
    ///
    /// The sums equal the sums of all rows in one call, to the bit.
    ///
    /// # Errors
    /// The errors of [`crate::quantize`] about shapes.
    pub fn and_quantized<'a, T: Element>(
        self,
        values: &[T],
        shape: Shape,
        tensor: impl Into<QuantizedView<'a>>,
    ) -> Result<Self> {
        Ok(self.and_parts(&Self::parts_of_quantized(values, shape, tensor)?))
    }

    /// Returns the partial sums of [`Self::of_quantized`], one per row, for [`Self::and_parts`].
    ///
    /// # Errors
    /// The errors of [`crate::quantize`] about shapes.
    pub fn parts_of_quantized<'a, T: Element>(
        values: &[T],
        shape: Shape,
        tensor: impl Into<QuantizedView<'a>>,
    ) -> Result<Vec<Self>> {
        Ok(Self::parts_of_pairs(&RoundTrip::new(values, shape, tensor.into())?))
    }

    /// [`Self::parts_of_quantized`] without type parameters, so that it is compiled once.
    fn parts_of_pairs(pairs: &RoundTrip<'_>) -> Vec<Self> {
        let isa = Isa::best();
        let rows = pairs.rows().map(|row| {
            let mut sum = Self::default();
            row.for_each_part(|values, back, _| {
                sum += Self::of_part(values.len(), isa.errors(values, back));
            });
            sum
        });
        rows.collect()
    }

    /// Adds partial sums in their order.
    pub fn and_parts(self, parts: &[Self]) -> Self {
        parts.iter().fold(self, |mut sum, part| {
            sum += *part;
            sum
        })
    }

    /// Returns the statistics of a matrix whose rows were summed in `parts_per_row` parts each.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "GPUs sum so"))]
    pub(crate) fn of_parts(parts: &[ErrorSums], parts_per_row: usize, elements: u64) -> Self {
        let mut total = Self::default();
        for row in parts.chunks(parts_per_row.max(1)) {
            let mut sum = Self::default();
            for part in row {
                sum += Self::of_part(0, *part);
            }
            total += sum;
        }
        total.pairs = elements;
        total
    }

    /// Returns the statistics of `pairs` summed pairs.
    fn of_part(pairs: usize, sums: ErrorSums) -> Self {
        Self { pairs: pairs as u64, sums }
    }

    /// Returns the number of compared pairs.
    pub fn elements(&self) -> u64 {
        self.pairs - self.sums.non_finite
    }

    /// Returns the number of pairs excluded because an element is NaN or infinite.
    pub fn non_finite(&self) -> u64 {
        self.sums.non_finite
    }

    /// Returns a metric, or NaN if no pairs were compared.
    fn of_data(&self, figure: f64) -> f64 {
        if self.elements() == 0 { f64::NAN } else { figure }
    }

    /// Returns Σ(a − b)² / Σa², or 0 if both are 0.
    ///
    /// This and the other metrics are NaN if every pair was excluded.
    pub fn relative_squared_error(&self) -> f64 {
        let relative = if self.sums.noise == 0.0 { 0.0 } else { self.sums.noise / self.sums.signal };
        self.of_data(relative)
    }

    /// Returns the signal to quantization noise ratio, 10 log₁₀ (Σa² / Σ(a − b)²), in dB.
    ///
    /// It is infinite without noise.
    pub fn sqnr_db(&self) -> f64 {
        -10.0 * self.relative_squared_error().log10()
    }

    /// Returns the largest |a − b|.
    pub fn max_abs_error(&self) -> f64 {
        self.of_data(self.sums.max_abs)
    }

    /// Returns the cosine of the angle between the two: 1 if both are zero, 0 if only one is.
    pub fn cosine(&self) -> f64 {
        let ErrorSums { signal, approximation, product, .. } = self.sums;
        self.of_data(match (signal == 0.0, approximation == 0.0) {
            (true, true) => 1.0,
            (false, false) => product / (signal.sqrt() * approximation.sqrt()),
            _ => 0.0,
        })
    }
}

impl AddAssign for ErrorStats {
    fn add_assign(&mut self, other: Self) {
        self.pairs += other.pairs;
        let (sums, other) = (&mut self.sums, other.sums);
        sums.non_finite += other.non_finite;
        sums.signal += other.signal;
        sums.noise += other.noise;
        sums.approximation += other.approximation;
        sums.product += other.product;
        sums.max_abs = sums.max_abs.max(other.max_abs);
    }
}
