//! Products of experts' quantized weights and rows of activations.

use rayon::prelude::*;

use super::gemm_int8::gemm_weights_int8_with;
use super::gemm_weights::gemm_weights_with;
use super::isa::Isa;
use crate::error::Result;
use crate::experts::{ExpertRows, check_pairs, shape_of};
use crate::gemv::Activation;
use crate::rounding::ActivationRounding;
use crate::view::QuantizedView;

/// Multiplies rows of activations by the weights of their experts, on the CPU.
///
/// For each pair of a token and one of its experts, this computes `out[row, m] = Σₖ
/// experts[expert][m, k] · activations[row, k]`, with block scales and the expert's global scale.
/// [`ExpertRows`] says which rows these are.
///
/// `experts` are matrices `[M, K]` of one shape in NVFP4 or MXFP4, each with linear scales and a
/// global scale. `chosen` is `[tokens, top_k]`, the experts of each token. If a number in `chosen`
/// is not an expert's index, the pair is skipped and its results are left as they are.
/// `activations` is `[tokens, K]`, or `[pairs, K]` if each pair has its own row, and `out` is
/// `[pairs, M]`, both without gaps.
///
/// An expert's weights are decoded once for up to 256 of its tokens. Weights of experts without
/// tokens are not read. The results have the bits of [`gemm_weights`](crate::gemm_weights()) of an
/// expert and all of its tokens together, in the order of `chosen`.
///
/// ```
/// use microscale::{Numerics, ExpertRows, Format, Recipe, Shape, gemm_experts, quantize};
///
/// let recipe = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors).unwrap();
/// let expert = |value: f32| quantize(&[value; 2 * 16], Shape::new(2, 16), &recipe);
/// let experts = [expert(1.0)?.tensor, expert(2.0)?.tensor, expert(4.0)?.tensor];
/// // The first token goes to experts 2 and 0, the second one to 0 and 1.
/// let (x, chosen) = ([1f32; 2 * 16], [2, 0, 0, 1]);
/// let mut out = [0f32; 4 * 2];
/// gemm_experts(&experts, &x, &chosen, 2, ExpertRows::Indexed, &mut out)?;
/// assert_eq!(out, [64.0, 64.0, 16.0, 16.0, 16.0, 16.0, 32.0, 32.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// [`crate::Error::Operands`] if there are no experts, if they differ in format or shape, if their
/// format or scale layout is not supported, or if `chosen` does not have whole tokens.
/// [`crate::Error::Length`] if `activations` or `out` have too few elements.
pub fn gemm_experts<'a, T: Activation>(
    experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    activations: &[T],
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    let how = (Isa::best(), ActivationRounding::Exact);
    gemm_experts_with(how, experts, activations, chosen, top_k, rows, out)
}

/// [`gemm_experts`] with activations that it rounds to INT8.
///
/// The results have the bits of [`gemm_weights_int8`](crate::gemm_weights_int8()).
///
/// # Errors
///
/// The errors of [`gemm_experts`].
pub fn gemm_experts_int8<'a, T: Activation>(
    experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    activations: &[T],
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    let how = (Isa::best(), ActivationRounding::Int8);
    gemm_experts_with(how, experts, activations, chosen, top_k, rows, out)
}

/// [`gemm_experts`] with a given instruction set and rounding of activations, for tests and
/// comparisons.
///
/// # Errors
///
/// The errors of [`gemm_experts`].
pub fn gemm_experts_with<'a, T: Activation>(
    how: (Isa, ActivationRounding),
    experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    activations: &[T],
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    let experts: Vec<QuantizedView<'a>> = experts.into_iter().map(Into::into).collect();
    let shape = shape_of(&experts)?;
    check_pairs(chosen.len(), top_k)?;
    rows.check(shape, [chosen.len(), top_k], activations.len(), out.len())?;
    let shares = shares(&experts, shape.rows, (chosen, top_k), rows, out);
    // The rows of an expert are tasks too, if there are enough.
    shares.into_par_iter().try_for_each(|share| share.multiply(how, activations))
}

/// The part of a product that belongs to one expert: its weights, and its rows of activations and
/// of results.
pub(super) struct Share<'o, W, T> {
    pub(super) weights: W,
    /// The number of each row of activations.
    pub(super) inputs: Vec<usize>,
    pub(super) outputs: Vec<&'o mut [T]>,
}

/// Returns the share of each expert that has rows, for checked operands of a product with `results`
/// results per row.
pub(super) fn shares<'o, W: Copy, T>(
    experts: &[W],
    results: usize,
    (chosen, top_k): (&[u32], usize),
    rows: ExpertRows,
    out: &'o mut [T],
) -> Vec<Share<'o, W, T>> {
    if results == 0 {
        return Vec::new();
    }
    let mut places: Vec<_> = out.chunks_exact_mut(results).map(Some).collect();
    let mut sorted = 0;
    let shares = by_expert(chosen, experts.len()).into_iter().zip(experts);
    let shares = shares.filter(|(pairs, _)| !pairs.is_empty()).map(|(pairs, weights)| {
        let first = sorted;
        sorted += pairs.len();
        let of_pair = |(sorted, pair): (usize, &usize)| {
            let place = if rows.sort_results() { sorted } else { *pair };
            Some((rows.activations_of(*pair, sorted, top_k), places[place].take()?))
        };
        let (inputs, outputs) = (first..).zip(&pairs).filter_map(of_pair).unzip();
        Share { weights: *weights, inputs, outputs }
    });
    shares.collect()
}

/// The pairs of each expert, in order.
fn by_expert(chosen: &[u32], experts: usize) -> Vec<Vec<usize>> {
    let mut pairs = vec![Vec::new(); experts];
    for (pair, expert) in chosen.iter().enumerate() {
        if let Some(pairs) = pairs.get_mut(*expert as usize) {
            pairs.push(pair);
        }
    }
    pairs
}

impl<T: Activation> Share<'_, QuantizedView<'_>, T> {
    fn multiply(self, (isa, rounding): (Isa, ActivationRounding), activations: &[T]) -> Result<()> {
        let Self { weights, inputs, mut outputs } = self;
        let multiply = |x: &[T], tokens: usize, out: &mut [T]| match rounding {
            ActivationRounding::Exact => gemm_weights_with(isa, weights, x, tokens, out),
            ActivationRounding::Int8 => gemm_weights_int8_with(isa, weights, x, tokens, out),
        };
        let input = |row: &usize| &activations[row * weights.cols()..][..weights.cols()];
        if let ([row], [output]) = (&inputs[..], &mut outputs[..]) {
            return multiply(input(row), 1, output);
        }
        let (tokens, rows) = (inputs.len(), weights.rows());
        let mut products = vec![T::default(); tokens * rows];
        multiply(&inputs.iter().map(input).collect::<Vec<_>>().concat(), tokens, &mut products)?;
        for (output, products) in outputs.iter_mut().zip(products.chunks_exact(rows)) {
            output.copy_from_slice(products);
        }
        Ok(())
    }
}
