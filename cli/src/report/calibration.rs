//! The report on a calibration: figures of each layer's input, keys and values, and experts that saw
//! no token.

use std::path::Path;
use std::time::SystemTime;

use anyhow::Result;
use microscale_models::{InputFigures, Statistics};
use serde_json::Value;

use super::figures::{date, percent_text};
use super::rows::table;
use super::{model_name, page, section, tile};
use crate::markup::{Markup, Px};
use crate::plot::axis::Axis;
use crate::text::table::{count, figure, natural_order};

/// The subject of the report.
pub(crate) struct CalibrationRun<'a> {
    pub(crate) statistics: &'a Statistics,
    pub(crate) model: &'a Path,
    /// Tokens of the text that the model read.
    pub(crate) tokens: usize,
    pub(crate) started: SystemTime,
}

impl CalibrationRun<'_> {
    /// Returns the page, which is also well-formed XML.
    ///
    /// # Errors
    /// If the statistics cannot be read.
    pub(crate) fn html(&self) -> Result<String> {
        let (name, inputs) = (model_name(self.model), self.statistics.inputs()?);
        let mut caches = self.statistics.caches()?;
        caches.sort_by(|(a, _), (b, _)| natural_order(a, b));
        let opening = |m: &mut Markup| self.opening(m, &name, &inputs);
        Ok(page(&format!("{name}: calibration report"), opening, |m| {
            section(m, "inputs", "Inputs of layers", |m| write_inputs(m, &inputs));
            if !caches.is_empty() {
                section(m, "caches", "Keys and values", |m| write_caches(m, &caches));
            }
            let unseen = self.statistics.unseen();
            if !unseen.is_empty() {
                section(m, "unseen", "Experts without tokens", |m| write_unseen(m, unseen));
            }
            section(m, "settings", "Settings", |m| self.settings(m));
        }))
    }

    /// Writes the title and the most important figures.
    fn opening(&self, m: &mut Markup, name: &str, inputs: &[InputFigures]) {
        m.element("header", &[], |m| {
            m.leaf("h1", &[], name);
            m.leaf("p", &[("class", &"lead")], format_args!("Calibrated on {}", date(self.started)));
            m.element("dl", &[("class", &"tiles")], |m| {
                let windows = self.run("windows").as_u64().unwrap_or(0);
                let windows = format!("in {} window{}", count(windows), if windows == 1 { "" } else { "s" });
                tile(m, "Tokens", &count(self.tokens as u64), &windows);
                if let Some(most) = inputs.iter().max_by(|a, b| a.amax.total_cmp(&b.amax)) {
                    tile(m, "Largest input", &figure(most.amax.into()), &most.name);
                }
                if let Some(most) = inputs.iter().max_by(|a, b| a.outlier_share.total_cmp(&b.outlier_share)) {
                    tile(m, "Largest share in outlier columns", &share(most), &most.name);
                }
                let sum = |of: fn(&InputFigures) -> usize| inputs.iter().map(of).sum::<usize>() as u64;
                let (unseen, experts) = (sum(|input| input.unseen), sum(|input| input.experts));
                if experts > 0 {
                    let of = format!("of {} inputs of experts", count(experts));
                    tile(m, "Without tokens", &count(unseen), &of);
                }
            });
        });
    }

    /// Returns a fact of the run.
    fn run(&self, fact: &str) -> &Value {
        self.statistics.index().get("run").and_then(|run| run.get(fact)).unwrap_or(&Value::Null)
    }

    /// Writes the model, the text and the options.
    fn settings(&self, m: &mut Markup) {
        let text = |fact: &str| self.run(fact).as_str().unwrap_or_default();
        let number = |fact: &str| count(self.run(fact).as_u64().unwrap_or(0));
        let choice = |fact: &str, [yes, no]: [&'static str; 2]| {
            if self.run(fact) == &Value::Bool(true) { yes } else { no }
        };
        table(m, "The run", &["property", "value"], |rows| {
            rows.body(|rows| {
                let statistics = self.statistics.directory().display().to_string();
                for (what, path) in
                    [("model", text("model")), ("text", text("text")), ("statistics", statistics.as_str())]
                {
                    rows.row(|row| {
                        row.name(what, false);
                        row.code(path);
                    });
                }
                rows.plain("windows", &[&number("windows")]);
                rows.plain("tokens of a window", &[&number("window")]);
                rows.plain("documents", &[choice("documents", ["separated by empty lines", "one"])]);
                rows.plain("dtype of hidden states", &[text("dtype")]);
                rows.plain("device", &[text("device")]);
                rows.plain("Hessians", &[choice("hessians", ["written", "left out"])]);
                rows.plain("program", &[concat!("microscale ", env!("CARGO_PKG_VERSION"))]);
            });
        });
    }
}

