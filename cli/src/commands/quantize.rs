//! `microscale quantize`: quantizes a checkpoint, as a whole or a part of it, or shows the plan.

use std::collections::HashMap;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Result;
use microscale::{DeviceChoice, ErrorStats, Format, Words};
use microscale_checkpoint::{
    self as checkpoint, Checkpoint, CheckpointFormat, Error, GivenError, InputScales, KeptAs, OpenOptions,
    Outcome, Part, PartSummary, Plan, PlanError, Quantize, RecipeError, Summary, Sums, TensorPlan, Totals,
};
use serde_json::Value;

use crate::failures::Usage;
use crate::options::device::{device, parse_device};
use crate::options::output::{JsonArgs, OutputArgs};
use crate::options::recipe::{RecipeArgs, distinction, recipes_text};
use crate::options::words::{words, written_formats, written_formats_list};
use crate::outputs::{Files, OtherFilesArgs, after, opened, tell_of_left};
use crate::pending::Pending;
use crate::progress::Bar;
use crate::report::run::{Run, WORST_BLOCKS};
use crate::streams::{is_verbose, print, warn};
use crate::text::names::shown;
use crate::text::table::{
    bytes, cosine, count, decibels, figure, left_out, natural_order, rate, seconds, shape, skipped_text,
    table,
};

#[derive(clap::Args)]
#[command(after_help = AFTER, after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint directory, or a .safetensors, .gguf, .bin or .pt file
    input: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    written: WrittenArgs,
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    compatibility: CompatibilityArgs,
    #[command(flatten)]
    large: LargeArgs,
    #[command(flatten)]
    others: OtherFilesArgs,
}

const AFTER: &str = "--help has details, more options and examples.";

const EXAMPLES: &str = "\
Examples:
  microscale quantize Qwen3-8B Qwen3-8B-MXFP4
  microscale quantize Qwen3-8B Qwen3-8B-NVFP4 -f nvfp4 --search four-six
  microscale quantize Qwen3-8B OUT --exclude '*.down_proj.weight' --dry-run
  microscale quantize model.gguf model-mxfp4.gguf";

/// The output, and files about it.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
struct WrittenArgs {
    /// Checkpoint format, such as gguf or modelopt
    #[arg(long, alias = "out-convention", value_name = "FORMAT", value_parser = written_formats())]
    #[arg(hide_possible_values = true, long_help = to_help())]
    to: Option<CheckpointFormat>,
    /// Show the plan for each tensor, and write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    json: JsonArgs,
    /// Write a report as one HTML file
    ///
    /// It has the settings, the loss of each tensor, distributions and the worst blocks.
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    report: Option<PathBuf>,
    /// Unquantized tensors of a GGUF file: unchanged, or in q8_0 [default: unchanged]
    ///
    /// q8_0 applies to embeddings, the output head and tensors that a recipe keeps.
    #[arg(long, value_name = "TYPE", value_parser = words::<KeptAs>(), hide_short_help = true)]
    kept: Option<KeptAs>,
}

/// The help of `--to`.
fn to_help() -> String {
    format!(
        "Checkpoint format: {}\n\nThe names, layout and config of the files. The default is \
         compressed-tensors, and gguf for a GGUF file.",
        written_formats_list()
    )
}

/// What other libraries and engines need.
#[derive(clap::Args)]
#[command(next_help_heading = "Compatibility")]
struct CompatibilityArgs {
    /// Scales of inputs, for W4A4 (nvfp4): the largest magnitude (amax), or a JSON file
    ///
    /// A number is the amax of the inputs of all layers. In a JSON file {"NAME": NUMBER, …}, LAYER or
    /// LAYER.weight is the amax of a layer's inputs, LAYER.input_global_scale a divisor (2688 / amax)
    /// and LAYER.input_scale a multiplier (amax / 2688). Layers that serving engines fuse get the
    /// largest one.
    #[arg(long, value_name = "AMAX|FILE", hide_short_help = true)]
    input_scale: Option<String>,
    /// Quantize the experts of a layer one by one, as vLLM and SGLang read them
    ///
    /// For models that store the experts of a layer in one tensor (experts.gate_up_proj,
    /// experts.down_proj), such as Qwen3.5. Llama 4 is split without it.
    #[arg(long, hide_short_help = true)]
    split_experts: bool,
    /// Round weights that are in MXFP4 already once more
    ///
    /// `convert --format nvfp4` makes NVFP4 of MXFP4 exactly.
    #[arg(long, hide_short_help = true)]
    requantize: bool,
}

