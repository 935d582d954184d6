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

use crate::failures::Usage;
use crate::options::device::device;
use crate::options::recipe::{RecipeArgs, distinction, recipes_text};
use crate::options::words::{pattern, words, written_formats};
use crate::outputs::{Files, OtherFilesArgs, after, tell_of_left, warn_of};
use crate::pending::Pending;
use crate::progress::Bar;
use crate::report::run::{Run, WORST_BLOCKS};
use crate::streams::{print, warn};
use crate::text::names::shown;
use crate::text::table::{
    bytes, cosine, count, decibels, figure, left_out, natural_order, rate, seconds, shape, skipped_text,
    table,
};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A .safetensors file or a checkpoint directory
    input: PathBuf,
    /// Where to write: a file or a directory, like INPUT. It must not exist yet, or be an empty directory
    #[arg(long, required_unless_present = "dry_run")]
    out: Option<PathBuf>,
    #[command(flatten)]
    recipe: RecipeArgs,
    /// The checkpoint format to write: names, layout and config [default: compressed-tensors, and of a GGUF
    /// file gguf]
    #[arg(long, alias = "out-convention", value_parser = written_formats())]
    to: Option<CheckpointFormat>,
    /// How tensors are stored that stay out of four bits, of a GGUF file: unchanged, or q8_0, embeddings, the output head and
    /// whatever a recipe keeps [default: unchanged]
    #[arg(long, value_name = "TYPE", value_parser = words::<KeptAs>())]
    kept: Option<KeptAs>,
    /// Also quantize matching float tensors of two dimensions or more (may be given several times)
    #[arg(long, value_name = "GLOB", value_parser = pattern)]
    include: Vec<String>,
    /// Leave matching tensors unquantized; has the last word (may be given several times)
    #[arg(long, value_name = "GLOB", value_parser = pattern)]
    exclude: Vec<String>,
    /// Store the global scale that each layer's inputs are quantized with, for W4A4 (nvfp4): the
    /// largest magnitude (amax) of the inputs of all layers, a number; or a JSON file {"NAME": NUMBER, …} in which LAYER or
    /// LAYER.weight is the amax of a layer's inputs, LAYER.input_global_scale a divisor (2688 / amax) and LAYER.input_scale a
    /// multiplier (amax / 2688). Layers that serving engines fuse get the largest of theirs
    #[arg(long, value_name = "AMAX|FILE")]
    input_scale: Option<String>,
    /// Round weights that are in MXFP4 already once more, from their values; `convert --format nvfp4` makes NVFP4 of them exactly
    #[arg(long)]
    requantize: bool,
    /// Take experts of a layer that lie in one tensor (experts.gate_up_proj, experts.down_proj, as in Qwen3.5 and Llama 4) one by one, as
    /// vLLM and SGLang look for quantized ones
    #[arg(long)]
    split_experts: bool,
    /// auto, cpu, cuda:N or cuda:all
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Do the I-th of N parts of the shards, into OUT.parts: for as many processes or machines, with the same
    /// input and options each. Shards that are there already are kept. Then `microscale merge INPUT --out
    /// OUT`
    #[arg(long, value_name = "I/N", conflicts_with = "dry_run")]
    part: Option<Part>,
    /// Show what would be done to each tensor, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Also write the facts as JSON, for each tensor and in total
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a report as one HTML file: settings, loss by tensor, distributions, worst blocks
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    report: Option<PathBuf>,
    #[command(flatten)]
    others: OtherFilesArgs,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let quantize = args.request()?;
    let checkpoint = quantize.open(&args.input).map_err(of_options)?;
    warn_of(&checkpoint);
    let plan = quantize.plan(&checkpoint).map_err(of_options)?;
    for warning in &plan.warnings {
        warn(format_args!("warning: {warning}"));
    }
    args.look_around(&checkpoint)?;
    let json = args.json.as_deref().map(Pending::create).transpose()?;
    let report = args.report.as_deref().map(Pending::create).transpose()?;
    let (facts, complete): ((Box<dyn Display>, String), _) = match &args.out {
        Some(out) if !args.dry_run => {
            let (device, started) = (device(args.device)?, SystemTime::now());
            let mut bar = Bar::new("quantizing");
            let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
            let summary = plan.run(out, &device, &mut update)?;
            drop(bar);
            let complete = match args.part {
                None => out.display().to_string(),
                Some(Part { index, of, .. }) => format!("part {index} of {of} of {}", out.display()),
            };
            if let Some(report) = report {
                let html = Run { summary: &summary, input: &args.input, out, started }.html();
                after(&complete, report.finish(html))?;
            }
            let note = summary.part.as_ref().zip(args.part);
            let note = note.map(|(done, part)| part_text(done, part, &args)).unwrap_or_default();
            let text = summary_text(&summary, out) + &notes_text(&plan) + &note;
            ((Box::new(Json(summary)), text), Some(complete))
        }
        _ if json.is_some() => ((Box::new(plan.to_json()), plan_text(&plan)), None),
        _ => ((Box::new(""), plan_text(&plan)), None),
    };
    let tell = || {
        if let Some(json) = json {
            json.finish(format_args!("{:#}", facts.0))?;
        }
        print(facts.1)
    };
    match complete {
        Some(complete) => after(complete, tell()),
        None => tell(),
    }
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
        recipes.select(&self.include, &self.exclude)?;
        recipes.kept = self.kept.unwrap_or(recipes.kept);
        // Mistakes that do not depend on files are reported first.
        recipes.check_settings().map_err(of_options)?;
        let input_scales = self.input_scale.as_deref().map(|given| match given.parse() {
            Ok(amax) => Ok(InputScales::from_amax(amax)),
            Err(_) => InputScales::read(Path::new(given)),
        });
        Ok(Quantize {
            open: OpenOptions { split_experts: self.split_experts, ..self.others.options() },
            recipes,
            format: self.to,
            requantize: self.requantize,
            global_scales: self.recipe.global_scales().map(Into::into),
            importance: self.recipe.importance().map(Into::into),
            input_scales: input_scales.transpose()?,
            check_search: self.recipe.check_search,
            worst_blocks: self.report.is_some().then_some(WORST_BLOCKS),
            part: self.part,
        })
    }

    /// The file with scales of inputs.
    fn input_scales(&self) -> Option<&Path> {
        self.input_scale.as_deref().filter(|given| given.parse::<f32>().is_err()).map(Path::new)
    }

    /// Makes sure that nothing will be overwritten, removes what killed runs have left of this output, and tells
    /// of links.
    fn look_around(&self, checkpoint: &Checkpoint) -> Result<()> {
        let out = self.out.as_deref().filter(|_| !self.dry_run);
        let parts = out.filter(|_| self.part.is_some()).map(checkpoint::parts_directory).transpose()?;
        Files {
            checkpoints: &[checkpoint],
            read: &[
                self.recipe.file(),
                self.recipe.global_scales(),
                self.recipe.importance(),
                self.input_scales(),
            ],
            outputs: &out.into_iter().chain(parts.as_deref()).collect::<Vec<_>>(),
            written: &[self.json.as_deref(), self.report.as_deref()],
        }
        .check()?;
        match (out, self.part) {
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
        | Error::Given(GivenError::ImportanceUnused)
        | Error::Given(GivenError::InputScaleUnheld { .. })
        | Error::Given(GivenError::InputScaleNumber { .. })
        | Error::Recipe(RecipeError::NoPreset { .. }) => Usage::new(error).into(),
        error => error.into(),
    }
}

