//! The report on an evaluation: results of each checkpoint, and the SQNR of its layers' outputs.

use std::time::SystemTime;

use microscale_models::{Difference, Estimate, ModelEvaluation, Reading};

use super::figures::date;
use super::rows::table;
use super::strips::{Typical, bar, bars};
use super::{model_name, page, section, tile};
use crate::markup::{Markup, Px};
use crate::plot::axis::Axis;
use crate::plot::point::Point;
use crate::plot::{dots_by_layer, has_layers};
use crate::text::estimates::{interval, percent_interval};
use crate::text::table::{count, decibels};

/// Minimum number of layers for a plot. Fewer are clear from the table.
const FEWEST_DOTS: usize = 16;

/// The subject of the report.
pub(crate) struct EvaluationRun<'a> {
    pub(crate) evaluation: &'a ModelEvaluation,
    pub(crate) reading: &'a Reading,
    pub(crate) started: SystemTime,
}

impl EvaluationRun<'_> {
    /// Returns the page, which is also well-formed XML.
    pub(crate) fn html(&self) -> String {
        let name = model_name(&self.evaluation.model);
        let opening = |m: &mut Markup| self.opening(m, &name);
        page(&format!("{name}: evaluation report"), opening, |m| self.sections(m))
    }

    /// Writes the title and the most important figures.
    fn opening(&self, m: &mut Markup, name: &str) {
        let found = &self.evaluation.evaluation;
        m.element("header", &[], |m| {
            m.leaf("h1", &[], name);
            m.leaf("p", &[("class", &"lead")], format_args!("Evaluated on {}", date(self.started)));
            m.element("dl", &[("class", &"tiles")], |m| {
                tile(m, "Perplexity", &interval(found.perplexity, 3), "of the original");
                let windows = format!("in {}", windows_text(found.windows));
                tile(m, "Tokens", &count(found.tokens as u64), &windows);
                let least = self
                    .evaluation
                    .others()
                    .min_by(|(_, a), (_, b)| a.divergence.mean.total_cmp(&b.divergence.mean));
                if let Some((row, other)) = least {
                    let divergence = interval(other.divergence, 5);
                    tile(m, "Smallest KL divergence", &divergence, &row.name());
                }
            });
        });
    }

    fn sections(&self, m: &mut Markup) {
        if !self.evaluation.rows.is_empty() {
            section(m, "results", "Results", |m| self.results(m));
        }
        let layers = || self.evaluation.others().filter(|(_, other)| !other.layers.is_empty());
        let axis = bars(layers().flat_map(|(_, other)| sqnr_db(other)));
        for (number, (row, other)) in layers().enumerate() {
            let id = format!("layers-{number}");
            section(m, &id, &format!("Outputs of layers: {}", row.name()), |m| outputs(m, other, &axis));
        }
        section(m, "settings", "Settings", |m| self.settings(m));
    }

    /// Writes the table of checkpoints.
    fn results(&self, m: &mut Markup) {
        m.leaf(
            "p",
            &[],
            "± is half of a 95 % confidence interval over windows. The increase of the perplexity and the \
             KL divergence of the next token, in nats, are relative to the original, token by token. The \
             line in a bar is the interval of the divergence.",
        );
        let most = self.evaluation.others().map(|(_, other)| upper(other.divergence)).fold(0.0, f64::max);
        let header =
            ["model", ">perplexity", ">increase", ">same top token", ">KL divergence", "from the original"];
        table(m, "Quantized checkpoints", &header, |rows| {
            rows.body(|rows| {
                for (row, other) in self.evaluation.others() {
                    rows.row(|cells| {
                        cells.name(&row.name(), true);
                        cells.cell(interval(other.perplexity, 3));
                        cells.cell(percent_interval(other.increase));
                        cells.cell(percent_interval(other.agreement));
                        cells.cell(interval(other.divergence, 5));
                        cells.drawn("strip", |m| interval_bar(m, other.divergence, most));
                    });
                }
            });
        });
    }

    /// Writes the text and the options.
    fn settings(&self, m: &mut Markup) {
        let Reading { text, window, documents, dtype, .. } = self.reading;
        table(m, "The run", &["property", "value"], |rows| {
            rows.body(|rows| {
                for (what, path) in [("model", &self.evaluation.model), ("text", text)] {
                    rows.row(|row| {
                        row.name(what, false);
                        row.code(&path.display().to_string());
                    });
                }
                rows.plain("windows", &[&windows_text(self.evaluation.evaluation.windows)]);
                let window =
                    window.map_or("the model’s context, at most 2,048".into(), |n| count(n as u64));
                rows.plain("tokens of a window", &[&window]);
                let documents = if *documents { "separated by empty lines" } else { "one" };
                rows.plain("documents", &[documents]);
                rows.plain("dtype of hidden states", &[dtype.as_str()]);
                rows.plain("program", &[concat!("microscale ", env!("CARGO_PKG_VERSION"))]);
            });
        });
    }
}

/// Writes a checkpoint's layers, with bars that begin and end as the axis.
fn outputs(m: &mut Markup, other: &Difference, axis: &Axis) {
    let typical = Typical::of(sqnr_db(other));
    m.leaf("p", &[], typical.sentence("layer", sqnr_db(other)));
    let points: Vec<_> =
        other.layers.iter().filter_map(|layer| Point::new(&layer.weight, layer.sqnr_db())).collect();
    if points.len() >= FEWEST_DOTS && has_layers(&points) {
        m.element("div", &[("class", &"scroll")], |m| dots_by_layer(m, &points, other.sqnr_db()));
    }
    let (low, high) = axis.ends();
    let caption = format!(
        "The SQNR of each layer’s output, for the original’s input. Bars begin at {low} dB and end at {high} dB, the range of \
         all checkpoints; the line is the median."
    );
    let range = format!("{low} to {high} dB");
    table(m, &caption, &["layer", ">SQNR", &range], |rows| {
        rows.body(|rows| {
            for layer in &other.layers {
                rows.row(|row| {
                    row.name(&layer.weight, true);
                    row.cell(decibels(layer.sqnr_db()).replace('-', "−"));
                    row.drawn("strip", |m| bar(m, axis, &typical, layer.sqnr_db()));
                });
            }
        });
    });
}

fn sqnr_db(other: &Difference) -> impl Iterator<Item = f64> {
    other.layers.iter().map(|layer| layer.sqnr_db())
}

/// Returns the upper end of an interval.
fn upper(Estimate { mean, margin }: Estimate) -> f64 {
    if margin.is_finite() { mean + margin } else { mean }
}

/// Draws a bar from 0 to the mean, and a line along the interval. `most` is at the right end.
fn interval_bar(m: &mut Markup, estimate: Estimate, most: f64) {
    let percent =
        |value: f64| format!("{}%", Px(100.0 * (value / most.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)));
    m.element("svg", &[("class", &"plot"), ("aria-hidden", &"true")], |m| {
        m.empty("rect", &[("class", &"bar"), ("width", &percent(estimate.mean)), ("height", &"100%")]);
        let high = upper(estimate);
        let [x1, x2] = [2.0 * estimate.mean - high, high].map(percent);
        let line: &[(&str, &dyn std::fmt::Display)] =
            &[("class", &"median"), ("x1", &x1), ("x2", &x2), ("y1", &"50%"), ("y2", &"50%")];
        m.empty("line", line);
    });
}

fn windows_text(windows: usize) -> String {
    format!("{} window{}", count(windows as u64), if windows == 1 { "" } else { "s" })
}
