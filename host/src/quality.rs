//! How far two tensors are apart.

use std::ops::AddAssign;

use rayon::prelude::*;

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

/// Elements summed into one partial sum.
const PART: usize = 1 << 14;
/// Running sums kept side by side, so that the compiler vectorises.
const LANES: usize = 8;

impl ErrorStats {
    /// Compares equally long slices, the original first.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn between<A: Element, B: Element>(original: &[A], approximation: &[B]) -> Self {
        assert_eq!(original.len(), approximation.len(), "slices of different lengths cannot be compared");
        let parts: Vec<Self> = original
            .par_chunks(PART)
            .zip(approximation.par_chunks(PART))
            .map(|(a, b)| Self::of_part(a, b))
            .collect();
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
        let pairs = RoundTrip::new(values, shape, tensor)?;
        let rows: Vec<Self> = pairs
            .rows()
            .map(|row| {
                let mut sum = Self::default();
                row.for_each_part(|values, back, _| sum += Self::of_part(values, back));
                sum
            })
            .collect();
        Ok(rows.into_iter().fold(Self::default(), |mut sum, part| {
            sum += part;
            sum
        }))
    }

    fn of_part<A: Element, B: Element>(original: &[A], approximation: &[B]) -> Self {
        let mut lanes = [[0.0f64; LANES]; 5];
        let mut non_finite = 0;
        let (wholes, tail) = original.as_chunks::<LANES>();
        let (other_wholes, other_tail) = approximation.as_chunks::<LANES>();
        let mut add = |lane: usize, a: A, b: B| {
            let (a, b) = (f64::from(a.to_f32()), f64::from(b.to_f32()));
            let finite = a.is_finite() & b.is_finite();
            let (a, b) = if finite { (a, b) } else { (0.0, 0.0) };
            let difference = a - b;
            non_finite += u64::from(!finite);
            lanes[0][lane] += a * a;
            lanes[1][lane] += difference * difference;
            lanes[2][lane] += b * b;
            lanes[3][lane] += a * b;
            lanes[4][lane] = lanes[4][lane].max(difference.abs());
        };
        for (a, b) in wholes.iter().zip(other_wholes) {
            for lane in 0..LANES {
                add(lane, a[lane], b[lane]);
            }
        }
        for (lane, (a, b)) in tail.iter().zip(other_tail).enumerate() {
            add(lane, *a, *b);
        }
        let [signal, noise, approximation, product, _] = lanes.map(|lanes| lanes.iter().sum());
        let max_abs = lanes[4].iter().fold(0.0, |most: f64, lane| most.max(*lane));
        let elements = original.len() as u64 - non_finite;
        Self { elements, non_finite, signal, noise, approximation, product, max_abs }
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
