//! How far two tensors are apart.

use std::ops::AddAssign;

use microscale_formats::errors::{ERROR_LANES, ErrorSums};
use rayon::prelude::*;

use crate::cpu;
use crate::element::Element;
use crate::error::Result;
use crate::round_trip::RoundTrip;
use crate::tensor::{QuantizedTensor, Shape};

/// Sums over pairs of elements, original and approximation, from which the usual figures follow.
///
/// Summed in f64 in an order that does not depend on the number of threads, so that a figure is the same on every run.
/// Pairs in which either element is not finite are counted and left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorStats {
    elements: u64,
    non_finite: u64,
    signal: f64,
    noise: f64,
    approximation: f64,
    product: f64,
    max_abs: f64,
}

/// Elements that a thread takes at once.
const PART: usize = 1 << 14;
/// Elements summed into one partial sum, which lie in the first-level cache meanwhile.
const BUFFER: usize = 1024;
/// Running sums kept side by side, so that the compiler vectorises.
const LANES: usize = ERROR_LANES as usize;

impl ErrorStats {
    /// Compares equally long slices, the original first.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn between<A: Element, B: Element>(original: &[A], approximation: &[B]) -> Self {
        assert_eq!(original.len(), approximation.len(), "slices of different lengths cannot be compared");
        let isa = cpu::Isa::best();
        let parts = original.par_chunks(PART).zip(approximation.par_chunks(PART)).map(|(a, b)| {
            let mut sum = Self::default();
            let mut buffer = [0.0f32; BUFFER];
            for (a, b) in a.chunks(BUFFER).zip(b.chunks(BUFFER)) {
                let wide = &mut buffer[..b.len()];
                wide.iter_mut().zip(b).for_each(|(wide, b)| *wide = b.to_f32());
                sum += isa.errors(a, wide);
            }
            sum
        });
        let parts: Vec<Self> = parts.collect();
        parts.into_iter().fold(Self::default(), |mut sum, part| {
            sum += part;
            sum
        })
    }

    /// Compares a matrix with what it was quantized to.
    ///
    /// # Errors
    /// Those of [`crate::quantize`] about shapes.
    pub fn of_quantized<T: Element>(values: &[T], shape: Shape, tensor: &QuantizedTensor) -> Result<Self> {
        let (pairs, isa) = (RoundTrip::new(values, shape, tensor)?, cpu::Isa::best());
        let rows: Vec<Self> = pairs
            .rows()
            .map(|row| {
                let mut sum = Self::default();
                row.for_each_part(|values, back, _| sum += isa.errors(values, back));
                sum
            })
            .collect();
        Ok(rows.into_iter().fold(Self::default(), |mut sum, part| {
            sum += part;
            sum
        }))
    }

    /// Of a matrix whose rows were summed part by part, of which there are so many a row.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "GPUs sum so"))]
    pub(crate) fn of_parts(parts: &[ErrorSums], parts_per_row: usize, elements: u64) -> Self {
        let mut total = Self::default();
        for row in parts.chunks(parts_per_row.max(1)) {
            let mut sum = Self::default();
            for part in row {
                let ErrorSums { signal, noise, approximation, product, max_abs, non_finite } = *part;
                sum += Self { elements: 0, non_finite, signal, noise, approximation, product, max_abs };
            }
            total += sum;
        }
        total.elements = elements - total.non_finite;
        total
    }

    /// Of elements and their approximations. The sums have the same order, and so the same bits,
    /// whatever it is compiled for.
    #[inline(always)]
    pub(crate) fn of_part<T: Element>(original: &[T], approximation: &[f32]) -> Self {
        let mut sums = LaneSums::default();
        let (wholes, tail) = original.as_chunks::<LANES>();
        let (other_wholes, other_tail) = approximation.as_chunks::<LANES>();
        for (a, b) in wholes.iter().zip(other_wholes) {
            let mut wide = [0.0; LANES];
            for (wide, a) in wide.iter_mut().zip(a) {
                *wide = a.to_f32();
            }
            sums.add(&wide, b);
        }
        // Zeros beside zeros add nothing.
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        for (i, (tail, other)) in tail.iter().zip(other_tail).enumerate() {
            (a[i], b[i]) = (tail.to_f32(), *other);
        }
        sums.add(&a, &b);
        sums.total(original.len() as u64)
    }

    /// Pairs compared.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// Pairs left out because one of them is NaN or infinite.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// Σ(a − b)² / Σa², 0 if both are 0.
    pub fn relative_squared_error(&self) -> f64 {
        if self.noise == 0.0 { 0.0 } else { self.noise / self.signal }
    }

    /// Signal to quantization noise, 10 log₁₀ (Σa² / Σ(a − b)²), in dB; infinite without noise.
    pub fn sqnr_db(&self) -> f64 {
        -10.0 * self.relative_squared_error().log10()
    }

    /// The largest |a − b|.
    pub fn max_abs_error(&self) -> f64 {
        self.max_abs
    }

    /// The cosine of the angle between the two; 1 if both are zero, 0 if one is.
    pub fn cosine(&self) -> f64 {
        match (self.signal == 0.0, self.approximation == 0.0) {
            (true, true) => 1.0,
            (false, false) => self.product / (self.signal.sqrt() * self.approximation.sqrt()),
            _ => 0.0,
        }
    }
}

