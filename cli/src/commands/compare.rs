//! `microscale compare`: measures a checkpoint against another one, or against itself in a format.

use std::path::PathBuf;

use anyhow::Result;
use microscale::{DeviceChoice, ErrorStats, Format, Numerics, Recipe};
use microscale_checkpoint::{self as checkpoint, Compared, Comparison, Difference, Selection};

use crate::failures::Usage;
use crate::options::device::{device, parse_device};
use crate::options::output::JsonArgs;
use crate::options::words::{formats, words};
use crate::outputs::{Files, open};
use crate::pending::Pending;
use crate::plot::Plot;
use crate::plot::point::Point;
use crate::progress::Bar;
use crate::streams::print;
use crate::text::names::{shortened, shown};
use crate::text::table::{cosine, count, decibels, figure, left_out, natural_order, table};

/// Characters of a path in a plot; of longer ones the middle is left out.
const LONGEST: usize = 110;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The original: a checkpoint directory or a file, quantized or not
    a: PathBuf,
    /// The checkpoint to measure against it
    #[arg(required_unless_present = "format")]
    b: Option<PathBuf>,
    /// Measure A's weights as they would be in this format, instead of B
    ///
    /// Nothing is written, so formats for comparison work too, which checkpoints cannot store. Only
    /// weights that `quantize` takes by default are measured.
    #[arg(short, long, conflicts_with = "b", value_parser = formats())]
    format: Option<Format>,
    /// Library whose arithmetic to follow [default: as in `quantize`]
    #[arg(long, value_name = "LIBRARY", alias = "convention", requires = "format", value_parser = words::<Numerics>())]
    numerics: Option<Numerics>,
    /// Draw the SQNR of each tensor as SVG
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
    /// auto (a GPU for --format, else the CPU), cpu, cuda or cuda:N [default: auto]
    #[arg(long, default_value = "auto", hide_default_value = true, value_parser = parse_device)]
    device: DeviceChoice,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let a = open(&args.a)?;
    let b = args.b.as_deref().map(open).transpose()?;
    let recipe = args.recipe()?;
    let checkpoints: Vec<_> = [Some(&a), b.as_ref()].into_iter().flatten().collect();
    Files {
        checkpoints: &checkpoints,
        written: &[args.plot.as_deref(), args.json.file()],
        ..Files::default()
    }
    .check()?;
    let json = args.json.start()?;
    let plot = args.plot.as_deref().map(Pending::create).transpose()?;
    let device = device(args.device_choice())?;
    let mut bar = Bar::new("comparing");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let mut comparison = match &b {
        Some(b) => checkpoint::compare(&a, b, &device, &mut update)?,
        None => checkpoint::compare_format(&a, &Selection::default(), &recipe, &device, &mut update)?,
    };
    drop(bar);

    comparison.tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
    if let Some(plot) = plot {
        plot.finish(drawn(&comparison, &args))?;
    }
    let mut rows = table(&["tensor", ">rel. sq. error", ">SQNR", ">max abs error", ">cosine"]);
    for tensor in &comparison.tensors {
        let name = shown(&tensor.name);
        match &tensor.difference {
            Difference::Values(errors) => rows.add_row(row(&name, errors)),
            Difference::Bytes { same: true } => rows.add_row([&name, "same bytes"]),
            Difference::Bytes { same: false } => rows.add_row([&name, "other bytes"]),
        };
    }
    rows.add_row(row("total", &comparison.total));
    let mut text = rows.trim_fmt();
    if let Some(left_out) = left_out(&comparison.total) {
        text += &format!("\n\nleft out: {left_out}");
    }
    for (what, names) in
        [(args.a.display().to_string(), &comparison.only_first), (args.other(), &comparison.only_second)]
    {
        if !names.is_empty() {
            let names: Vec<_> = names.iter().map(|name| shown(name)).collect();
            text += &format!("\n\nonly in {what}:\n  {}", names.join("\n  "));
        }
    }
    json.finish(comparison.to_json(), || print(text))
}

impl Args {
    /// The recipe that A is quantized with, to be measured.
    fn recipe(&self) -> Result<Recipe> {
        let format = self.format.unwrap_or_default();
        let numerics = self.numerics.unwrap_or(Numerics::default_for(format));
        Ok(Recipe::of(format, numerics).map_err(Usage::new)?)
    }

    /// The device. `auto` is the CPU for formats that no GPU computes, and to compare two checkpoints:
    /// copying values back from a GPU takes longer than computing them.
    fn device_choice(&self) -> DeviceChoice {
        match (self.format, self.device) {
            (Some(Format::Comparison(_)) | None, DeviceChoice::Auto) => DeviceChoice::Cpu,
            (_, device) => device,
        }
    }

    /// The other side of the comparison, in a word.
    fn other(&self) -> String {
        let format = || self.format.unwrap_or_default().to_string();
        self.b.as_ref().map_or_else(format, |path| path.display().to_string())
    }
}

/// The comparison as SVG: tensors with an SQNR, and notes about the others.
fn drawn(comparison: &Comparison, args: &Args) -> String {
    let (mut points, mut equal, mut lost, mut bytes, mut left_out) = (Vec::new(), 0, 0, 0, 0);
    for Compared { name, difference, .. } in &comparison.tensors {
        match difference {
            Difference::Bytes { .. } => bytes += 1,
            Difference::Values(errors) => match Point::new(name, errors.sqnr_db()) {
                Some(point) => points.push(point),
                None if errors.sqnr_db() == f64::INFINITY => equal += 1,
                None if errors.elements() == 0 => left_out += 1,
                None => lost += 1,
            },
        }
    }
    let alone = comparison.only_first.len() + comparison.only_second.len();
    let notes = [
        (equal, "without any error (SQNR ∞)"),
        (lost, "with errors where the original is zero (SQNR −∞)"),
        (left_out, "without a value that is finite in both"),
        (bytes, "whose values are not floats in both"),
        (alone as u64, "that only one of the two has"),
    ];
    let notes = notes.into_iter().filter(|(tensors, _)| *tensors > 0);
    let notes: Vec<_> =
        notes.map(|(tensors, what)| format!("not shown: {} {what}", tensors_text(tensors))).collect();
    let name = |what: &str| shortened(what, LONGEST);
    let lines =
        [format!("of {}", name(&args.other())), format!("against {}", name(&args.a.display().to_string()))];
    let total = comparison.total.sqnr_db();
    Plot { title: "SQNR by tensor", lines: &lines, points: &points, total, notes: &notes }.svg()
}

fn tensors_text(tensors: u64) -> String {
    format!("{} tensor{}", count(tensors), if tensors == 1 { "" } else { "s" })
}

fn row(name: &str, errors: &ErrorStats) -> [String; 5] {
    [
        name.into(),
        figure(errors.relative_squared_error()),
        decibels(errors.sqnr_db()),
        figure(errors.max_abs_error()),
        cosine(errors.cosine()),
    ]
}
