//! Sums over the differences of elements and their approximations, for part of a row.

use microscale_formats::errors::{ERROR_LANES, ErrorSums};

use crate::element::Element;

/// Partial sums, side by side so that the compiler vectorizes.
const LANES: usize = ERROR_LANES as usize;

/// Sums over elements and their approximations.
///
/// The order of additions is the same for every instruction set, and so are the bits.
#[inline(always)]
pub(super) fn of_part<T: Element>(original: &[T], approximation: &[f32]) -> ErrorSums {
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
    // The padding of both sides is zero and adds nothing.
    let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
    for (i, (tail, other)) in tail.iter().zip(other_tail).enumerate() {
        (a[i], b[i]) = (tail.to_f32(), *other);
    }
    sums.add(&a, &b);
    sums.total()
}

/// Partial sums, one per lane.
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
    /// Adds one element and its approximation to each lane.
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

    /// Adds the partial sums of all lanes.
    #[inline(always)]
    fn total(&self) -> ErrorSums {
        let mut total = ErrorSums::default();
        for lane in 0..LANES {
            total.signal += self.signal[lane];
            total.noise += self.noise[lane];
            total.approximation += self.approximation[lane];
            total.product += self.product[lane];
            total.max_abs = total.max_abs.max(self.max_abs[lane]);
            total.non_finite += self.non_finite[lane];
        }
        total
    }
}
