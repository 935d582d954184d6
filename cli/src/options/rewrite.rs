//! Options of commands that rewrite a quantized checkpoint: `convert` and `dequantize`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use microscale::{Device, DeviceChoice};
use microscale_checkpoint::{Checkpoint, remove_unfinished_output};

use crate::options::device::{device_to_dequantize, parse_device};
use crate::options::output::{JsonArgs, JsonOutput, OutputArgs};
use crate::outputs::{Files, OtherFilesArgs, tell_of_left};

/// A quantized checkpoint to read, and the checkpoint to write.
#[derive(clap::Args)]
pub(crate) struct RewriteArgs {
    /// Quantized checkpoint directory, or .safetensors or .gguf file
    input: PathBuf,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    json: JsonArgs,
    #[command(flatten)]
    others: OtherFilesArgs,
    /// auto (the CPU, which is faster here), cpu, cuda, cuda:N or cuda:all [default: auto]
    #[arg(long, default_value = "auto", hide_default_value = true, value_parser = parse_device)]
    #[arg(help_heading = "Large jobs")]
    device: DeviceChoice,
}

/// A command that rewrites a checkpoint, ready to run.
pub(crate) struct Rewrite<'a> {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) out: &'a Path,
    pub(crate) device: Device,
    pub(crate) json: JsonOutput,
}

impl RewriteArgs {
    /// Opens the input, and makes sure that the outputs can be written.
    pub(crate) fn start(&self, command: &str) -> Result<Rewrite<'_>> {
        let out = self.output.required(command)?;
        let checkpoint = self.others.open(&self.input)?;
        Files {
            checkpoints: &[&checkpoint],
            outputs: &[out],
            written: &[self.json.file()],
            ..Files::default()
        }
        .check()?;
        let json = self.json.start()?;
        let device = device_to_dequantize(self.device)?;
        tell_of_left(&remove_unfinished_output(out));
        self.others.tell(&checkpoint)?;
        Ok(Rewrite { checkpoint, out, device, json })
    }
}
