//! `microscale plan`: chooses a format for each tensor within a budget, and writes a recipe.

use std::path::{Path, PathBuf};

use anyhow::Result;
use microscale::{DeviceChoice, Words};
use microscale_checkpoint::{
    self as checkpoint, Allocate, Allocation, Budget, CheckpointFormat, Choice, OpenOptions, Point, Selection,
};

use crate::failures::Usage;
use crate::options::device::{device, parse_device};
use crate::options::output::JsonArgs;
use crate::options::recipe::SelectionArgs;
use crate::options::size::{parse_bits, parse_size};
use crate::options::words::{choices, written_formats, written_formats_list};
use crate::outputs::{Files, after, opened};
use crate::pending::Pending;
use crate::plot::sizes::Mark;
use crate::plot::sizes_svg;
use crate::progress::Bar;
use crate::streams::{is_verbose, note, print, warn};
use crate::text::names::{shortened, shown};
use crate::text::table::{bytes, count, figure, natural_order, table};

/// Characters of a path in a plot; of longer ones the middle is left out.
const LONGEST: usize = 110;

#[derive(clap::Args)]
#[command(after_help = AFTER, after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Checkpoint directory, or a .safetensors, .gguf, .bin or .pt file
    input: PathBuf,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    quality: QualityArgs,
    #[command(flatten)]
    written: WrittenArgs,
    /// Choose for the experts of a layer one by one, as with `quantize --split-experts`
    #[arg(long, hide_short_help = true, help_heading = "Compatibility")]
    split_experts: bool,
    /// auto, cpu, cuda, cuda:N or cuda:all [default: auto]
    #[arg(long, default_value = "auto", hide_default_value = true, value_parser = parse_device)]
    #[arg(help_heading = "Large jobs")]
    device: DeviceChoice,
}

const AFTER: &str = "--help has details, more options and examples.";

const EXAMPLES: &str = "\
Examples:
  microscale plan Qwen3-8B --bits 5 -o recipe.toml
  microscale quantize Qwen3-8B OUT -r recipe.toml
  microscale plan Qwen3-8B --size 5GiB --formats nvfp4,mxfp8,unquantized
  microscale plan Qwen3-8B --bits 4.6 --search full --importance FILE --plot loss.svg";

/// The limit on the size.
#[derive(clap::Args)]
#[command(next_help_heading = "Budget")]
#[group(required = true, multiple = false)]
struct BudgetArgs {
    /// Largest number of bits per weight, scales included
    ///
    /// On average over the tensors that can be quantized. NVFP4 has 4.5, MXFP4 4.25 and MXFP8 8.25.
    #[arg(long, value_parser = parse_bits)]
    bits: Option<f64>,
    /// Largest size of all tensors, such as 12GiB
    ///
    /// Unquantized tensors are included, headers of files are not. Units are B, KB, KiB, MB, MiB,
    /// GB, GiB, TB and TiB.
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
}

/// The tensors, the formats and the measure.
#[derive(clap::Args)]
#[command(next_help_heading = "Quality")]
struct QualityArgs {
    /// Choose among these, such as nvfp4,unquantized
    ///
    /// Words are mxfp4, nvfp4, mxfp8-e4m3 and unquantized. The default is every format that the
    /// checkpoint format has, and unquantized.
    #[arg(long, value_name = "FORMATS", value_delimiter = ',', value_parser = choices())]
    #[arg(hide_possible_values = true)]
    formats: Vec<Choice>,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Importance matrix, which weights the loss by column
    ///
    /// As of `quantize --importance`. The loss of a tensor then is the sum of h (w - y)^2 over its
    /// weights w and their quantized values y, where h is the importance of the column. A search
    /// uses it too. Tensors without a vector weigh as much as the others on average.
    #[arg(long, alias = "imatrix", value_name = "FILE")]
    importance: Option<PathBuf>,
}

