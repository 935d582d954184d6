//! Loss by tensor: a plot by layer, and a table with a bar for each.

use microscale::{ErrorStats, Format, Report};
use microscale_checkpoint::{Outcome, Plain, Summary, TensorSummary};

use super::rows::{Row, table};
use crate::markup::{Markup, Px};
use crate::plot::axis::Axis;
use crate::plot::point::Point;
use crate::plot::{dots_by_layer, has_layers};
use crate::text::table::{bytes, count, decibels, figure, natural_order, shape};

/// Fewer tensors are seen at a glance in the table.
const FEWEST_DOTS: usize = 16;
/// The distance below the median, in dB, from which a tensor is marked: at the least, and in median
/// deviations from it.
const LEAST_DISTANCE: f64 = 1.0;
const DEVIATIONS: f64 = 4.0;

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
                Some(Self { tensor, format: *format, report, errors, plain: plain.as_ref(), sqnr_db })
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
    header.extend([">SQNR", "0 dB to the best"]);
    header.extend(remarked.then_some("remarks"));
    let marks = if remarked { "; ▼: below the median" } else { "" };
    let caption = format!("Quantized tensors in natural order{marks}");
    let axis = Axis::holding(tensors.iter().map(|tensor| tensor.sqnr_db).chain([0.0]), 40.0);
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

/// A bar from 0 on, in front of the median. The number beside it says the same.
fn bar(m: &mut Markup, axis: &Axis, typical: &Typical, sqnr_db: f64) {
    let percent = |value: f64| format!("{}%", Px(100.0 * axis.place(value)));
    m.element("svg", &[("class", &"plot"), ("aria-hidden", &"true")], |m| {
        if sqnr_db.is_finite() {
            let (from, to) = (axis.place(sqnr_db.min(0.0)), axis.place(sqnr_db.max(0.0)));
            let (x, width) = (format!("{}%", Px(100.0 * from)), format!("{}%", Px(100.0 * (to - from))));
            let class = if typical.is_low(sqnr_db) { "bar low" } else { "bar" };
            m.empty("rect", &[("class", &class), ("x", &x), ("width", &width), ("height", &"100%")]);
        }
        if typical.median.is_finite() {
            let x = percent(typical.median);
            m.empty("line", &[("class", &"median"), ("x1", &x), ("x2", &x), ("y2", &"100%")]);
        }
    });
}

/// The usual SQNR in this checkpoint.
struct Typical {
    median: f64,
    /// Tensors further below the median are marked.
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
            return "No tensor lost anything.".into();
        }
        let low = tensors.iter().filter(|tensor| self.is_low(tensor.sqnr_db)).count();
        let who = match low {
            0 => "No tensor lies".into(),
            1 => "One tensor, which is marked, lies".into(),
            _ => format!("{} tensors, which are marked, lie", count(low as u64)),
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

/// NaN of nothing.
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
    fn what_lies_far_below_the_median_is_low() {
        let typical = Typical::of([18.0, 18.2, 17.9, 18.1, 12.0, f64::INFINITY].into_iter());
        assert_eq!((typical.median, typical.distance), (18.0, 1.0));
        assert!(typical.is_low(16.9) && !typical.is_low(17.1) && typical.is_low(f64::NEG_INFINITY));
        let wide = Typical::of([10.0, 12.0, 14.0, 16.0].into_iter());
        assert_eq!((wide.median, wide.distance), (13.0, 8.0));
        assert!(!Typical::of([].into_iter()).is_low(-1.0));
    }
}
