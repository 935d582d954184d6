//! Checks the values of unquantized tensors: NaN, infinities and zeros. Each tensor is read once.

use std::ops::Range;

use microscale::formats::{E4m3, E5m2};
use microscale::{Element, ErrorStats};
use safetensors::Dtype;

use super::cache_names::is_cache_scale;
use super::contents::{Zeros, weight_of};
use super::finding::{Defect, Finding};
use super::original::{PlainDifference, has_same_bytes, report_plain};
use crate::dtype::FileDtype;
use crate::error::Result;
use crate::pipeline::Worker;
use crate::read::bands::{self, BAND, row_bands};
use crate::read::input::Input;
use crate::read::tensor::Tensor;
use crate::read::values::{Values, with_values};

/// What some rows of a tensor have.
#[derive(Clone, Copy, Default)]
struct Found {
    nan: u64,
    infinite: u64,
    /// The element of the first NaN or infinity.
    first: Option<usize>,
    /// Rows of zeros.
    zero: usize,
}

impl Found {
    /// The sum of both; `later` is of elements after these.
    fn then(self, later: Self) -> Self {
        Self {
            nan: self.nan + later.nan,
            infinite: self.infinite + later.infinite,
            first: self.first.or(later.first),
            zero: self.zero + later.zero,
        }
    }

    fn add(&mut self, value: f32, element: usize) {
        self.nan += u64::from(value.is_nan());
        self.infinite += u64::from(value.is_infinite());
        if !value.is_finite() {
            self.first.get_or_insert(element);
        }
    }
}

/// Checks the values of a tensor, and compares them with its original if there is one. Returns its
/// rows of zeros.
///
/// Masks may have infinities. Integers have no values to check.
///
/// # Errors
/// The errors of reading.
pub(super) fn check_values<'env>(
    input: &Input<'env>,
    original: Option<&Input<'env>>,
    worker: &Worker<'_, 'env>,
    findings: &mut Vec<Finding>,
) -> Result<Zeros> {
    let tensor = input.tensor;
    let of_shape = original.filter(|original| original.tensor.shape == tensor.shape);
    let (mut found, mut difference) = (Found::default(), PlainDifference::default());
    let mut add = |(of_band, of_other): (Found, Compared)| {
        found = found.then(of_band);
        difference.first = difference.first.or(of_other.first);
        if !of_other.parts.is_empty() {
            difference.errors = Some(difference.errors.unwrap_or_default().and_parts(&of_other.parts));
        }
        Ok(())
    };
    let (rows, cols) = tensor.matrix();
    let by_bytes = of_shape.is_some_and(|original| has_same_bytes(&tensor, &original.tensor));
    if tensor.values_dtype().is_some() && !(tensor.scaling.is_some() && of_shape.is_none()) {
        let bands: Vec<_> = match cols <= BAND {
            true => {
                row_bands(rows, cols, None, BAND).map(|rows| rows.start * cols..rows.end * cols).collect()
            }
            false => bands::bands(rows * cols, BAND).collect(),
        };
        let (count, input, other) = (bands.len(), input.clone(), of_shape.cloned());
        let of_band = move |number: usize| {
            let band = bands.get(number).cloned().unwrap_or_default();
            let look = |values: Values<'_>| {
                let found = with_values!(&values, slice => in_rows(slice, cols, band.start));
                Ok((found, compared(&values, other.as_ref(), band.clone(), by_bytes)?))
            };
            input.with_values(band.clone(), look)?
        };
        worker.each_band(count, of_band, &mut add)?;
        if cols > BAND {
            // Bands are parts of rows.
            found.zero = if found.zero == count { rows } else { 0 };
        }
    } else {
        let (data, decode) = (tensor.data, decode(tensor.dtype));
        let other = of_shape.filter(|_| by_bytes).map(|original| original.tensor.data);
        let each = tensor.dtype.bytes_of(1).max(1) as usize;
        let of_band = move |number: usize| {
            let band = bands::band(data.len(), number);
            let (bytes, start) = (&data[band.clone()], band.start / each);
            let differs = other.and_then(|other| first_difference(bytes, other.get(band)?));
            let first = differs.map(|first| start + first / each);
            let found = decode.map_or(Found::default(), |decode| in_bytes(bytes, each, start, decode));
            Ok((found, Compared { first, parts: Vec::new() }))
        };
        worker.each_band(bands::count(data.len()), of_band, &mut add)?;
    }
    let infinite = if tensor.name.contains("mask") { 0 } else { found.infinite };
    // Scales have checks of their own.
    let is_input_scale = [".input_scale", ".input_global_scale"].iter().any(|end| tensor.name.ends_with(end));
    let is_scale = is_input_scale || is_cache_scale(tensor.name) || weight_of(tensor.name) != tensor.name;
    if let Some(first) = found.first.filter(|_| found.nan + infinite > 0 && !is_scale) {
        let (row, col) = (first / cols.max(1), first % cols.max(1));
        let (nan, of) = (found.nan, tensor.elements());
        let what = format!(
            "{nan} of {of} values are NaN and {infinite} infinite, the first in row {row}, column {col}"
        );
        findings.push(Finding::of(Defect::NonFinite, &tensor, what));
    } else if let Some(original) = original {
        report_plain(&tensor, &original.tensor, &difference, findings);
    }
    Ok(Zeros { rows, zero: found.zero })
}