/// The outputs.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
struct WrittenArgs {
    /// Write the plan as a recipe of `quantize`
    #[arg(short, long, value_name = "RECIPE.toml")]
    output: Option<PathBuf>,
    /// Checkpoint format that will hold the plan
    #[arg(long, alias = "out-convention", value_name = "FORMAT", value_parser = written_formats())]
    #[arg(hide_possible_values = true, long_help = to_help())]
    to: Option<CheckpointFormat>,
    /// Draw loss against size as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

/// The help of `--to`.
fn to_help() -> String {
    format!(
        "Checkpoint format that will hold the plan: {}\n\nIt decides which formats there are, and their \
         bytes. The default is compressed-tensors, and gguf for a GGUF file.",
        written_formats_list()
    )
}

pub(crate) fn run(args: Args) -> Result<()> {
    let allocate = args.request()?;
    let checkpoint = opened(&args.input, allocate.open(&args.input).map_err(Into::into))?;
    let (output, plot) = (args.written.output.as_deref(), args.written.plot.as_deref());
    Files {
        checkpoints: &[&checkpoint],
        read: &[args.quality.importance.as_deref()],
        written: &[output, plot, args.written.json.file()],
        ..Files::default()
    }
    .check()?;
    let json = args.written.json.start()?;
    let [recipe, plot] = [output, plot].map(|path| path.map(Pending::create).transpose());
    let (recipe, plot, device) = (recipe?, plot?, device(args.device)?);
    let mut bar = Bar::new("measuring");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let allocation = allocate.run(&checkpoint, &device, &mut update)?;
    drop(bar);
    for warning in &allocation.warnings {
        warn(warning);
    }
    args.tell(&allocation);
    if let Some(recipe) = recipe {
        recipe.finish(allocation.recipe(&args.command()).trim_end())?;
    }
    if let Some(plot) = plot {
        let complete = output.map_or("the plan".into(), |output| output.display().to_string());
        after(complete, plot.finish(drawn(&allocation, &args.input)))?;
    }
    json.finish(allocation.to_json(), || print(args.text(&allocation)))
}

impl Args {
    /// The request that the options make.
    fn request(&self) -> Result<Allocate> {
        let budget = match (self.budget.bits, self.budget.size) {
            (Some(bits), _) => Budget::Bits(bits),
            (None, size) => Budget::Bytes(size.unwrap_or(0)),
        };
        let (quality, written) = (&self.quality, &self.written);
        if let Some(name) = written.output.as_ref().and_then(|output| output.to_str())
            && !name.ends_with(".toml")
            && !name.contains(std::path::is_separator)
        {
            let why =
                format!("`quantize -r {name}` would look for a built-in recipe; name the file {name}.toml");
            return Err(Usage::new(why).into());
        }
        Ok(Allocate {
            open: OpenOptions { split_experts: self.split_experts, ..OpenOptions::default() },
            choices: quality.formats.clone(),
            selection: Selection::new(&quality.selection.include, &quality.selection.exclude)?,
            search: quality.selection.search.unwrap_or_default(),
            format: written.to,
            importance: quality.importance.clone(),
            ..Allocate::new(budget)
        })
    }

    /// The command line, with the options that decide the plan.
    fn command(&self) -> String {
        let mut words = vec!["microscale plan".to_string(), self.input.display().to_string()];
        let mut option = |name: &str, value: Option<String>| {
            words.extend(value.map(|value| format!("--{name} {value}")));
        };
        let quality = &self.quality;
        option("bits", self.budget.bits.map(|bits| bits.to_string()));
        option("size", self.budget.size.map(|size| size.to_string()));
        let formats: Vec<_> = quality.formats.iter().map(|choice| choice.word()).collect();
        option("formats", Some(formats.join(",")).filter(|_| !formats.is_empty()));
        for (name, patterns) in
            [("include", &quality.selection.include), ("exclude", &quality.selection.exclude)]
        {
            patterns.iter().for_each(|pattern| option(name, Some(format!("'{pattern}'"))));
        }
        option("search", quality.selection.search.map(|search| search.word().into()));
        option("importance", quality.importance.as_ref().map(|path| path.display().to_string()));
        option("to", self.written.to.map(|to| to.word().into()));
        if self.split_experts {
            words.push("--split-experts".into());
        }
        words.join(" ")
    }

    /// Notes on a budget that exceeds all plans, and on plans that quantize nothing.
    fn tell(&self, allocation: &Allocation) {
        let largest = allocation.curve.last().map_or(0, |largest| largest.bytes);
        if allocation.budget > largest {
            note(format_args!(
                "the budget exceeds the largest plan, which has {:.4} bits per weight ({} with all other tensors)",
                allocation.bits(largest),
                bytes(largest + allocation.others)
            ));
        }
        if allocation.tensors.iter().all(|tensor| allocation.format_of(tensor).is_none()) {
            note("the plan leaves every tensor unquantized, so that quantize has nothing to do");
        }
    }

