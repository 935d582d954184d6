//! The epilogue of a product on a GPU.

use std::fmt;

use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::Gate;
use microscale_kernels_abi::Epilogue;

use crate::element::{Dtype, Element};
use crate::error::{Error, OperandFault, Result};
use crate::gpu::launch::arguments::{Argument, Steps};
use crate::gpu::memory::view::DeviceView;
use crate::shape::Shape;

/// The epilogue of a product: bias, gate, residual, then one rounding to `O`.
///
/// `T` is the activations' dtype. By default there is only the rounding.
///
/// All steps are computed in f32 or finer, so results are rounded once. Separate operations would
/// round each time.
pub struct DeviceEpilogue<'a, T, O> {
    /// One value per row of weights: `[M]`, or `[experts, M]`.
    pub bias: Option<DeviceView<'a, T>>,
    /// A gate: two rows of weights give one result. The even row gates the odd row after it.
    ///
    /// [`crate::interleave_rows`] makes such weights from two matrices.
    pub gate: Option<Gate>,
    /// Values to add to the results, in the same order: `[N, M]`, or `[N, M / 2]` after a gate.
    pub residual: Option<DeviceView<'a, O>>,
}

impl<T, O> Default for DeviceEpilogue<'_, T, O> {
    fn default() -> Self {
        Self { bias: None, gate: None, residual: None }
    }
}

impl<T, O> Clone for DeviceEpilogue<'_, T, O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, O> Copy for DeviceEpilogue<'_, T, O> {}

/// Shows the steps.
impl<T, O> fmt::Debug for DeviceEpilogue<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut epilogue = f.debug_struct("DeviceEpilogue");
        epilogue.field("bias", &self.bias.is_some()).field("gate", &self.gate);
        epilogue.field("residual", &self.residual.is_some()).finish()
    }
}

impl<'a, T: Element, O: Element> DeviceEpilogue<'a, T, O> {
    /// Checks the operands, and returns the results per token.
    ///
    /// The product has `tokens` tokens and `experts` experts with `rows` rows of weights each;
    /// every expert has its own bias.
    ///
    /// # Errors
    /// [`OperandFault::Gate`] if a gate has an odd number of rows, and [`Error::Length`] if the
    /// bias or the residual is too short.
    pub(in crate::gpu) fn check(&self, rows: usize, experts: usize, tokens: usize) -> Result<usize> {
        if self.gate.is_some() && !rows.is_multiple_of(2) {
            return Err(Error::Operands(OperandFault::Gate { rows }));
        }
        let results = if self.gate.is_some() { rows / 2 } else { rows };
        if let Some(bias) = self.bias {
            Shape::new(experts, rows).check("the bias", bias.len())?;
        }
        if let Some(residual) = self.residual {
            Shape::new(tokens, results).check("the residual", residual.len())?;
        }
        Ok(results)
    }

    /// The arguments of kernels that multiply in a dtype, and guards of the operands.
    ///
    /// The work on `stream` is enqueued before the guards are dropped.
    pub(in crate::gpu) fn read(
        &self,
        stream: &'a CudaStream,
        multiplied: Dtype,
    ) -> Result<(Steps, [Option<SyncOnDrop<'a>>; 2])> {
        let mut steps = 0;
        let (mut bias, mut reading_bias) = (0, None);
        if let Some(view) = self.bias {
            let (address, guard) = view.read(stream, "the bias", 1)?;
            (bias, reading_bias) = (address, Some(guard));
            steps |= Epilogue::BIAS;
            steps |= other_dtype(T::DTYPE, multiplied, [Epilogue::F32_BIAS, Epilogue::F16_BIAS]);
        }
        let (mut residual, mut reading_residual) = (0, None);
        if let Some(view) = self.residual {
            let (address, guard) = view.read(stream, "the residual", 1)?;
            (residual, reading_residual) = (address, Some(guard));
            steps |= Epilogue::RESIDUAL;
        }
        if self.gate.is_some() {
            steps |= Epilogue::GATED;
        }
        steps |= other_dtype(O::DTYPE, multiplied, [Epilogue::F32_RESULTS, Epilogue::F16_RESULTS]);
        let epilogue = Argument(Epilogue { steps, gate: self.gate.unwrap_or(Gate::SILU) });
        Ok((Steps { bias, residual, epilogue }, [reading_bias, reading_residual]))
    }
}

/// The step for values of a dtype that kernels do not multiply in: one for f32 and one for f16.
/// Kernels that multiply in f16 have no values in bf16.
fn other_dtype(dtype: Dtype, multiplied: Dtype, [of_f32, of_f16]: [u32; 2]) -> u32 {
    match dtype {
        _ if dtype == multiplied => 0,
        Dtype::F32 => of_f32,
        _ => of_f16,
    }
}
