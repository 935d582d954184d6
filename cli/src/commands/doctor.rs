//! `microscale doctor`: prints the defects of a quantized checkpoint, with effects and fixes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use microscale::{DeviceChoice, Words};
use microscale_checkpoint::{self as checkpoint, Diagnosis, Finding};

use crate::failures::Found;
use crate::options::device::{device_to_dequantize, parse_device};
use crate::options::output::JsonArgs;
use crate::outputs::{Files, open};
use crate::progress::Bar;
use crate::streams::{is_verbose, print};
use crate::text::names::shown;
use crate::text::table::{count, natural_order};

/// Findings of one kind that are listed one by one.
const LISTED: usize = 8;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Quantized checkpoint directory, or .safetensors or .gguf file
    input: PathBuf,
    /// Compare values with ORIGINAL, the checkpoint that was quantized
    ///
    /// Only this finds defects of the values themselves, such as swapped nibbles.
    #[arg(long, value_name = "ORIGINAL")]
    against: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
    /// auto (the CPU, which is faster here), cpu, cuda or cuda:N [default: auto]
    #[arg(long, default_value = "auto", hide_default_value = true, value_parser = parse_device)]
    device: DeviceChoice,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let checkpoint = open(&args.input)?;
    let against = args.against.as_deref().map(open).transpose()?;
    let checkpoints: Vec<_> = std::iter::once(&checkpoint).chain(&against).collect();
    Files { checkpoints: &checkpoints, written: &[args.json.file()], ..Files::default() }.check()?;
    let json = args.json.start()?;
    let device = device_to_dequantize(args.device)?;
    let mut bar = Bar::new("examining");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let diagnosis = checkpoint::diagnose(&checkpoint, against.as_ref(), &device, &mut update)?;
    let diagnosis = diagnosis.of_quantized(&checkpoint)?;
    drop(bar);
    let text = text(&diagnosis, against.is_some());
    if diagnosis.findings.is_empty() {
        return json.finish_summary(diagnosis.to_json(), text);
    }
    json.finish(diagnosis.to_json(), || print(text))?;
    Err(Found(diagnosis.findings.len()).into())
}

/// Findings by kind, with the effect and the fix of each.
fn text(diagnosis: &Diagnosis, compared: bool) -> String {
    let mut kinds: BTreeMap<&str, Vec<&Finding>> = BTreeMap::new();
    for finding in &diagnosis.findings {
        kinds.entry(finding.defect.word()).or_default().push(finding);
    }
    let mut text = String::new();
    for (word, mut findings) in kinds {
        let name = |finding: &Finding| match &finding.tensor {
            Some(tensor) => shown(tensor),
            None => finding.file.display().to_string(),
        };
        findings.sort_by(|a, b| natural_order(&name(a), &name(b)));
        let defect = findings[0].defect;
        text += &format!("{word}\n");
        let listed = if is_verbose() { findings.len() } else { LISTED };
        for finding in findings.iter().take(listed) {
            text += &format!("  {}: {}\n", name(finding), finding.what);
        }
        if findings.len() > listed {
            text += &format!("  and {} more (-v lists all)\n", count((findings.len() - listed) as u64));
        }
        text += &format!("  effect: {}\n  help:   {}\n\n", defect.effect(), defect.fix());
    }
    let (quantized, plain) = (count(diagnosis.quantized), count(diagnosis.plain));
    let blocks = match diagnosis.blocks {
        0 => String::new(),
        blocks => format!(" ({} blocks)", count(blocks)),
    };
    let found = if diagnosis.findings.is_empty() { "no defects found in " } else { "checked " };
    text += &format!("{found}{quantized} quantized tensors{blocks} and {plain} unquantized tensors");
    if !compared {
        text += "\nvalues were not compared with the original: pass --against ORIGINAL";
    }
    text
}