/// Sums in each lane.
#[derive(Default)]
struct LaneSums {
    signal: [f64; LANES],
    noise: [f64; LANES],
    approximation: [f64; LANES],
    product: [f64; LANES],
    max_abs: [f64; LANES],
    non_finite: [u64; LANES],
}

impl LaneSums {
    /// Adds a pair to each lane.
    #[inline(always)]
    fn add(&mut self, a: &[f32; LANES], b: &[f32; LANES]) {
        for lane in 0..LANES {
            let finite = a[lane].abs() < f32::INFINITY && b[lane].abs() < f32::INFINITY;
            let (a, b) = if finite { (f64::from(a[lane]), f64::from(b[lane])) } else { (0.0, 0.0) };
            let difference = a - b;
            self.non_finite[lane] += u64::from(!finite);
            self.signal[lane] += a * a;
            self.noise[lane] += difference * difference;
            self.approximation[lane] += b * b;
            self.product[lane] += a * b;
            let magnitude = difference.abs();
            self.max_abs[lane] = if magnitude > self.max_abs[lane] { magnitude } else { self.max_abs[lane] };
        }
    }

    /// Over all lanes, of so many pairs.
    #[inline(always)]
    fn total(&self, pairs: u64) -> ErrorStats {
        let mut total = ErrorStats::default();
        for lane in 0..LANES {
            total.signal += self.signal[lane];
            total.noise += self.noise[lane];
            total.approximation += self.approximation[lane];
            total.product += self.product[lane];
            total.max_abs = total.max_abs.max(self.max_abs[lane]);
            total.non_finite += self.non_finite[lane];
        }
        total.elements = pairs - total.non_finite;
        total
    }
}

impl AddAssign for ErrorStats {
    fn add_assign(&mut self, other: Self) {
        self.elements += other.elements;
        self.non_finite += other.non_finite;
        self.signal += other.signal;
        self.noise += other.noise;
        self.approximation += other.approximation;
        self.product += other.product;
        self.max_abs = self.max_abs.max(other.max_abs);
    }
}

#[cfg(test)]
mod tests {
    use approx::assert_relative_eq;

    use super::*;
    use crate::{Recipe, cpu, quantize};

    #[test]
    fn figures_of_a_known_pair() {
        let stats = ErrorStats::between(&[3.0f32, 4.0, f32::NAN], &[3.0f32, 3.0, 1.0]);
        assert_eq!((stats.elements(), stats.non_finite()), (2, 1));
        assert_relative_eq!(stats.relative_squared_error(), 1.0 / 25.0);
        assert_relative_eq!(stats.sqnr_db(), 13.979400086720377, max_relative = 1e-12);
        assert_relative_eq!(stats.cosine(), 21.0 / (5.0 * 18f64.sqrt()), max_relative = 1e-12);
        assert_relative_eq!(stats.max_abs_error(), 1.0);
    }

    #[test]
    fn of_quantized_is_between_original_and_dequantized() {
        let (rows, cols, stride) = (7, 1100, 1111);
        let values: Vec<f32> = (0..rows * stride).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let shape = Shape::new(rows, cols).with_row_stride(stride);
        let tensor = quantize(&values, shape, &Recipe::default()).unwrap().tensor;
        let dense: Vec<f32> = values.chunks(stride).flat_map(|row| &row[..cols]).copied().collect();
        let whole = ErrorStats::between(&dense, &cpu::dequantize::<f32>(&tensor));
        let parts = ErrorStats::of_quantized(&values, shape, &tensor).unwrap();
        assert_relative_eq!(
            parts.relative_squared_error(),
            whole.relative_squared_error(),
            max_relative = 1e-12
        );
        assert_eq!(parts.max_abs_error(), whole.max_abs_error());
    }
}
