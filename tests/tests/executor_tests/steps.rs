//! Epilogues of products of weights and activations: launch operands and expected results.

use std::sync::Arc;

use half::f16;
use microscale::{Activation, Dtype, Gate};
use microscale_executor::Argument;
use microscale_kernels_abi::Epilogue;
use microscale_test_support::epilogue::Steps;
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Bound, ExactProducts};

use super::case::{Prepared, argument};

/// Checks the bytes of results against exact sums with an error bound.
type Check = dyn Fn(&[u8], &ExactProducts, &Bound) -> Result<(), String> + Send + Sync;

/// The epilogue of a launch, and the check of its results.
#[derive(Clone)]
pub(super) struct Fused {
    bias: Vec<u8>,
    /// Size of a bias value in bytes.
    bias_bytes: usize,
    residual: Vec<u8>,
    epilogue: Epilogue,
    /// Size of all results and of one result, in bytes.
    pub(super) bytes: [usize; 2],
    check: Arc<Check>,
}

/// The dtypes of bias and results.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dtypes {
    /// The dtype that the kernel multiplies in.
    Same,
    /// Results in f32.
    F32Results,
    /// Both in f16.
    F16,
    /// Both in f32.
    F32,
}

/// The epilogues: bias, gate, residual, and the dtypes of bias and results.
pub(super) const STEPS: [(bool, Option<Gate>, bool, Dtypes); 8] = [
    (true, None, true, Dtypes::Same),
    (true, Some(Gate::GPT_OSS), false, Dtypes::Same),
    (false, Some(Gate::SILU), true, Dtypes::F32Results),
    (false, None, false, Dtypes::F32Results),
    (true, None, true, Dtypes::F32Results),
    (false, Some(Gate::SILU), true, Dtypes::Same),
    (true, Some(Gate::SILU), true, Dtypes::F16),
    (true, None, true, Dtypes::F32),
];

impl Fused {
    /// Draws the operands of epilogue `number`.
    ///
    /// The product has `rows` rows of weights and `tokens` tokens.
    pub(super) fn new<T: Exact + Activation>(number: usize, rows: usize, tokens: usize) -> Self {
        let (.., dtypes) = STEPS[number];
        match dtypes {
            Dtypes::Same => Self::of::<T, T>(T::DTYPE, number, rows, tokens),
            Dtypes::F32Results => Self::of::<T, f32>(T::DTYPE, number, rows, tokens),
            Dtypes::F16 => Self::of::<f16, f16>(T::DTYPE, number, rows, tokens),
            Dtypes::F32 => Self::of::<f32, f32>(T::DTYPE, number, rows, tokens),
        }
    }

    /// Draws the operands of epilogue `number`, with a bias of `T` and results of `O`, for a kernel
    /// that multiplies in a dtype.
    pub(super) fn of<T: Exact + Activation, O: Exact + Activation>(
        multiplied: Dtype,
        number: usize,
        rows: usize,
        tokens: usize,
    ) -> Self {
        let (bias, gate, residual, _) = STEPS[number];
        let steps = Steps::<T, O>::draw(rows, tokens, (bias, gate, residual), number as u64);
        let is = |found: Dtype, dtype: Dtype| found == dtype && found != multiplied;
        let there = [
            (bias, Epilogue::BIAS),
            (gate.is_some(), Epilogue::GATED),
            (residual, Epilogue::RESIDUAL),
            (is(O::DTYPE, Dtype::F32), Epilogue::F32_RESULTS),
            (is(O::DTYPE, Dtype::F16), Epilogue::F16_RESULTS),
            (bias && is(T::DTYPE, Dtype::F32), Epilogue::F32_BIAS),
            (bias && is(T::DTYPE, Dtype::F16), Epilogue::F16_BIAS),
        ];
        Self {
            bias: bytemuck::cast_slice(&steps.bias).to_vec(),
            bias_bytes: size_of::<T>(),
            residual: bytemuck::cast_slice(&steps.residual).to_vec(),
            epilogue: Epilogue {
                steps: there.iter().filter(|(there, _)| *there).map(|(_, step)| step).sum(),
                gate: gate.unwrap_or(Gate::SILU),
            },
            bytes: [steps.results(rows) * tokens * size_of::<O>(), size_of::<O>()],
            check: Arc::new(move |found, exact, bound| {
                let found: Vec<O> = bytemuck::pod_collect_to_vec(found);
                steps.check(exact, bound, rows, &found)
            }),
        }
    }

    /// Checks the bytes of results.
    pub(super) fn check(&self, found: &[u8], exact: &ExactProducts, bound: &Bound) -> Result<(), String> {
        (self.check)(found, exact, bound)
    }

    /// Returns the arguments of a launch: bias and residual, and the epilogue.
    pub(super) fn arguments(fused: Option<&Self>, case: &mut Prepared) -> ([Argument; 2], Argument) {
        let Some(Self { bias, bias_bytes, residual, epilogue, bytes, .. }) = fused else {
            return Self::none();
        };
        let mut operand = |name: &'static str, bytes: &[u8], each: usize| match bytes {
            [] => 0u64.into(),
            _ => case.memory.allocate_from_aligned(name, bytes, each as u64).into(),
        };
        ([operand("bias", bias, *bias_bytes), operand("residual", residual, bytes[1])], argument(epilogue))
    }

    /// Returns the arguments of a launch without an epilogue.
    pub(super) fn none() -> ([Argument; 2], Argument) {
        ([0u64; 2].map(Argument::from), argument(&Epilogue::NONE))
    }
}
