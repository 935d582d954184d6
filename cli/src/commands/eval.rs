//! `microscale eval`: measures what quantization costs a model.

use std::path::PathBuf;

use anyhow::Result;
use microscale::Words;
use microscale_models::{
    Difference, Estimate, EvaluateOptions, Evaluated, Evaluation, InputFormat, LayerError, QuantizedInputs,
    Source, evaluate,
};
use serde_json::{Value, json};

use crate::options::output::JsonArgs;
use crate::options::text::{OpenModel, TextArgs};
use crate::options::words::words;
use crate::outputs::Files;
use crate::pending::Pending;
use crate::plot::Plot;
use crate::plot::point::Point;
use crate::progress::LayersBar;
use crate::streams::{is_verbose, print};
use crate::text::names::shown;
use crate::text::table::{count, decibels, natural_order, table};

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
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let model = OpenModel::open(&args.model)?;
    let quantized = args.quantized.iter().map(|path| OpenModel::open(path)).collect::<Result<Vec<_>>>()?;
    let checkpoints: Vec<_> =
        [&model].into_iter().chain(&quantized).map(|model| model.source.weights().checkpoint()).collect();
    Files {
        checkpoints: &checkpoints,
        read: &[Some(&args.text.text)],
        written: &[args.plot.as_deref(), args.json.file()],
        ..Files::default()
    }
    .check()?;
    let json = args.json.start()?;
    let plot = args.plot.as_deref().map(Pending::create).transpose()?;
    let windows = args.text.windows(&model)?;

    let rows = rows(&quantized, &args.activations);
    let others: Vec<_> = rows.iter().map(Row::model).collect();
    let name = args.model.display().to_string();
    let reference = Evaluated { name: &name, source: &model.source, config: &model.config };
    let options = EvaluateOptions { dtype: args.text.dtype, layers: !args.skip_layers };
    let mut bar = LayersBar::new("evaluating");
    let mut evaluation =
        evaluate(reference, &others, &windows, options, &mut |progress| bar.update(progress))?;
    drop(bar);

    for other in &mut evaluation.others {
        other.layers.sort_by(|a, b| natural_order(&a.weight, &b.weight));
    }
    if let (Some(plot), Some(row), Some(last)) = (plot, rows.last(), evaluation.others.last()) {
        plot.finish(drawn(row, last, &name))?;
    }
    let facts = facts(&name, &evaluation, &rows);
    json.finish(facts, || print(text(&name, &evaluation, &rows)))
}

/// A model that is compared with the original.
struct Row<'a> {
    name: String,
    model: &'a OpenModel,
    /// The checkpoint's layers with quantized inputs.
    quantized_inputs: Option<(InputFormat, QuantizedInputs)>,
}

impl Row<'_> {
    fn model(&self) -> Evaluated<'_> {
        let source: &dyn Source = match &self.quantized_inputs {
            Some((_, source)) => source,
            None => &self.model.source,
        };
        Evaluated { name: &self.name, source, config: &self.model.config }
    }
}

/// Each checkpoint with unquantized activations, then with each format of them.
fn rows<'a>(quantized: &'a [OpenModel], activations: &[InputFormat]) -> Vec<Row<'a>> {
    let formats = || [None].into_iter().chain(activations.iter().copied().map(Some));
    let row = |model: &'a OpenModel, format: Option<InputFormat>| {
        let name = model.path.display().to_string();
        match format {
            None => Row { name, model, quantized_inputs: None },
            Some(format) => Row {
                name: format!("{name}, {} activations", format.word()),
                model,
                quantized_inputs: Some((format, QuantizedInputs::new(model.source.clone(), format))),
            },
        }
    };
    quantized.iter().flat_map(|model| formats().map(move |format| row(model, format))).collect()
}

fn text(name: &str, evaluation: &Evaluation, rows: &[Row<'_>]) -> String {
    let mut lines = table(&["model", ">perplexity", ">increase", ">KL divergence", ">same top token"]);
    lines.add_row([&shown(name), &number(evaluation.perplexity, 3), "", "", ""]);
    for (row, other) in rows.iter().zip(&evaluation.others) {
        lines.add_row([
            shown(&row.name),
            number(other.perplexity, 3),
            percent(other.increase),
            number(other.divergence, 5),
            percent(other.agreement),
        ]);
    }
    let plural = if evaluation.windows == 1 { "window" } else { "windows" };
    let mut text = format!(
        "{}\n\n{} tokens in {} {plural}; ± is half of a 95 % confidence interval over windows",
        lines.trim_fmt(),
        count(evaluation.tokens as u64),
        count(evaluation.windows as u64),
    );
    for (row, other) in rows.iter().zip(&evaluation.others) {
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
        text += &format!("\n\n{}: {which}\n{}", shown(&row.name), lines.trim_fmt());
    }
    text
}

/// `31.667 ± 0.120`.
fn number(estimate: Estimate, digits: usize) -> String {
    let Estimate { mean, margin } = estimate;
    match margin.is_finite() {
        true => format!("{mean:.digits$} ± {margin:.digits$}"),
        false => format!("{mean:.digits$}"),
    }
}

/// `0.67 % ± 0.12`.
fn percent(Estimate { mean, margin }: Estimate) -> String {
    let (mean, margin) = (mean * 100.0, margin * 100.0);
    if margin.is_finite() { format!("{mean:.2} % ± {margin:.2}") } else { format!("{mean:.2} %") }
}

fn facts(name: &str, evaluation: &Evaluation, rows: &[Row<'_>]) -> Value {
    let estimate = |Estimate { mean, margin }: Estimate| json!({ "mean": mean, "margin": margin });
    let layer = |layer: &LayerError| json!({ "weight": layer.weight, "sqnr_db": layer.sqnr_db() });
    let model = |(row, other): (&Row<'_>, &Difference)| {
        json!({
            "model": row.model.path.display().to_string(),
            "activations": row.quantized_inputs.as_ref().map(|(format, _)| format.word()),
            "loss": estimate(other.loss),
            "perplexity": estimate(other.perplexity),
            "increase": estimate(other.increase),
            "divergence": estimate(other.divergence),
            "agreement": estimate(other.agreement),
            "layers": other.layers.iter().map(layer).collect::<Value>(),
        })
    };
    json!({
        "model": name,
        "windows": evaluation.windows,
        "tokens": evaluation.tokens,
        "loss": estimate(evaluation.loss),
        "perplexity": estimate(evaluation.perplexity),
        "quantized": rows.iter().zip(&evaluation.others).map(model).collect::<Value>(),
    })
}

/// The layers' SQNR as SVG.
fn drawn(row: &Row<'_>, other: &Difference, name: &str) -> String {
    let points: Vec<_> =
        other.layers.iter().filter_map(|layer| Point::new(&layer.weight, layer.sqnr_db())).collect();
    let [squares, errors] = other
        .layers
        .iter()
        .fold([0.0; 2], |[squares, errors], layer| [squares + layer.squares, errors + layer.errors]);
    let lines = [format!("of {}", shown(&row.name)), format!("for the inputs of {}", shown(name))];
    let total = 10.0 * (squares / errors).log10();
    Plot { title: "SQNR of each layer's output", lines: &lines, points: &points, total, notes: &[] }.svg()
}