    /// The plan as text.
    fn text(&self, allocation: &Allocation) -> String {
        let mut text = if is_verbose() { tensors_text(allocation) } else { String::new() };
        let mut rows = table(&["format", ">tensors", ">weights", ">size", ">share of loss"]);
        for share in allocation.shares() {
            let of_loss = 100.0 * share.point.loss / allocation.chosen.loss.max(f64::MIN_POSITIVE);
            rows.add_row([
                share.choice.to_string(),
                count(share.tensors),
                count(share.elements),
                bytes(share.point.bytes),
                format!("{of_loss:.1} %"),
            ]);
        }
        let elements = allocation.elements();
        let tensors = allocation.tensors.len() as u64;
        let size = allocation.chosen.bytes;
        rows.add_row(["total", &count(tensors), &count(elements), &bytes(size), ""]);
        text += &rows.trim_fmt();
        let all = bytes(size + allocation.others);
        let loss = allocation.relative(allocation.chosen.loss);
        let measure = match &self.quality.importance {
            None => "mean relative squared error".into(),
            Some(path) => format!("squared error weighted by {}, relative", path.display()),
        };
        text += &format!(
            "\n\nbudget  {:.4} bits per weight\nsize    {:.4} bits per weight, {all} with all other tensors\nloss    {} \
             ({measure})\nbound   {}",
            allocation.bits(allocation.budget),
            allocation.bits(size),
            figure(loss),
            bound_text(allocation)
        );
        text += &format!("\n\n{}", alternatives_text(allocation));
        let files = allocation.checkpoint_format;
        let others = allocation.held_by.iter().filter(|other| **other != files).map(|other| other.word());
        let others: Vec<_> = others.collect();
        let also = if others.is_empty() { String::new() } else { format!("; {} too", others.join(", ")) };
        text += &format!("\n\nfiles   {} can hold it{also}", files.word());
        match &self.written.output {
            Some(output) => {
                let (input, output) = (self.input.display(), output.display());
                let importance =
                    self.quality.importance.as_ref().filter(|_| self.quality.selection.search.is_some());
                let importance = importance.map(|path| format!(" --importance {}", path.display()));
                let split = if self.split_experts { " --split-experts" } else { "" };
                let importance = importance.unwrap_or_default();
                text + &format!(
                    "\nrecipe  {output}: microscale quantize {input} OUT -r {output}{importance}{split}"
                )
            }
            None => text + "\nrecipe  not written; -o RECIPE.toml writes it",
        }
    }
}

/// The bound, and how far the plan is from it.
fn bound_text(allocation: &Allocation) -> String {
    let (relaxed, bound) = (allocation.relative(allocation.relaxed), allocation.relative(allocation.bound));
    let loss = allocation.relative(allocation.chosen.loss);
    let above = |bound: f64| if loss > 0.0 { 100.0 * (loss - bound) / loss } else { 0.0 };
    let relaxation = format!("{} by linear relaxation, {:.2} % below", figure(relaxed), above(relaxed));
    match allocation.is_optimal() {
        true => format!("{relaxation}; no plan within the budget loses less"),
        false => format!("{relaxation}; the plan is within {:.4} % of the best", above(bound)),
    }
}

/// The plan and one format for all tensors.
fn alternatives_text(allocation: &Allocation) -> String {
    let mut rows = table(&["compared with", ">bits", ">size", ">loss"]);
    let row = |name: &str, point: Point| {
        let loss = figure(allocation.relative(point.loss));
        [name.to_string(), format!("{:.4}", allocation.bits(point.bytes)), bytes(point.bytes), loss]
    };
    rows.add_row(row("this plan", allocation.chosen));
    for alternative in &allocation.alternatives {
        rows.add_row(row(&alternative.name(), alternative.point));
    }
    rows.trim_fmt()
}

/// Each tensor, its format and its loss.
fn tensors_text(allocation: &Allocation) -> String {
    let mut rows = table(&["tensor", ">weights", "becomes", ">size", ">loss"]);
    let mut tensors: Vec<_> = allocation.tensors.iter().collect();
    tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
    for tensor in tensors {
        let point = tensor.points[tensor.choice];
        let format = allocation.format_of(tensor).map_or(Choice::Unquantized, Choice::Format);
        rows.add_row([
            shown(&tensor.name),
            count(tensor.elements),
            format.to_string(),
            bytes(point.bytes),
            figure(allocation.relative(point.loss)),
        ]);
    }
    format!("{}\n\n", rows.trim_fmt())
}

/// Loss against size as SVG.
fn drawn(allocation: &Allocation, input: &Path) -> String {
    let mark = |name: String, point: Point| {
        let (bits, loss) = (allocation.bits(point.bytes), allocation.relative(point.loss));
        Mark { name, bits, loss }
    };
    let others = allocation.alternatives.iter().map(|other| mark(other.name(), other.point));
    let marks: Vec<_> = std::iter::once(mark("plan".into(), allocation.chosen)).chain(others).collect();
    let corner = |point: &Point| (allocation.bits(point.bytes), allocation.relative(point.loss));
    let curve: Vec<_> = allocation.curve.iter().map(corner).collect();
    let lines = [
        format!("of {}", shortened(&input.display().to_string(), LONGEST)),
        "line: lower bound of all plans (linear relaxation); squares: one format for all tensors".into(),
    ];
    sizes_svg("Loss against size", &lines, &curve, &marks)
}
