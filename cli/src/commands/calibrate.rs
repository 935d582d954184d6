//! `microscale calibrate`: records the inputs of a model's layers.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Result;
use serde_json::Value;

use crate::options::output::{JsonArgs, OutputArgs};
use crate::options::text::{TextArgs, open_model};
use crate::outputs::Files;
use crate::pending::Pending;
use crate::progress::LayersBar;
use crate::report::calibration::CalibrationRun;
use crate::streams::warn;
use crate::text::names::shown;
use crate::text::table::count;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The model, a checkpoint directory with config.json and tokenizer.json
    model: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Do not compute the Hessians, which GPTQ needs
    ///
    /// They take K² floats for each input of K elements, more than the model itself.
    #[arg(long)]
    skip_hessians: bool,
    /// Write a report as one HTML file
    ///
    /// It has figures of each layer's input, keys and values, and experts that saw no token.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let output = args.output.required("calibrate")?.to_path_buf();
    let started = SystemTime::now();
    let model = open_model(&args.model, &args.text.device()?)?;
    Files {
        checkpoints: &[model.source.weights().checkpoint()],
        read: &[Some(&args.text.text)],
        written: &[args.report.as_deref(), args.json.file()],
        ..Files::default()
    }
    .check()?;
    let json = args.json.start()?;
    let report = args.report.as_deref().map(Pending::create).transpose()?;
    let reading = args.text.reading();
    let windows = reading.windows(&model)?;
    let (hessians, mut bar) = (!args.skip_hessians, LayersBar::new("calibrating"));
    let mut update = |progress| bar.update(progress);
    let statistics = reading.calibrate(&model, &windows, hessians, &output, &mut update)?;
    drop(bar);

    for (weight, which) in statistics.unseen() {
        warn(format_args!("{}: {which} saw no token; use a longer text", shown(weight)));
    }
    let tokens: usize = windows.iter().map(|window| window.inputs.len()).sum();
    if let Some(report) = report {
        let run = CalibrationRun { statistics: &statistics, model: &args.model, tokens, started };
        report.finish(run.html()?)?;
    }
    let text = format!(
        "{}: statistics of {} layers from {} tokens in {} windows",
        output.display(),
        count(model.config.layers as u64),
        count(tokens as u64),
        count(windows.len() as u64)
    );
    json.finish_summary(Value::Object(statistics.index().clone()), text)
}
