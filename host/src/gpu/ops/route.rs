//! Pairs of a token and an expert: sorting them, and their rows.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::{Error, OperandFault, Result};
use crate::experts::{ExpertRows, check_pairs};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::memory::experts::DeviceRouting;
use crate::gpu::memory::view::DeviceView;

/// Checks that a routing is of this number of experts and of sorted pairs.
pub(in crate::gpu) fn check_routing(routing: &DeviceRouting, experts: usize, pairs: usize) -> Result<()> {
    if routing.experts == experts && routing.pairs == pairs {
        return Ok(());
    }
    let DeviceRouting { experts, pairs, .. } = *routing;
    Err(Error::Operands(OperandFault::Routing { experts, pairs }))
}

/// The addresses of the lists of rows of activations and of results, given a routing's lists of
/// tokens and of pairs; 0 for rows in sorted order.
pub(in crate::gpu) const fn lists(rows: ExpertRows, [tokens, order]: [u64; 2]) -> [u64; 2] {
    match rows {
        ExpertRows::Gathered => [tokens, 0],
        ExpertRows::Sorted => [0, 0],
        ExpertRows::Scattered => [0, order],
        ExpertRows::Indexed => [tokens, order],
        ExpertRows::Paired => [order, order],
    }
}

impl Gpu {
    /// Sorts pairs of a token and an expert by expert, for [`Self::linear_experts`]. `chosen` is
    /// `[tokens, top_k]`, the experts of each token. Numbers outside of the experts, as of experts
    /// on another GPU, leave their pairs out. Enqueues one kernel and returns; allocates nothing
    /// and does not wait.
    ///
    /// Captured, it sorts when the graph runs. A product that runs before that does nothing, unless
    /// the same number of pairs and tokens was sorted before.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if `routing` has room for fewer pairs, [`OperandFault::TopK`] if
    /// `chosen` is not of whole tokens, and [`Error::Gpu`].
    pub fn route_on<'a>(
        &self,
        stream: &Arc<CudaStream>,
        chosen: impl Into<DeviceView<'a, u32>>,
        top_k: usize,
        routing: &mut DeviceRouting,
    ) -> Result<()> {
        let chosen = chosen.into();
        let pairs = chosen.len();
        if pairs > routing.room {
            let DeviceRouting { experts, room, .. } = *routing;
            return Err(Error::Operands(OperandFault::Routing { experts, pairs: room }));
        }
        check_pairs(pairs, top_k)?;
        launch::route(&self.kernels, stream, chosen, top_k, routing)?;
        (routing.pairs, routing.top_k) = (pairs, top_k);
        Ok(())
    }
}
