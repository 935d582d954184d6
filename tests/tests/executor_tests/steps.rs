//! What follows products of weights and activations: operands of the launches, and what is expected of their results.

use std::sync::Arc;

use microscale::{Activation, Dtype, Gate};
use microscale_executor::Argument;
use microscale_kernels_abi::Epilogue;
use microscale_test_support::epilogue::Steps;
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Bound, ExactProducts};

use super::case::{Prepared, argument};

/// A check of the bytes of results against exact sums, and how far off these may be.
type Check = dyn Fn(&[u8], &ExactProducts, &Bound) -> Result<(), String> + Send + Sync;

/// The steps of a launch, and the check of results in bytes.
#[derive(Clone)]
pub(super) struct Fused {
    bias: Vec<u8>,
    /// Bytes of a bias.
    bias_bytes: usize,
    residual: Vec<u8>,
    epilogue: Epilogue,
    /// Bytes of all results, and of one.
    pub(super) bytes: [usize; 2],
    check: Arc<Check>,
}

/// Which steps there are: a bias, a gate, a residual; and whether results are in f32.
pub(super) const STEPS: [(bool, Option<Gate>, bool, bool); 6] = [
    (true, None, true, false),
    (true, Some(Gate::GPT_OSS), false, false),
    (false, Some(Gate::SILU), true, true),
    (false, None, false, true),
    (true, None, true, true),
    (false, Some(Gate::SILU), true, false),
];

impl Fused {
    /// Draws the operands of steps with this number, behind a product with so many rows of weights and tokens.
    pub(super) fn new<T: Exact + Activation>(number: usize, rows: usize, tokens: usize) -> Self {
        match STEPS[number] {
            (.., true) => Self::of::<T, f32>(number, rows, tokens),
            _ => Self::of::<T, T>(number, rows, tokens),
        }
    }

    pub(super) fn of<T: Exact + Activation, O: Exact + Activation>(
        number: usize,
        rows: usize,
        tokens: usize,
    ) -> Self {
        let (bias, gate, residual, _) = STEPS[number];
        let steps = Steps::<T, O>::draw(rows, tokens, (bias, gate, residual), number as u64);
        let there = [
            (bias, Epilogue::BIAS),
            (gate.is_some(), Epilogue::GATED),
            (residual, Epilogue::RESIDUAL),
            (O::DTYPE == Dtype::F32, Epilogue::F32_RESULTS),
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

    /// The arguments of a launch: bias and residual; and the steps.
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

    /// The arguments of a launch without steps.
    pub(super) fn none() -> ([Argument; 2], Argument) {
        ([0u64; 2].map(Argument::from), argument(&Epilogue::NONE))
    }
}
