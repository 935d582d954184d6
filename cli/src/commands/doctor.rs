//! `microscale doctor`: audits a quantized checkpoint and prints its defects, with effects and remedies.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use microscale::{DeviceChoice, Words};
use microscale_checkpoint::{self as checkpoint, Diagnosis, Finding};

use crate::failures::Found;
use crate::options::device::device_to_dequantize;
use crate::outputs::open;
use crate::progress::Bar;
use crate::streams::print;
use crate::text::names::shown;
use crate::text::table::{count, natural_order};

/// Findings of one kind that are listed one by one.
const LISTED: usize = 8;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A quantized .safetensors file or checkpoint directory
    path: PathBuf,
    /// The checkpoint that was quantized: values are compared with it, and so the order of nibbles is
    #[arg(long, value_name = "ORIGINAL")]
    against: Option<PathBuf>,
    /// Print all findings as JSON
    #[arg(long)]
    json: bool,
    /// auto (the CPU, which is faster here), cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let checkpoint = open(&args.path)?;
    let against = args.against.as_deref().map(open).transpose()?;
    let device = device_to_dequantize(args.device)?;
    let mut bar = Bar::new("examining");
    let mut update = |progress: checkpoint::Progress<'_>| bar.update(progress);
    let diagnosis = checkpoint::diagnose(&checkpoint, against.as_ref(), &device, &mut update)?;
    drop(bar);
    if args.json {
        print(format_args!("{:#}", diagnosis.to_json()))?;
    } else {
        print(text(&diagnosis, against.is_some()))?;
    }
    if diagnosis.findings.is_empty() { Ok(()) } else { Err(Found(diagnosis.findings.len()).into()) }
}

/// Findings by kind, with what each does and what helps.
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
        for finding in findings.iter().take(LISTED) {
            text += &format!("  {}: {}\n", name(finding), finding.what);
        }
        if findings.len() > LISTED {
            text += &format!("  and {} more (--json lists all)\n", count((findings.len() - LISTED) as u64));
        }
        text += &format!("  effect: {}\n  help:   {}\n\n", defect.effect(), defect.fix());
    }
    let (quantized, plain) = (count(diagnosis.quantized), count(diagnosis.plain));
    let blocks = count(diagnosis.blocks);
    text += &format!("{quantized} quantized tensors ({blocks} blocks) and {plain} others were looked at");
    if !compared {
        text += "; without --against their values were not compared";
    }
    text
}
