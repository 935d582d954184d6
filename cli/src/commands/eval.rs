//! `microscale eval`: measures what quantization costs a model.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Result;
use microscale_models::{Difference, EvaluatedRow, InputFormat, ModelEvaluation};

use crate::options::output::JsonArgs;
use crate::options::text::{TextArgs, open_model};
use crate::options::words::words;
use crate::outputs::Files;
use crate::pending::Pending;
use crate::plot::Plot;
use crate::plot::point::Point;
use crate::progress::LayersBar;
use crate::report::evaluation::EvaluationRun;
use crate::streams::{is_verbose, print};
use crate::text::estimates::{interval, percent_interval};
use crate::text::names::shown;
use crate::text::table::{count, decibels, table};

/// Layers with the largest errors that are listed without `-v`.
const LISTED: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The original model, a checkpoint directory with config.json and tokenizer.json
    model: PathBuf,
    /// Quantized checkpoint directories of it
    quantized: Vec<PathBuf>,
    #[command(flatten)]
    text: TextArgs,
    /// Also quantize the activations of QUANTIZED; repeatable
    ///
    /// The inputs of layers with quantized weights are rounded, as engines do that multiply in 4 or
    /// 8 bits. nvfp4 uses the checkpoint's input scales, or else one per token. mxfp4 and mxfp8 use
    /// OCP's scale rule, and fp8 one scale per token.
    #[arg(long, value_name = "FORMAT", value_parser = words::<InputFormat>())]
    activations: Vec<InputFormat>,
    /// Do not measure the output of each layer, which takes half of the time
    #[arg(long)]
    skip_layers: bool,
    /// Draw the SQNR of each layer's output as SVG, of the last row of the table
    #[arg(long, value_name = "FILE", help_heading = "Output", conflicts_with = "skip_layers")]
    plot: Option<PathBuf>,
    /// Write a report as one HTML file
    ///
    /// It has the table, and the SQNR of each layer's output.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let started = SystemTime::now();
    let device = args.text.device()?;
    let model = open_model(&args.model, &device)?;
    let quantized =
        args.quantized.iter().map(|path| open_model(path, &device)).collect::<Result<Vec<_>>>()?;
    let checkpoints: Vec<_> =
        [&model].into_iter().chain(&quantized).map(|model| model.source.weights().checkpoint()).collect();
    Files {
        checkpoints: &checkpoints,
        read: &[Some(&args.text.text)],
        written: &[args.plot.as_deref(), args.report.as_deref(), args.json.file()],
        ..Files::default()
    }
    .check()?;
    let json = args.json.start()?;
    let [plot, report] =
        [&args.plot, &args.report].map(|file| file.as_deref().map(Pending::create).transpose());
    let (plot, report) = (plot?, report?);
    let reading = args.text.reading();
    let windows = reading.windows(&model)?;
    let mut bar = LayersBar::new("evaluating");
    let mut update = |progress| bar.update(progress);
    let layers = !args.skip_layers;
    let evaluation =
        reading.evaluate(&model, &quantized, &args.activations, &windows, layers, &mut update)?;
    drop(bar);

    if let (Some(plot), Some((row, last))) = (plot, evaluation.others().last()) {
        plot.finish(drawn(row, last, &evaluation.model))?;
    }
    if let Some(report) = report {
        let found = EvaluationRun { evaluation: &evaluation, reading: &reading, started };
        report.finish(found.html())?;
    }
    json.finish(evaluation.to_json(), || print(text(&evaluation)))
}

fn text(found: &ModelEvaluation) -> String {
    let evaluation = &found.evaluation;
    let mut lines = table(&["model", ">perplexity", ">increase", ">KL divergence", ">same top token"]);
    let model = found.model.display().to_string();
    lines.add_row([&shown(&model), &interval(evaluation.perplexity, 3), "", "", ""]);
    for (row, other) in found.others() {
        lines.add_row([
            shown(&row.name()),
            interval(other.perplexity, 3),
            percent_interval(other.increase),
            interval(other.divergence, 5),
            percent_interval(other.agreement),
        ]);
    }
    let plural = if evaluation.windows == 1 { "window" } else { "windows" };
    let mut text = format!(
        "{}\n\n{} tokens in {} {plural}; ± is half of a 95 % confidence interval over windows",
        lines.trim_fmt(),
        count(evaluation.tokens as u64),
        count(evaluation.windows as u64),
    );
    for (row, other) in found.others() {
        if other.layers.is_empty() {
            continue;
        }
        let mut layers: Vec<_> = other.layers.iter().collect();
        let all = is_verbose() || layers.len() <= LISTED;
        if !all {
            layers.sort_by(|a, b| a.sqnr_db().total_cmp(&b.sqnr_db()));
            layers.truncate(LISTED);
        }
        let mut lines = table(&["layer", ">SQNR of its output"]);
        layers.iter().for_each(|layer| {
            lines.add_row([shown(&layer.weight), decibels(layer.sqnr_db())]);
        });
        let which = if all { "layers" } else { "layers with the largest errors (-v lists all)" };
        text += &format!("\n\n{}: {which}\n{}", shown(&row.name()), lines.trim_fmt());
    }
    text
}

/// The layers' SQNR as SVG.
fn drawn(row: &EvaluatedRow, other: &Difference, model: &Path) -> String {
    let points: Vec<_> =
        other.layers.iter().filter_map(|layer| Point::new(&layer.weight, layer.sqnr_db())).collect();
    let model = model.display().to_string();
    let lines = [format!("of {}", shown(&row.name())), format!("for the inputs of {}", shown(&model))];
    let total = other.sqnr_db();
    Plot { title: "SQNR of each layer's output", lines: &lines, points: &points, total, notes: &[] }.svg()
}
