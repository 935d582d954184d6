//! Bands: consecutive elements or rows of a tensor that are in memory at once.

use std::ops::Range;

use microscale::Device;

use crate::read::tensor::elements;

/// Elements of a band, unless a single row has more. With their codes they fit in the second-level
/// cache of a core, and take a thread some 100 µs or more. A multiple of the elements that
/// [`ErrorStats`](microscale::ErrorStats) sums at a time.
pub(crate) const BAND: usize = 1 << 18;

/// Elements of a band of a matrix that is stored as its transpose, unless a single row has more: a
/// larger band reads longer runs of each stored row.
const TRANSPOSED_BAND: usize = 1 << 20;

/// Elements of a band for a device with memory of its own, where each band costs copies and
/// launches.
const DEVICE_BAND: usize = 1 << 22;

/// Elements of a band for a device, unless a single row has more.
pub(crate) fn band_for(device: &Device) -> usize {
    if device.has_memory() { DEVICE_BAND } else { BAND }
}

/// The number of bands of `elements` elements: at least one.
pub(crate) fn count(elements: usize) -> usize {
    elements.div_ceil(BAND).max(1)
}

/// Splits `elements` elements into bands of `each`: at least one, which may be empty.
pub(crate) fn bands(elements: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    ranges(elements, each)
}

/// The band of a number.
pub(crate) fn band(elements: usize, number: usize) -> Range<usize> {
    (number * BAND).min(elements)..((number + 1) * BAND).min(elements)
}

/// Splits the rows of a matrix into bands of about `each` elements: at least one, which may be
/// empty.
///
/// No band crosses a multiple of `rows_each`, if it is given.
pub(crate) fn row_bands(
    rows: usize,
    cols: usize,
    rows_each: Option<usize>,
    each: usize,
) -> impl Iterator<Item = Range<usize>> {
    let rows = if cols == 0 { 0 } else { rows };
    ranges(rows, rows_each.unwrap_or(usize::MAX)).flat_map(move |part| {
        let within = ranges(part.len(), each / cols.max(1));
        within.map(move |band| part.start + band.start..part.start + band.end)
    })
}

/// Bands of matrices that are stored transposed, in the order of the matrices' elements.
///
/// Each band has rows of one matrix, a multiple of `block`, because blocks run along the stored
/// columns.
pub(crate) fn transposed_bands(shape: &[usize], block: usize) -> Vec<Range<usize>> {
    let all = elements(shape) as usize;
    // If one size is 0, the others are not bounded.
    let [.., rows, cols] = *shape else { return bands(all, TRANSPOSED_BAND).collect() };
    if all == 0 {
        return bands(0, BAND).collect();
    }
    let (matrix, unit) = (rows * cols, block * cols);
    let of_matrix = |start| {
        let within = ranges(matrix, (TRANSPOSED_BAND / unit).max(1) * unit);
        within.map(move |band| start + band.start..start + band.end)
    };
    (0..all).step_by(matrix).flat_map(of_matrix).collect()
}

fn ranges(count: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    let each = each.max(1);
    (0..count.max(1)).step_by(each).map(move |start| start..count.min(start.saturating_add(each)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_cover_everything_once() {
        for (count, each) in [(0, 1), (1, 1), (7, 3), (9, 3), (5, 0), (4, usize::MAX)] {
            let mut end = 0;
            for range in ranges(count, each) {
                assert_eq!(range.start, end);
                assert!(range.len() <= each.max(1));
                end = range.end;
            }
            assert_eq!(end, count);
        }
        assert!(
            row_bands(usize::MAX, 0, None, BAND).eq(std::iter::once(0..0)),
            "nothing of however many rows"
        );
        assert_eq!(row_bands(2, 2 * BAND, None, BAND).collect::<Vec<_>>(), [0..1, 1..2]);
        assert_eq!(row_bands(6, BAND / 2, Some(3), BAND).collect::<Vec<_>>(), [0..2, 2..3, 3..5, 5..6]);
    }

    #[test]
    fn bands_of_transposes_are_whole_blocks_of_one_matrix() {
        let (rows, cols) = (96, TRANSPOSED_BAND / 64);
        let found = transposed_bands(&[2, rows, cols], 32);
        let at = |row: usize| row * cols;
        assert_eq!(found, [at(0)..at(64), at(64)..at(96), at(96)..at(160), at(160)..at(192)]);
        assert_eq!(transposed_bands(&[usize::MAX, 0, usize::MAX], 32), Vec::from_iter(bands(0, BAND)));
    }
}
