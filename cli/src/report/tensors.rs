//! Loss by tensor: a plot by layer, and a table with a bar per tensor.

use microscale::{ErrorStats, Format, Report};
use microscale_checkpoint::{Outcome, Plain, Summary, TensorSummary};

use super::rows::{Row, table};
use crate::markup::{Markup, Px};
use crate::plot::axis::Axis;
use crate::plot::point::Point;
use crate::plot::{dots_by_layer, has_layers};
use crate::text::table::{bytes, count, decibels, figure, natural_order, shape};

/// Minimum number of tensors for a plot. Fewer are clear from the table.
const FEWEST_DOTS: usize = 16;
/// A tensor is marked from this distance below the median: the larger of a minimum in dB and a
/// multiple of the median deviation.
const LEAST_DISTANCE: f64 = 1.0;
const DEVIATIONS: f64 = 4.0;
/// Minimum range of the bars in dB, so that small differences look small.
const LEAST_RANGE: f64 = 0.1;
/// Length of the shortest bar, as a share of the longest possible bar.
const SHORTEST_BAR: f64 = 0.02;

struct Quantized<'a> {
    tensor: &'a TensorSummary,
    format: Format,
    report: &'a Report,
    errors: &'a ErrorStats,
    plain: Option<&'a Plain>,
    sqnr_db: f64,
}

impl<'a> Quantized<'a> {
    fn of(tensor: &'a TensorSummary) -> Option<Self> {
        match &tensor.outcome {
            Outcome::Copied(_) => None,
            Outcome::Quantized { format, report, errors, plain, .. } => {
                let sqnr_db = errors.sqnr_db();
                Some(Self { tensor, format: *format, report, errors, plain: plain.as_deref(), sqnr_db })
            }
        }
    }
}

pub(super) fn write(m: &mut Markup, summary: &Summary) {
    let mut tensors: Vec<_> = summary.tensors.iter().filter_map(Quantized::of).collect();
    tensors.sort_by(|a, b| natural_order(&a.tensor.name, &b.tensor.name));
    let typical = Typical::of(tensors.iter().map(|tensor| tensor.sqnr_db));
    let points: Vec<_> =
        tensors.iter().filter_map(|tensor| Point::new(&tensor.tensor.name, tensor.sqnr_db)).collect();
    m.leaf("p", &[], typical.sentence(&tensors));
    if points.len() >= FEWEST_DOTS && has_layers(&points) {
        m.element("div", &[("class", &"scroll")], |m| {
            dots_by_layer(m, &points, summary.totals().errors.sqnr_db());
        });
    }
    let remarks: Vec<_> = tensors.iter().map(|tensor| typical.remarks(tensor)).collect();
    let searched = tensors.iter().any(|tensor| tensor.plain.is_some());
    let remarked = remarks.iter().any(|remarks| !remarks.is_empty());

    let several = summary.formats().len() > 1;
    let mut header = vec!["tensor"];
    header.extend(several.then_some("format"));
    header.extend(["dtype", "shape", ">before", ">after", ">rel. sq. error"]);
    header.extend(searched.then_some(">plain scales"));
    let axis = bars(tensors.iter().map(|tensor| tensor.sqnr_db));
    let (low, high) = axis.ends();
    let range = format!("{low} to {high} dB");
    header.extend([">SQNR", range.as_str()]);
    header.extend(remarked.then_some("remarks"));
    let marks = if remarked { "; ▼ marks tensors below the median" } else { "" };
    let caption = format!(
        "Quantized tensors in natural order. Bars begin at {low} dB and end at {high} dB, the range of this \
         table’s SQNR; the line is the median{marks}."
    );
    table(m, &caption, &header, |rows| {
        rows.body(|rows| {
            for (tensor, remarks) in tensors.iter().zip(&remarks) {
                rows.row(|row| {
                    cells(row, tensor, several, searched);
                    row.drawn("strip", |m| bar(m, &axis, &typical, tensor.sqnr_db));
                    if remarked {
                        row.drawn("remark", |m| m.text(remarks.join(", ")));
                    }
                });
            }
        });
    });
}

fn cells(row: &mut Row<'_>, tensor: &Quantized<'_>, several: bool, searched: bool) {
    let Quantized { tensor, format, errors, plain, sqnr_db, .. } = tensor;
    row.name(&tensor.name, true);
    if several {
        row.cell(format);
    }
    row.cell(tensor.dtype);
    row.cell(shape(&tensor.shape));
    row.cell(bytes(tensor.bytes_before));
    row.cell(bytes(tensor.bytes_after));
    row.cell(figure(errors.relative_squared_error()));
    if searched {
        row.cell(plain.map_or(String::new(), |plain| figure(plain.errors.relative_squared_error())));
    }
    row.cell(decibels(*sqnr_db).replace('-', "−"));
}