/// Writes a row for each input, with a bar of its peak: the largest magnitude over the RMS.
fn write_inputs(m: &mut Markup, inputs: &[InputFigures]) {
    m.leaf(
        "p",
        &[],
        "Layers with one input share a row, and so do the experts of a layer, whose mean squares are \
         averaged. K columns with a root mean square (RMS) have a Hessian XᵀX with a trace of K·RMS² per \
         token. An outlier column has more than 10 times the RMS of the median column. Few columns with \
         most of the squares, and magnitudes far above the RMS, are hard to quantize in 4 bits.",
    );
    let has_experts = inputs.iter().any(|input| input.experts > 0);
    let axis = Axis::holding(inputs.iter().map(peak).chain([0.0]), 10.0);
    let (low, high) = axis.ends();
    let range = format!("{low} to {high}");
    let mut header = vec![
        "input",
        "layers",
        ">columns",
        ">largest magnitude",
        ">RMS",
        ">outlier columns",
        ">share of squares",
    ];
    header.extend(has_experts.then_some(">experts without tokens"));
    header.extend([">magnitude / RMS", range.as_str()]);
    let caption =
        format!("Inputs by layer. Bars show the largest magnitude over the RMS, from {low} to {high}.");
    table(m, &caption, &header, |rows| {
        rows.body(|rows| {
            for input in inputs {
                rows.row(|row| {
                    row.name(&input.name, true);
                    let layers: Vec<_> =
                        input.layers.iter().map(|layer| layer.trim_end_matches("_proj")).collect();
                    row.cell(layers.join(", "));
                    row.cell(count(input.columns as u64));
                    row.cell(figure(input.amax.into()));
                    row.cell(figure(input.rms));
                    row.cell(count(input.outliers as u64));
                    row.cell(share(input));
                    if has_experts {
                        let of =
                            || format!("{} of {}", count(input.unseen as u64), count(input.experts as u64));
                        row.cell(if input.experts > 0 { of() } else { String::new() });
                    }
                    row.cell(if input.rms > 0.0 { format!("{:.1}", peak(input)) } else { String::new() });
                    row.drawn("strip", |m| bar(m, axis.place(peak(input))));
                });
            }
        });
    });
}

/// Writes the largest magnitudes of keys and values.
fn write_caches(m: &mut Markup, caches: &[(String, [f64; 2])]) {
    m.leaf("p", &[], "Keys are measured after their rotary embedding, as a KV cache stores them.");
    table(m, "Largest magnitudes by layer", &["attention", ">keys", ">values"], |rows| {
        rows.body(|rows| {
            for (module, amax) in caches {
                rows.row(|row| {
                    row.name(module, true);
                    amax.iter().for_each(|amax| row.cell(figure(*amax)));
                });
            }
        });
    });
}

/// Writes the weights of experts that saw no token.
fn write_unseen(m: &mut Markup, unseen: Vec<(&str, String)>) {
    m.leaf(
        "p",
        &[],
        "No token of the text was routed to these experts, so that they have no statistics. Use a longer \
         text. Without one, they are quantized by their weights only.",
    );
    let mut unseen = unseen;
    unseen.sort_by(|(a, _), (b, _)| natural_order(a, b));
    table(m, "Weights without statistics", &["weights", "without tokens"], |rows| {
        rows.body(|rows| {
            for (weight, which) in unseen {
                rows.row(|row| {
                    row.name(weight, true);
                    row.cell(which);
                });
            }
        });
    });
}

/// Returns the largest magnitude over the RMS.
fn peak(input: &InputFigures) -> f64 {
    if input.rms > 0.0 { f64::from(input.amax) / input.rms } else { 0.0 }
}

/// Returns the share of outlier columns in the squares as text.
fn share(input: &InputFigures) -> String {
    format!("{} %", percent_text(100.0 * input.outlier_share))
}

/// Draws a bar from 0 to a place, from 0 to 1.
fn bar(m: &mut Markup, place: f64) {
    m.element("svg", &[("class", &"plot"), ("aria-hidden", &"true")], |m| {
        let width = format!("{}%", Px(100.0 * place));
        m.empty("rect", &[("class", &"bar"), ("width", &width), ("height", &"100%")]);
    });
}
