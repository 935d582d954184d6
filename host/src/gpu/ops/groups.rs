//! Products of groups, each with weights and tokens of its own sizes, planned and run together.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, OperandFault};
use crate::gemv::{Activation, ProductOf};
use crate::gpu::handle::Gpu;
use crate::gpu::memory::view::DeviceView;
use crate::gpu::memory::workspace::GemmWorkspaceMut;
use crate::gpu::ops::linear::{Fp4, Fp8, Linear, Plan, Values};
use crate::gpu::ops::linear_activations::{Fp4Activations, Fp8Activations};
use crate::gpu::ops::results::DeviceResults;
use crate::shape::Shape;

/// Plans of products that run one after the other in one workspace: a grouped GEMM whose groups
/// differ in M, N and K.
///
/// Made by [`Gpu::linear_groups`].
pub struct GroupsPlan<'a, T, O, K = Values> {
    plans: Vec<Plan<'a, T, O, K>>,
}

/// Shows the plans.
impl<T, O, K> fmt::Debug for GroupsPlan<'_, T, O, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.plans).finish()
    }
}

impl Gpu {
    /// Plans products of groups: for each a [`Linear`] with its epilogue, and its number of tokens.
    ///
    /// Each group has launches of its own, which use the whole GPU: thread blocks share the K of
    /// groups with few work tiles. A launch overlaps the last work tiles of the one before it on
    /// GPUs from compute capability 9.0 on. Groups of one shape take less time as experts, whose
    /// rows are multiplied by one launch: [`Self::linear_experts`].
    ///
    /// ```no_run
    /// # use half::f16;
    /// # use microscale::Result;
    /// # use microscale::gpu::cudarc::driver::CudaSlice;
    /// # use microscale::gpu::{DeviceTensor, GemmWorkspace, Gpu};
    /// # fn forward(
    /// #     gpu: &Gpu,
    /// #     weights: &[DeviceTensor],
    /// #     x: &[DeviceTensor],
    /// #     y: &mut [CudaSlice<f16>],
    /// # ) -> Result<()> {
    /// let stream = gpu.stream();
    /// let groups = weights.iter().zip(x).map(|(weights, x)| {
    ///     (gpu.linear_fp4::<f16, f16>(weights), x.shape().rows)
    /// });
    /// let plan = gpu.linear_groups(groups)?;
    /// let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes())?;
    /// plan.run(stream, x, &mut workspace, y)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Linear::plan`].
    pub fn linear_groups<'a, T: Activation, O: ProductOf<T>, K>(
        &'a self,
        groups: impl IntoIterator<Item = (Linear<'a, T, O, K>, usize)>,
    ) -> Result<GroupsPlan<'a, T, O, K>> {
        let plans = groups.into_iter().map(|(linear, rows)| linear.plan(rows));
        Ok(GroupsPlan { plans: plans.collect::<Result<_>>()? })
    }
}

impl<'a, T, O, K> GroupsPlan<'a, T, O, K> {
    /// Bytes of workspace for `run`, which the groups use one after the other; 0 if they need none.
    pub fn workspace_bytes(&self) -> usize {
        self.plans.iter().map(Plan::workspace_bytes).max().unwrap_or(0)
    }

    /// The plan of each group.
    pub fn plans(&self) -> &[Plan<'a, T, O, K>] {
        &self.plans
    }

    /// Checks that there is an operand for each group.
    fn check(&self, activations: usize, out: usize) -> Result<()> {
        let groups = Shape::new(self.plans.len(), 1);
        groups.check("the groups of activations", activations)?;
        groups.check("the groups of outputs", out)
    }
}

/// Implements `run` for a kind of activations.
macro_rules! run {
    ($kind:ident, $x:ty) => {
        impl<T: Activation, O: ProductOf<T>> GroupsPlan<'_, T, O, $kind> {
            /// Enqueues the kernels of all groups and returns. Does not wait, and allocates
            /// nothing.
            ///
            /// Activations and outputs are in the order of the groups, and each is as for `run` of
            /// the group's [`Plan`], with the same results.
            ///
            /// # Errors
            /// [`Error::Length`] if there are fewer operands than groups,
            /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
            /// and the errors of a group's `run`. The groups before that group are enqueued.
            pub fn run<'x, 's, 'o, X, Y>(
                &self,
                stream: &Arc<CudaStream>,
                activations: impl IntoIterator<Item = X, IntoIter: ExactSizeIterator>,
                workspace: impl Into<GemmWorkspaceMut<'s>>,
                out: impl IntoIterator<Item = Y, IntoIter: ExactSizeIterator>,
            ) -> Result<()>
            where
                X: Into<$x>,
                Y: Into<DeviceResults<'o, O>>,
            {
                let (activations, out) = (activations.into_iter(), out.into_iter());
                let mut workspace = workspace.into();
                self.check(activations.len(), out.len())?;
                for (plan, (x, out)) in self.plans.iter().zip(activations.zip(out)) {
                    let x: $x = x.into();
                    plan.run(stream, x, &mut workspace, out)?;
                }
                Ok(())
            }
        }
    };
}

run!(Values, DeviceView<'x, T>);
run!(Fp4, Fp4Activations<'x>);
run!(Fp8, Fp8Activations<'x, T>);
