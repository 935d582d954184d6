//! Loss by tensor: a plot by layer, and a table with a bar per tensor.

use microscale::{ErrorStats, Format, Report};
use microscale_checkpoint::{Outcome, Plain, Summary, TensorSummary};

use super::rows::{Row, table};
use super::strips::{Typical, bar, bars};
use crate::markup::Markup;
use crate::plot::point::Point;
use crate::plot::{dots_by_layer, has_layers};
use crate::text::table::{bytes, count, decibels, figure, natural_order, shape};

/// Minimum number of tensors for a plot. Fewer are clear from the table.
const FEWEST_DOTS: usize = 16;

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
    m.leaf("p", &[], typical.sentence("tensor", tensors.iter().map(|tensor| tensor.sqnr_db)));
    if points.len() >= FEWEST_DOTS && has_layers(&points) {
        m.element("div", &[("class", &"scroll")], |m| {
            dots_by_layer(m, &points, summary.totals().errors.sqnr_db());
        });
    }
    let remarks: Vec<_> = tensors.iter().map(|tensor| remarks(&typical, tensor)).collect();
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

/// Returns the unusual facts of a tensor.
fn remarks(typical: &Typical, tensor: &Quantized<'_>) -> Vec<String> {
    let mut remarks = Vec::new();
    if typical.is_low(tensor.sqnr_db) {
        remarks.push(format!("▼ {:.2} dB", typical.median - tensor.sqnr_db));
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