/// Devices and machines.
#[derive(clap::Args)]
#[command(next_help_heading = "Large jobs")]
struct LargeArgs {
    /// auto, cpu, cuda, cuda:N or cuda:all [default: auto]
    #[arg(long, default_value = "auto", hide_default_value = true, value_parser = parse_device)]
    device: DeviceChoice,
    /// Quantize part I of N, on several machines
    ///
    /// Each part writes its shards into OUTPUT.parts, with the same INPUT and options. Complete shards
    /// are kept. When all parts are done, run `microscale merge INPUT OUTPUT`.
    #[arg(long, value_name = "I/N", conflicts_with = "dry_run")]
    part: Option<Part>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let quantize = args.request()?;
    let out = if args.written.dry_run { None } else { Some(args.output.required("quantize")?) };
    let checkpoint = opened(&args.input, quantize.open(&args.input).map_err(of_options))?;
    let plan = quantize.plan(&checkpoint).map_err(of_options)?;
    for warning in &plan.warnings {
        warn(warning);
    }
    args.look_around(&quantize, &checkpoint, out)?;
    let json = args.written.json.start()?;
    let report = args.written.report.as_deref().map(Pending::create).transpose()?;
    let Some(out) = out else {
        let facts = if json.is_none() { Value::Null } else { plan.to_json() };
        return json.finish(facts, || print(plan_text(&plan)));
    };
    let (device, started) = (device(args.large.device)?, SystemTime::now());
    let mut bar = Bar::new("quantizing");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let summary = plan.run(out, &device, &mut update)?;
    drop(bar);
    let part = args.large.part;
    let complete = match part {
        None => out.display().to_string(),
        Some(Part { index, of, .. }) => format!("part {index} of {of} of {}", out.display()),
    };
    if let Some(report) = report {
        let html = Run { summary: &summary, input: &args.input, out, started }.html();
        after(&complete, report.finish(html))?;
    }
    let part = summary.part.as_ref().zip(part);
    let part = part.map(|(done, part)| part_text(done, part, &args.input, out)).unwrap_or_default();
    let text = summary_text(&summary, out) + &notes_text(&plan) + &part;
    after(complete, json.finish_summary(Json(summary), text))
}

/// The text of a summary's JSON, which is never in memory as a whole.
struct Json(Summary);

impl Display for Json {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.write_json(f)
    }
}

impl Args {
    /// The request that the options make.
    fn request(&self) -> Result<Quantize> {
        let mut recipes = self.recipe.recipes().map_err(of_options)?;
        recipes.kept = self.written.kept.unwrap_or(recipes.kept);
        // Mistakes that do not depend on files are reported first.
        recipes.check_settings().map_err(of_options)?;
        let input_scales = self.compatibility.input_scale.as_deref().map(|given| match given.parse() {
            Ok(amax) => Ok(InputScales::from_amax(amax)),
            Err(_) => InputScales::read(Path::new(given)),
        });
        Ok(Quantize {
            open: OpenOptions { split_experts: self.compatibility.split_experts, ..self.others.options() },
            recipes,
            format: self.written.to,
            requantize: self.compatibility.requantize,
            global_scales: self.recipe.global_scales().map(Into::into),
            importance: self.recipe.importance()?,
            gptq: self.recipe.gptq(),
            input_scales: input_scales.transpose()?,
            check_search: self.recipe.check_search(),
            worst_blocks: self.written.report.is_some().then_some(WORST_BLOCKS),
            part: self.large.part,
        })
    }

    /// The file with scales of inputs.
    fn input_scales(&self) -> Option<&Path> {
        self.compatibility.input_scale.as_deref().filter(|given| given.parse::<f32>().is_err()).map(Path::new)
    }

    /// Makes sure that nothing will be overwritten, removes the files that killed runs left of this
    /// output, and warns about links.
    fn look_around(&self, quantize: &Quantize, checkpoint: &Checkpoint, out: Option<&Path>) -> Result<()> {
        let parts = out.filter(|_| self.large.part.is_some()).map(checkpoint::parts_directory).transpose()?;
        Files {
            checkpoints: &[checkpoint],
            read: &[
                self.recipe.file(),
                self.recipe.global_scales(),
                quantize.importance.as_deref(),
                self.input_scales(),
            ],
            outputs: &out.into_iter().chain(parts.as_deref()).collect::<Vec<_>>(),
            written: &[self.written.json.file(), self.written.report.as_deref()],
        }
        .check()?;
        match (out, self.large.part) {
            (None, _) => Ok(()),
            (Some(out), Some(part)) => {
                tell_of_left(&checkpoint::remove_unfinished_part(out, part));
                Ok(())
            }
            (Some(out), None) => {
                tell_of_left(&checkpoint::remove_unfinished_output(out));
                self.others.tell(checkpoint)
            }
        }
    }
}

