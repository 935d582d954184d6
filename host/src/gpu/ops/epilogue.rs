//! What follows a product on a GPU before its results are stored.

use std::fmt;

use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::Gate;
use microscale_kernels_abi::Epilogue;

use crate::element::{Dtype, Element};
use crate::error::{Error, OperandFault, Result};
use crate::gpu::launch::arguments::{Argument, Steps};
use crate::gpu::memory::view::DeviceView;
use crate::shape::Shape;

/// What follows a product before its results, in `O`, are stored: first a bias, then a gate, then a residual, at last one rounding.
/// `T` is the activations' dtype. The default is nothing but the rounding.
///
/// All of it is computed in f32 or finer, so that results are rounded once where separate operations would round each time.
pub struct DeviceEpilogue<'a, T, O> {
    /// A value for each row of weights, `[M]`, or `[experts, M]`.
    pub bias: Option<DeviceView<'a, T>>,
    /// A gate: one result of those of two rows of weights, an even one, which is the gate, and the one behind, which is what it lets
    /// through. [`crate::interleave_rows`] makes such weights of two.
    pub gate: Option<Gate>,
    /// Values to add, as many as results and in their places: `[N, M]`, or `[N, M / 2]` behind a gate.
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

/// Shows which steps there are.
impl<T, O> fmt::Debug for DeviceEpilogue<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut epilogue = f.debug_struct("DeviceEpilogue");
        epilogue.field("bias", &self.bias.is_some()).field("gate", &self.gate);
        epilogue.field("residual", &self.residual.is_some()).finish()
    }
}

impl<'a, T: Element, O: Element> DeviceEpilogue<'a, T, O> {
    /// Checks the operands against so many results of weights with as many rows, of which an expert each has a bias; returns the
    /// results of a token.
    ///
    /// # Errors
    /// [`OperandFault::Gate`] if a gate has an odd number of rows, and those of lengths.
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

    /// The arguments of kernels, and guards of what they read, for work on a stream that is enqueued before these are dropped.
    pub(in crate::gpu) fn read(
        &self,
        stream: &'a CudaStream,
    ) -> Result<(Steps, [Option<SyncOnDrop<'a>>; 2])> {
        let mut steps = 0;
        let (mut bias, mut reading_bias) = (0, None);
        if let Some(view) = self.bias {
            let (address, guard) = view.read(stream, "the bias", 1)?;
            (bias, reading_bias) = (address, Some(guard));
            steps |= Epilogue::BIAS;
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
        if O::DTYPE == Dtype::F32 {
            steps |= Epilogue::F32_RESULTS;
        }
        let epilogue = Argument(Epilogue { steps, gate: self.gate.unwrap_or(Gate::SILU) });
        Ok((Steps { bias, residual, epilogue }, [reading_bias, reading_residual]))
    }
}
