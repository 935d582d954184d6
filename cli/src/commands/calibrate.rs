//! `microscale calibrate`: records the inputs of a model's layers.

use std::path::PathBuf;

use anyhow::{Context, Result};
use microscale_models::{CalibrateOptions, Identity, calibrate};
use serde_json::{Map, Value, json};

use crate::options::output::{JsonArgs, OutputArgs};
use crate::options::text::{OpenModel, TextArgs};
use crate::outputs::Files;
use crate::progress::LayersBar;
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
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let output = args.output.required("calibrate")?.to_path_buf();
    let model = OpenModel::open(&args.model)?;
    Files {
        checkpoints: &[model.source.weights().checkpoint()],
        read: &[Some(&args.text.text)],
        written: &[args.json.file()],
        ..Files::default()
    }
    .check()?;
    let json = args.json.start()?;
    let windows = args.text.windows(&model)?;
    let options = CalibrateOptions { dtype: args.text.dtype, hessians: !args.skip_hessians };
    let identity = identity(&args, &model, windows.len())?;
    let mut bar = LayersBar::new("calibrating");
    let statistics =
        calibrate(&model.source, &model.config, &windows, options, &identity, &output, &mut |progress| {
            bar.update(progress)
        })?;
    drop(bar);

    let unseen = statistics.index().get("unseen_experts").and_then(Value::as_object);
    for (weight, experts) in unseen.into_iter().flatten() {
        let which = match experts.as_array() {
            Some(experts) => format!("experts {}", list(experts)),
            None => "its expert".into(),
        };
        warn(format_args!("{}: {which} saw no token; use a longer text", shown(weight)));
    }
    let tokens: usize = windows.iter().map(|window| window.inputs.len()).sum();
    let text = format!(
        "{}: statistics of {} layers from {} tokens in {} windows",
        output.display(),
        count(model.config.layers as u64),
        count(tokens as u64),
        count(windows.len() as u64)
    );
    json.finish_summary(Value::Object(statistics.index().clone()), text)
}

fn list(numbers: &[Value]) -> String {
    numbers.iter().map(Value::to_string).collect::<Vec<_>>().join(", ")
}

/// The facts that a continued run must share with the interrupted one.
fn identity(args: &Args, model: &OpenModel, windows: usize) -> Result<Identity> {
    let absolute = |path: &PathBuf| path.canonicalize().with_context(|| path.display().to_string());
    let text = absolute(&args.text.text)?;
    let options = args.text.options(model);
    let facts = [
        ("model", json!(absolute(&args.model)?.display().to_string())),
        ("text", json!(text.display().to_string())),
        ("text_bytes", json!(text.metadata().with_context(|| text.display().to_string())?.len())),
        ("window", json!(options.window)),
        ("windows", json!(windows)),
        ("documents", json!(options.documents)),
        ("dtype", json!(args.text.dtype.as_str())),
        ("hessians", json!(!args.skip_hessians)),
    ];
    Ok(Identity(Map::from_iter(facts.map(|(name, fact)| (name.to_string(), fact)))))
}