/// Turns an error about options into one about the command line.
fn of_options(error: Error) -> anyhow::Error {
    match error {
        Error::Recipe(RecipeError::Settings { .. })
        | Error::Plan(PlanError::NoGlobalSearch { .. })
        | Error::Plan(PlanError::NothingToCheck { .. })
        | Error::Plan(PlanError::NotTransformed { .. })
        | Error::Given(GivenError::ImportanceUnused)
        | Error::Given(GivenError::InputScaleUnheld { .. })
        | Error::Given(GivenError::InputScaleNumber { .. })
        | Error::Recipe(RecipeError::NoPreset { .. }) => Usage::new(error).into(),
        error => error.into(),
    }
}

/// Requirements of loaders of the output, a line each.
fn notes_text(plan: &Plan<'_>) -> String {
    plan.refused_by().iter().map(|note| format!("\nnote    {note}")).collect()
}

/// The outcome of a part, and the next step, as text.
fn part_text(done: &PartSummary, Part { index, of }: Part, input: &Path, out: &Path) -> String {
    let (made, kept, all) = (count(done.made as u64), count(done.kept as u64), count(done.of as u64));
    let (input, out) = (input.display(), out.display());
    format!(
        "\npart    {index} of {of}: made {made} and kept {kept} of {all} shards in {}; when all parts are done: microscale \
         merge {input} {out}",
        done.directory.display()
    )
}

/// The closing tables.
fn summary_text(summary: &Summary, out: &Path) -> String {
    let totals = summary.totals();
    let (report, errors) = (totals.report, totals.errors);
    let blocks = totals.blocks;
    let of_blocks = |n: u64| format!("{} of {} blocks", count(n), count(blocks));
    let values_left_out = left_out(&errors).unwrap_or_default();
    let left_out = if values_left_out.is_empty() { "" } else { "left out" };
    let mut facts = table(&["loss", "", "counts", ""]);
    for row in [
        ["relative squared error", &figure(errors.relative_squared_error()), "NaN", &count(report.nan)],
        ["SQNR", &decibels(errors.sqnr_db()), "infinities", &count(report.infinite)],
        ["largest error", &figure(errors.max_abs_error()), "clipped", &of_blocks(report.clipped_blocks)],
        ["cosine", &cosine(errors.cosine()), "flushed to zero", &of_blocks(report.flushed_blocks)],
        [left_out, &values_left_out, "saturated scales", &of_blocks(report.saturated_scales)],
    ] {
        facts.add_row(row);
    }
    if let Some([gptq, plain]) = &totals.outputs {
        facts.add_row(["error of layers' outputs", &figure(gptq.relative())]);
        facts.add_row(["without GPTQ", &figure(plain.relative())]);
    }
    let mut copied = Vec::new();
    for tensor in &summary.tensors {
        if let Outcome::Copied(reason) = &tensor.outcome {
            copied.push((reason.to_string(), tensor.name.as_str()));
        }
    }
    let (device, recipes) = (&summary.device, recipes_text(&summary.recipes));
    let compute = format!("{} ({})", seconds(totals.seconds), rate(totals.bytes_per_second()));
    let moved = totals.quantized.with(totals.copied);
    let all = rate((moved.bytes_before + moved.bytes_after) as f64 / summary.seconds.max(f64::MIN_POSITIVE));
    let whole = format!("{} ({all})", seconds(summary.seconds));
    let mut text = if is_verbose() { tensors_table(summary) } else { String::new() };
    text += &format!("{}\n\n{}\n", sums_table(&summary.formats(), totals.copied), facts.trim_fmt());
    text += &search_table(summary, &totals);
    text += &reasons_table(&copied);
    text += &skipped_text(&summary.skipped);
    text + &format!(
        "\n{recipes}\ndevice  {device}\ntime    {compute} quantizing, {whole} in all\noutput  {}",
        out.display()
    )
}

/// A table of all tensors, with the loss of each.
fn tensors_table(summary: &Summary) -> String {
    let mut rows = table(&["tensor", "dtype, shape", "became", ">SQNR", ">max abs error", ">clipped blocks"]);
    let mut tensors: Vec<_> = summary.tensors.iter().collect();
    tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
    for tensor in tensors {
        let (name, stored) = (shown(&tensor.name), format!("{} {}", tensor.dtype, shape(&tensor.shape)));
        match &tensor.outcome {
            Outcome::Copied(reason) => rows.add_row([name, stored, format!("copy: {reason}")]),
            Outcome::Quantized { format, report, errors, .. } => rows.add_row([
                name,
                stored,
                format.to_string(),
                decibels(errors.sqnr_db()),
                figure(errors.max_abs_error()),
                count(report.clipped_blocks),
            ]),
        };
    }
    format!("{}\n\n", rows.trim_fmt())
}

