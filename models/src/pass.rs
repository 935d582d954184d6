//! Windows of a text on their way through a model, one decoder layer in memory at a time.

use std::fmt;

use candle_core::{DType, Device, Tensor};

use crate::config::Config;
use crate::decoder::DecoderLayer;
use crate::error::Result;
use crate::model::{embedded, prefix};
use crate::rows::{Rotations, Rows};
use crate::source::Source;
use crate::text::Window;

/// Tokens of a batch, at least one window.
const BATCH: usize = 4096;

/// Hidden states of all windows, in batches.
pub(crate) struct Pass {
    batches: Vec<Batch>,
    rotations: Rotations,
    /// What precedes the names of the layers' tensors.
    prefix: &'static str,
    next: usize,
}

/// Consecutive windows.
pub(crate) struct Batch {
    /// `[tokens, hidden]`.
    pub(crate) hidden: Tensor,
    /// Tokens of each window.
    pub(crate) lengths: Vec<usize>,
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass").field("next", &self.next).finish_non_exhaustive()
    }
}

/// Groups windows into batches, and returns the number of tokens of each window.
pub(crate) fn batches(windows: &[Window]) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut tokens = BATCH;
    for length in windows.iter().map(|window| window.inputs.len()) {
        match batches.last_mut() {
            Some(batch) if tokens + length <= BATCH => batch.push(length),
            _ => {
                batches.push(vec![length]);
                tokens = 0;
            }
        }
        tokens += length;
    }
    batches
}

impl Pass {
    /// Embeds the windows. Hidden states have dtype `dtype`, f32 or bf16.
    pub(crate) fn new(
        source: &dyn Source,
        config: &Config,
        windows: &[Window],
        dtype: DType,
    ) -> Result<Self> {
        let tokens: Vec<u32> = windows.iter().flat_map(|window| &window.inputs).copied().collect();
        let all = embedded(source, config, &tokens, dtype)?;
        let mut start = 0;
        let batches = batches(windows).into_iter().map(|lengths| {
            let count = lengths.iter().sum();
            let hidden = all.narrow(0, start, count)?;
            start += count;
            Ok(Batch { hidden, lengths })
        });
        let batches = batches.collect::<Result<_>>()?;
        Self::resumed(source, config, batches, 0)
    }

    /// Goes on with hidden states before layer `next`.
    pub(crate) fn resumed(
        source: &dyn Source,
        config: &Config,
        batches: Vec<Batch>,
        next: usize,
    ) -> Result<Self> {
        let longest = batches.iter().flat_map(|batch| &batch.lengths).copied().max().unwrap_or(0);
        let device = batches.first().map_or(&Device::Cpu, |batch| batch.hidden.device());
        let rotations = Rotations::new(config, longest, device)?;
        Ok(Self { rotations, prefix: prefix(source)?, batches, next })
    }

    /// Loads the next layer and applies it. `after` is called after each batch.
    pub(crate) fn advance(
        &mut self,
        source: &dyn Source,
        config: &Config,
        mut after: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let layer = DecoderLayer::load(source, self.prefix, self.next, config)?;
        for batch in &mut self.batches {
            let rows = Rows::new(&batch.lengths, &self.rotations);
            batch.hidden = layer.forward(&batch.hidden, &rows, None)?;
            after()?;
        }
        self.next += 1;
        Ok(())
    }

    /// Returns the number of the next layer.
    pub(crate) fn next_layer(&self) -> usize {
        self.next
    }

    pub(crate) fn batches(&self) -> &[Batch] {
        &self.batches
    }
}
