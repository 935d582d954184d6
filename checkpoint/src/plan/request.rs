//! A request to quantize a checkpoint: everything that decides the output's bytes.

use std::path::{Path, PathBuf};

use crate::checkpoint_format::CheckpointFormat;
use crate::error::Result;
use crate::parts::part::Part;
use crate::plan::input_scales::InputScales;
use crate::plan::recipes::Recipes;
use crate::plan::selection::Selection;
use crate::plan::settings::Settings;
use crate::read::checkpoint::{Checkpoint, OpenOptions};

/// A request to quantize a checkpoint.
///
/// [`Self::open`] opens the checkpoint, [`Self::plan`] decides about every tensor, and
/// [`Plan::run`](crate::Plan::run) writes:
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
    /// How the checkpoint is opened.
    pub open: OpenOptions,
    /// Which tensors are quantized, and how.
    pub recipes: Recipes,
    /// The checkpoint format to write. By default the recipes' format, or else the one of the
    /// input's container.
    pub format: Option<CheckpointFormat>,
    /// Also quantizes weights that are in MXFP4 already, from their values.
    pub requantize: bool,
    /// A file of NVFP4's global scales, which are computed otherwise.
    ///
    /// A scale is called `X_global_scale` (a divisor), `X_scale_2` (a multiplier) or X, like its
    /// tensor (the direction of the numerics), and is one F32. A scale of the other direction is
    /// inverted, which rounds it. Recipes that give a global scale keep it.
    pub global_scales: Option<PathBuf>,
    /// A file of importance by column, for the search of block scales.
    ///
    /// A vector is called `X.importance`, `X_importance` or X, like its tensor, and has a float for
    /// each column, or one row of them for each expert. llama.cpp's importance matrices (imatrix,
    /// GGUF or `.dat`) are such files too. Tensors without one are searched unweighted.
    pub importance: Option<PathBuf>,
    /// The scales with which layers' inputs are quantized. Every weight in NVFP4 is stored with
    /// the scale of its inputs, and the config declares quantized inputs.
    pub input_scales: Option<InputScales>,
    /// Compares each scale that a full search chose with all others, slowly.
    pub check_search: bool,
    /// The number of worst blocks to look for in each tensor, if details are wanted.
    pub worst_blocks: Option<usize>,
    /// The part of the shards to make, into `OUT.parts`; without one the whole output is written.
    pub part: Option<Part>,
}

impl Quantize {
    /// A request to quantize all tensors that are selected by default with the same settings.
    pub fn new(settings: Settings) -> Self {
        Self { recipes: Recipes::new(settings, Selection::default()), ..Self::default() }
    }

    /// Opens a checkpoint, after a check of the settings that do not depend on it.
    ///
    /// # Errors
    /// The errors of [`Recipes::check_settings`] and [`Checkpoint::open_with`].
    pub fn open(&self, path: &Path) -> Result<Checkpoint> {
        self.recipes.check_settings()?;
        Checkpoint::open_with(path, self.open)
    }
}
