//! Carrying out a plan: as a whole, or in parts.

use std::path::Path;
use std::time::Instant;

use microscale::Device;

use crate::error::Result;
use crate::parts::quantize_part;
use crate::plan::Plan;
use crate::progress::OnProgress;
use crate::quantize::Quantizer;
use crate::quantize::summary::Summary;
use crate::write::rewrite::rewrite;

impl Plan<'_> {
    /// Writes the quantized checkpoint to `out`, a file or a directory like the input, or the
    /// plan's part of the shards to `OUT.parts`.
    ///
    /// A few tensors are in memory at a time. Output is written under a temporary name next to
    /// `out` and renamed at the end. A failure or an interruption removes it.
    /// Every device, or several of them, gives the same bytes.
    ///
    /// # Errors
    /// [`PlanError::NothingToQuantize`](crate::PlanError::NothingToQuantize),
    /// [`Error::Tensor`](crate::Error::Tensor) (among them non-finite values, if the recipe refuses
    /// them), and everything about writing.
    pub fn run(&self, out: &Path, device: &Device, progress: &mut OnProgress<'_>) -> Result<Summary> {
        if let Some(part) = self.part {
            return quantize_part(self, part, out, device, progress);
        }
        let start = Instant::now();
        let work = Quantizer::new(self)?;
        let (tensors, skipped) = rewrite(self.checkpoint(), out, &work, device, progress)?;
        Ok(work.summary(device, tensors, skipped, start))
    }
}