/// What loaders need that read the output, a line each.
fn notes_text(plan: &Plan<'_>) -> String {
    plan.refused_by().iter().map(|note| format!("\nnote    {note}")).collect()
}

/// The outcome of a part, and the next step, as text.
fn part_text(done: &PartSummary, Part { index, of }: Part, args: &Args) -> String {
    let (made, kept, all) = (count(done.made as u64), count(done.kept as u64), count(done.of as u64));
    let (input, out) = (args.input.display(), args.out.as_deref().unwrap_or(Path::new("OUT")).display());
    format!(
        "\npart    {index} of {of}: made {made} and kept {kept} of {all} shards in {}; when all parts are done: microscale \
         merge {input} --out {out}",
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
    let mut text = format!("{}\n\n{}\n", sums_table(&summary.formats(), totals.copied), facts.trim_fmt());
    text += &search_table(summary, &totals);
    text += &reasons_table(&copied);
    text += &skipped_text(&summary.skipped);
    text + &format!(
        "\n{recipes}\ndevice  {device}\ntime    {compute} quantizing, {whole} in all\noutput  {}",
        out.display()
    )
}

/// A table of the effect of a search for scales, if there was one.
fn search_table(summary: &Summary, totals: &Totals) -> String {
    let Some(plain) = totals.plain else { return String::new() };
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

/// The tensors of each format, if there are several, and of all; and those that are copied.
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