/// A band, compared with the original's.
struct Compared {
    /// The first element with other bytes.
    first: Option<usize>,
    /// The partial sums of the errors, if the dtypes differ.
    parts: Vec<ErrorStats>,
}

/// Compares the values of a band with the original's.
fn compared(
    values: &Values<'_>,
    original: Option<&Input<'_>>,
    band: Range<usize>,
    by_bytes: bool,
) -> Result<Compared> {
    let Some(original) = original.filter(|original| original.tensor.values_dtype().is_some()) else {
        return Ok(Compared { first: None, parts: Vec::new() });
    };
    let start = band.start;
    original.with_values(band, |original| match by_bytes {
        true => Compared {
            first: values.first_difference(&original).map(|first| start + first),
            parts: Vec::new(),
        },
        false => Compared { first: None, parts: original.error_parts(values) },
    })
}

fn first_difference<T: PartialEq>(this: &[T], other: &[T]) -> Option<usize> {
    if this == other { None } else { this.iter().zip(other).position(|(this, other)| this != other) }
}

/// Decodes the bytes of an element.
type Decode = fn(&[u8]) -> f32;

/// Returns how floats that cannot be quantized are decoded.
fn decode(dtype: FileDtype) -> Option<Decode> {
    fn byte(bytes: &[u8]) -> u8 {
        bytes.first().copied().unwrap_or(0)
    }
    match dtype {
        FileDtype::F8_E4M3 => Some(|bytes| E4m3::from_bits(byte(bytes)).to_f32()),
        FileDtype::Plain(Dtype::F8_E5M2) => Some(|bytes| E5m2::from_bits(byte(bytes)).to_f32()),
        FileDtype::F64 => {
            Some(|bytes| bytes.try_into().map_or(0.0, |bytes| f64::from_le_bytes(bytes) as f32))
        }
        _ => None,
    }
}

/// Looks at the elements in some bytes. `start` is the first one.
fn in_bytes(bytes: &[u8], each: usize, start: usize, decode: Decode) -> Found {
    let mut found = Found::default();
    for (element, bytes) in (start..).zip(bytes.chunks_exact(each)) {
        found.add(decode(bytes), element);
    }
    found
}

/// Looks at whole rows of `cols` values. `start` is the element of the first one.
fn in_rows<T: Element>(values: &[T], cols: usize, start: usize) -> Found {
    let mut found = Found::default();
    for (row, values) in values.chunks(cols.max(1)).enumerate() {
        // Magnitudes have the order of their bits.
        let largest = values.iter().map(|value| value.to_f32().to_bits() & 0x7FFF_FFFF).max();
        found.zero += usize::from(largest == Some(0));
        if largest >= Some(f32::INFINITY.to_bits()) {
            for (col, value) in values.iter().enumerate() {
                found.add(value.to_f32(), start + row * cols + col);
            }
        }
    }
    found
}

/// Checks that a scalar scale is a positive number; `None` if it is, or no float.
pub(super) fn wrong_scale(tensor: &Tensor<'_>) -> Option<f32> {
    let values = tensor.values()?;
    with_values!(&values, slice => {
        slice.iter().map(|value| value.to_f32()).find(|value| !(value.is_finite() && *value > 0.0))
    })
}