/// A table of the effect of a search for scales, if there was one.
fn search_table(summary: &Summary, totals: &Totals) -> String {
    // GPTQ does not minimize the error that this table shows.
    let Some(plain) = totals.plain.filter(|_| totals.outputs.is_none()) else { return String::new() };
    let (report, tensors, blocks) = (totals.report, totals.quantized.tensors, totals.searched_blocks);
    let tried = report.tried_scales as f64 / blocks.max(1) as f64;
    let error =
        |errors: ErrorStats| format!("{} relative squared error", figure(errors.relative_squared_error()));
    let of = |n: u64, all: u64| format!("{} of {}", count(n), count(all));
    let mut rows = table(&["search", ""]);
    for (what, found) in [
        ("error before", error(plain)),
        ("error after", error(totals.errors)),
        ("blocks changed", of(report.rescaled_blocks, blocks)),
        ("candidates tried a block", format!("{tried:.1}")),
    ] {
        rows.add_row([what, &found]);
    }
    if summary.has_fact("search_global") {
        rows.add_row(["global scales changed", &of(totals.rescaled_tensors, tensors)]);
    }
    if let Some(checked) = summary.checked_blocks {
        rows.add_row(["scales that no other beats", &of(checked, blocks)]);
    }
    format!("\n{}\n", rows.trim_fmt())
}

/// The output of a dry run.
fn plan_text(plan: &Plan<'_>) -> String {
    let mut rows = table(&["tensor", "dtype, shape", "becomes", ">before", ">after"]);
    let (recipes, mut copied) = (plan.recipes(), Sums::default());
    let mut jobs: Vec<_> = plan.jobs.iter().collect();
    jobs.sort_by(|a, b| natural_order(a.tensor.name, b.tensor.name));
    for job in jobs {
        let (tensor, after) = (&job.tensor, job.bytes_after());
        let before = tensor.bytes() as u64;
        let becomes = match &job.plan {
            TensorPlan::Quantize(plan) => distinction(&recipes[plan.recipe], &recipes),
            TensorPlan::Copy(plan) => {
                copied.add(tensor.elements(), before, after);
                format!("copy: {}", plan.reason)
            }
            _ => String::new(),
        };
        let stored = format!("{} {}", tensor.dtype, shape(tensor.shape));
        rows.add_row([&shown(tensor.name), &stored, &becomes, &bytes(before), &bytes(after)]);
    }
    let (sums, rows) = (sums_table(&plan.formats(), copied), rows.trim_fmt());
    format!("{rows}\n\n{sums}\n\n{}{}\nnothing was written", recipes_text(&recipes), notes_text(plan))
}

/// The sums of each format, if there are several, of all quantized and of all copied tensors.
fn sums_table(formats: &[(Format, Sums)], copied: Sums) -> String {
    let quantized = formats.iter().fold(Sums::default(), |sum, (_, sums)| sum.with(*sums));
    let several = formats.iter().filter(|_| formats.len() > 1).map(|(format, sums)| (format.word(), *sums));
    let all = [("quantized", quantized), ("copied", copied), ("total", quantized.with(copied))];
    let mut rows = table(&["", ">tensors", ">elements", ">before", ">after", ">ratio"]);
    for (what, sum) in several.chain(all) {
        let ratio = format!("{:.2}", sum.ratio());
        let (before, after) = (bytes(sum.bytes_before), bytes(sum.bytes_after));
        rows.add_row([what, &count(sum.tensors), &count(sum.elements), &before, &after, &ratio]);
    }
    rows.trim_fmt()
}

/// A table of the reasons why tensors were copied, the commonest first.
fn reasons_table(copied: &[(String, &str)]) -> String {
    if copied.is_empty() {
        return String::new();
    }
    let mut reasons: HashMap<&str, Vec<&str>> = HashMap::new();
    for (reason, name) in copied {
        reasons.entry(reason).or_default().push(name);
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(reason, names)| (std::cmp::Reverse(names.len()), *reason));
    let mut rows = table(&["copied because", ">tensors", "for example"]);
    for (reason, names) in reasons {
        rows.add_row([reason, &count(names.len() as u64), &shown(names[0])]);
    }
    format!("\n{}\n", rows.trim_fmt())
}
