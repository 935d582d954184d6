//! Values in a narrower dtype that has no finite number for some of them: counted, and written as a
//! policy says.

use microscale::{Dtype, Element, NonFinite, Position, Report};
use rayon::prelude::*;

use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::read::tensor::Tensor;

/// Values that a thread looks at together.
const TOGETHER: usize = 1 << 16;

/// Replaces values that are not finite as a policy says, and counts them. `first` is the element of
/// the first value, in rows of `cols`. [`check`] refuses the values that the policy does not allow.
pub(crate) fn replace<T: Element>(values: &mut [T], first: usize, cols: usize, policy: NonFinite) -> Report {
    let parts = values.par_chunks_mut(TOGETHER).enumerate().map(|(part, values)| {
        let mut report = Report::default();
        if are_finite(values) {
            return report;
        }
        for (at, value) in values.iter_mut().enumerate() {
            let number = value.to_f32();
            if number.is_finite() {
                continue;
            }
            let element = first + part * TOGETHER + at;
            let position = Position { row: element / cols.max(1), col: element % cols.max(1) };
            report.first_non_finite.get_or_insert(position);
            report.nan += u64::from(number.is_nan());
            report.infinite += u64::from(number.is_infinite());
            if policy == NonFinite::Saturate {
                let finite = if number.is_nan() { 0.0 } else { number.clamp(-T::MAX, T::MAX) };
                *value = T::from_f32(finite);
            }
        }
        report
    });
    parts.reduce(Report::default, |mut all, report| {
        all += report;
        all
    })
}

/// Returns whether all values are finite: none has an exponent of ones. Without a branch for each
/// value, which compilers make vectors of.
fn are_finite<T: Element>(values: &[T]) -> bool {
    let words = |ones: u16| {
        let words: &[u16] = bytemuck::cast_slice(values);
        words.iter().fold(true, |finite, word| finite & (word & ones != ones))
    };
    match T::DTYPE {
        Dtype::F32 => {
            let (words, ones): (&[u32], _) = (bytemuck::cast_slice(values), 0x7F80_0000);
            words.iter().fold(true, |finite, word| finite & (word & ones != ones))
        }
        Dtype::F16 => words(0x7C00),
        Dtype::Bf16 => words(0x7F80),
    }
}

/// Refuses a tensor with values that are not finite in dtype `T`, if that is the policy. `nan`
/// tells whether NaN counts.
///
/// # Errors
/// [`FormatError::NotFinite`](crate::FormatError::NotFinite).
pub(crate) fn check<T: Element>(
    tensor: &Tensor<'_>,
    name: &str,
    report: &Report,
    policy: NonFinite,
    nan: bool,
) -> Result<()> {
    let Some(first) = report.first_non_finite.filter(|_| policy == NonFinite::Error) else { return Ok(()) };
    if report.infinite == 0 && !nan {
        return Ok(());
    }
    let (file, tensor, dtype, most) = (tensor.file.into(), name.into(), T::DTYPE, T::MAX);
    let Report { infinite, nan, .. } = *report;
    Err(Error::Format(FormatError::NotFinite { file, tensor, dtype, most, first, infinite, nan }))
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn replaced<T: Element>(values: &[f32], policy: NonFinite) -> (Vec<f32>, Report) {
        let mut values: Vec<T> = values.iter().map(|value| T::from_f32(*value)).collect();
        let report = replace(&mut values, 0, 100, policy);
        (values.iter().map(|value| value.to_f32()).collect(), report)
    }

    #[test]
    fn each_policy_has_its_values_and_all_have_the_counts() {
        let mut values = vec![1.0f32; 3 * TOGETHER];
        let places = [TOGETHER + 5, TOGETHER + 6, 2 * TOGETHER];
        (values[places[0]], values[places[1]], values[places[2]]) = (-65520.0, f32::NAN, 1e38);
        for policy in [NonFinite::Error, NonFinite::Propagate, NonFinite::Saturate] {
            let (found, report) = replaced::<f16>(&values, policy);
            assert_eq!((report.nan, report.infinite), (1, 2), "{policy:?}");
            let first = Position { row: places[0] / 100, col: places[0] % 100 };
            assert_eq!(report.first_non_finite, Some(first));
            let finite = policy == NonFinite::Saturate;
            let of = |place: usize| found[places[place]];
            assert_eq!(of(0), if finite { -65504.0 } else { f32::NEG_INFINITY });
            assert_eq!((of(1).is_nan(), of(2)), (!finite, if finite { 65504.0 } else { f32::INFINITY }));
            assert_eq!(found.iter().filter(|value| **value == 1.0).count(), values.len() - 3);
        }
    }

    #[test]
    fn the_largest_number_of_each_dtype_is_in_range_and_the_next_rounds_beyond() {
        fn counts<T: Element>(value: f32) -> u64 {
            replaced::<T>(&[value, -value], NonFinite::Propagate).1.infinite
        }
        // Values round to the largest number up to half the distance to the next.
        assert_eq!([65504.0, 65519.0, 65520.0].map(counts::<f16>), [0, 0, 2]);
        let largest = bf16::MAX.to_f32();
        assert_eq!([largest, f32::MAX].map(counts::<bf16>), [0, 2]);
        assert_eq!([f32::MAX, f32::INFINITY].map(counts::<f32>), [0, 2]);
    }
}