/// Returns the range of the bars: from the worst SQNR to the best, in round numbers.
fn bars(sqnr_db: impl Iterator<Item = f64>) -> Axis {
    let finite: Vec<f64> = sqnr_db.filter(|sqnr_db| sqnr_db.is_finite()).collect();
    let best = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Axis::holding(finite.into_iter().chain([best - LEAST_RANGE]), 10.0)
}

/// Draws a bar from the left end of the axis, and a line at the median. The cell before it has the
/// number.
fn bar(m: &mut Markup, axis: &Axis, typical: &Typical, sqnr_db: f64) {
    let percent = |value: f64| format!("{}%", Px(100.0 * axis.place(value)));
    m.element("svg", &[("class", &"plot"), ("aria-hidden", &"true")], |m| {
        if sqnr_db.is_finite() {
            let width = format!("{}%", Px(100.0 * axis.place(sqnr_db).max(SHORTEST_BAR)));
            let class = if typical.is_low(sqnr_db) { "bar low" } else { "bar" };
            m.empty("rect", &[("class", &class), ("width", &width), ("height", &"100%")]);
        }
        if typical.median.is_finite() {
            let x = percent(typical.median);
            m.empty("line", &[("class", &"median"), ("x1", &x), ("x2", &x), ("y2", &"100%")]);
        }
    });
}

/// The typical SQNR of the checkpoint's tensors.
struct Typical {
    median: f64,
    /// Tensors further than this below the median are marked.
    distance: f64,
}

impl Typical {
    fn of(sqnr_db: impl Iterator<Item = f64>) -> Self {
        let mut finite: Vec<f64> = sqnr_db.filter(|sqnr_db| sqnr_db.is_finite()).collect();
        let middle = median(&mut finite);
        let mut deviations: Vec<_> = finite.iter().map(|sqnr_db| (sqnr_db - middle).abs()).collect();
        Self { median: middle, distance: (DEVIATIONS * median(&mut deviations)).max(LEAST_DISTANCE) }
    }

    fn is_low(&self, sqnr_db: f64) -> bool {
        sqnr_db < self.median - self.distance
    }

    fn sentence(&self, tensors: &[Quantized<'_>]) -> String {
        if !self.median.is_finite() {
            return "No tensor has an error.".into();
        }
        let low = tensors.iter().filter(|tensor| self.is_low(tensor.sqnr_db)).count();
        let who = match low {
            0 => "No tensor is".into(),
            1 => "One tensor, which is marked, is".into(),
            _ => format!("{} tensors, which are marked, are", count(low as u64)),
        };
        let (median, distance) = (decibels(self.median), self.distance);
        format!("The median SQNR of a tensor is {median}. {who} more than {distance:.1} dB below it.")
    }

    fn remarks(&self, tensor: &Quantized<'_>) -> Vec<String> {
        let mut remarks = Vec::new();
        if self.is_low(tensor.sqnr_db) {
            remarks.push(format!("▼ {:.2} dB", self.median - tensor.sqnr_db));
        }
        let Report { nan, infinite, flushed_blocks, saturated_scales, .. } = *tensor.report;
        for (n, what) in [
            (nan, "NaN"),
            (infinite, "infinite"),
            (flushed_blocks, "blocks flushed to zero"),
            (saturated_scales, "scales saturated"),
        ] {
            if n > 0 {
                remarks.push(format!("{} {what}", count(n)));
            }
        }
        remarks
    }
}

/// Returns the median, or NaN without values.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[half],
        _ => (values[half - 1] + values[half]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_far_below_the_median_are_low() {
        let typical = Typical::of([18.0, 18.2, 17.9, 18.1, 12.0, f64::INFINITY].into_iter());
        assert_eq!((typical.median, typical.distance), (18.0, 1.0));
        assert!(typical.is_low(16.9) && !typical.is_low(17.1) && typical.is_low(f64::NEG_INFINITY));
        let wide = Typical::of([10.0, 12.0, 14.0, 16.0].into_iter());
        assert_eq!((wide.median, wide.distance), (13.0, 8.0));
        assert!(!Typical::of([].into_iter()).is_low(-1.0));
    }

    #[test]
    fn bars_show_the_range_between_the_worst_and_the_best() {
        let axis = bars([17.25, 18.9, f64::INFINITY].into_iter());
        assert_eq!(axis.ends(), ("17.2".into(), "19.0".into()));
        assert!(axis.place(17.25) < 0.05 && axis.place(18.9) > 0.9);
        // Differences far under a tenth of a decibel do not fill the range.
        let close = bars([18.499, 18.5].into_iter());
        assert!(close.place(18.5) - close.place(18.499) < 0.05);
        assert_eq!(bars([].into_iter()).ends(), ("0.0".into(), "1.0".into()));
    }
}
