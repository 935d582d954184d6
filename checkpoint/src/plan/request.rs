//! Request to quantize a checkpoint: everything that determines the output's bytes.

use std::path::{Path, PathBuf};

use crate::checkpoint_format::CheckpointFormat;
use crate::error::Result;
use crate::plan::hessians::Gptq;
use crate::plan::input_scales::InputScales;
use crate::plan::part::Part;
use crate::plan::recipes::Recipes;
use crate::plan::selection::Selection;
use crate::plan::settings::Settings;
use crate::read::checkpoint::{Checkpoint, OpenOptions};

/// Request to quantize a checkpoint.
///
/// [`Self::open`] opens the checkpoint, [`Self::plan`] decides about every tensor, and
/// [`Plan::run`](crate::Plan::run) writes the output:
///
/// ```no_run
/// # use std::{ops::ControlFlow, path::Path};
/// # use microscale::{Device, DeviceChoice};
/// use microscale_checkpoint::{Quantize, Recipes};
///
/// let quantize = Quantize { recipes: Recipes::named("nvfp4")?, ..Quantize::default() };
/// let checkpoint = quantize.open(Path::new("model"))?;
/// let plan = quantize.plan(&checkpoint)?;
/// for warning in &plan.warnings {
///     eprintln!("warning: {warning}");
/// }
/// let device = Device::choose(DeviceChoice::Auto)?;
/// let summary = plan.run(Path::new("OUT"), &device, &mut |_| ControlFlow::Continue(()))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Quantize {
    /// Options for opening the checkpoint.
    pub open: OpenOptions,
    /// Which tensors to quantize, and how.
    pub recipes: Recipes,
    /// Checkpoint format to write. Defaults to the recipes', or else to the default of the
    /// container.
    pub format: Option<CheckpointFormat>,
    /// True to requantize weights that are MXFP4 already, from their values.
    pub requantize: bool,
    /// File of NVFP4 global scales, which are computed otherwise.
    ///
    /// A scale is one F32. It is called `X_global_scale` (a divisor), `X_scale_2` (a multiplier) or
    /// `X`, like its tensor (the direction of the numerics). A scale of the other direction is
    /// inverted, which rounds it. Recipes with a given global scale keep it.
    pub global_scales: Option<PathBuf>,
    /// File of importance per column, for the search of block scales.
    ///
    /// A vector is called `X.importance`, `X_importance` or `X`, like its tensor. It has one float
    /// per column, or one row of them per expert. llama.cpp's importance matrices (imatrix, GGUF or
    /// `.dat`) work, too. Tensors without importance are searched unweighted.
    pub importance: Option<PathBuf>,
    /// Quantizes by GPTQ, with the Hessians of a calibration. Importance is not used then.
    ///
    /// Works for MXFP4 and NVFP4. Tensors without a Hessian are quantized without it.
    pub gptq: Option<Gptq>,
    /// Global scales for quantizing layer inputs.
    ///
    /// They are stored next to every NVFP4 weight, and the config declares quantized inputs.
    pub input_scales: Option<InputScales>,
    /// True to compare each scale that a full search chose with all others. Slow.
    pub check_search: bool,
    /// Number of worst blocks to find in each tensor; `None` collects no details.
    pub worst_blocks: Option<usize>,
    /// Part of the shards to write, into `OUT.parts`; `None` writes the whole output.
    pub part: Option<Part>,
}

impl Quantize {
    /// Creates a request that quantizes the default selection with the same settings.
    pub fn new(settings: Settings) -> Self {
        Self { recipes: Recipes::new(settings, Selection::default()), ..Self::default() }
    }

    /// Opens a checkpoint, after checking the settings that do not depend on it.
    ///
    /// It splits the experts of architectures whose loaders need that for quantized files (Llama
    /// 4), as [`OpenOptions::split_experts`] does.
    ///
    /// # Errors
    /// Errors of [`Recipes::check_settings`] and [`Checkpoint::open_with`].
    pub fn open(&self, path: &Path) -> Result<Checkpoint> {
        self.recipes.check_settings()?;
        let mut checkpoint = Checkpoint::open_with(path, self.open)?;
        if !self.open.split_experts && checkpoint.needs_split_experts() {
            checkpoint.options.split_experts = true;
            checkpoint.split_experts()?;
        }
        Ok(checkpoint)
    }
}
