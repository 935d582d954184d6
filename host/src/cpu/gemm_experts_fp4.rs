//! Products of experts' weights and rows of activations, both in FP4.

use microscale_formats::Gate;
use rayon::prelude::*;

use super::gemm_experts::{Share, shares};
use super::gemm_fp4::{gated, multiply};
use super::isa::Isa;
use crate::cpu::products::rows::Rows;
use crate::error::Result;
use crate::experts::ExpertRows;
use crate::fp4::{Fp4Rows, Fp4Weights, check_experts};
use crate::gemv::Activation;
use crate::shape::QuantizedShape;
use crate::view::QuantizedView;

/// Multiplies rows of quantized activations by the weights of their experts, both in NVFP4 or both
/// in MXFP4, on the CPU.
///
/// For each pair of a token and one of its experts, this computes what
/// [`gemm_fp4`](crate::gemm_fp4()) does for a token, with its bits. [`ExpertRows`] says which rows
/// of activations and of results belong to a pair.
///
/// `experts` are matrices `[M, K]` of one shape and format, each with its own global scale, alpha
/// and bias. `chosen` is `[tokens, top_k]`, the experts of each token. If a number in `chosen` is
/// not an expert's index, the pair is skipped and its results are left as they are. `activations`
/// is `[tokens, K]`, or `[pairs, K]` if each pair has its own row, with one global scale, [one per
/// expert](Fp4Rows::global_scales) or [one per row](Fp4Rows::token_scales). `out` is `[pairs, M]`,
/// without gaps. Scales may be linear or swizzled.
///
/// ```
/// use microscale::{ExpertRows, Recipe, Shape, gemm_experts_fp4, quantize};
///
/// let recipe = Recipe::default(); // MXFP4
/// let expert = |value: f32| quantize(&[value; 32], Shape::new(1, 32), &recipe);
/// let experts = [expert(1.0)?.tensor, expert(2.0)?.tensor];
/// // The first token goes to both experts, the second one to expert 1 twice.
/// let x = quantize(&[1f32; 2 * 32], Shape::new(2, 32), &recipe)?.tensor;
/// let mut out = [0f32; 4];
/// gemm_experts_fp4(&experts, &x, &[0, 1, 1, 1], 2, ExpertRows::Indexed, &mut out)?;
/// assert_eq!(out, [32.0, 64.0, 64.0, 64.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// A batched product, `[batch, N, K]` times `[batch, M, K]`, has an expert per matrix and N rows of
/// each:
///
/// ```
/// # use microscale::{ExpertRows, Recipe, Shape, gemm_experts_fp4, quantize};
/// # let recipe = Recipe::default();
/// # let matrix = |value: f32| quantize(&[value; 32], Shape::new(1, 32), &recipe);
/// # let weights = [matrix(1.0)?.tensor, matrix(2.0)?.tensor];
/// # let x = quantize(&[1f32; 2 * 3 * 32], Shape::new(2 * 3, 32), &recipe)?.tensor;
/// let (batch, tokens) = (2, 3);
/// let matrices: Vec<u32> = (0..batch).flat_map(|matrix| vec![matrix; tokens]).collect();
/// let mut out = [0f32; 2 * 3];
/// gemm_experts_fp4(&weights, &x, &matrices, 1, ExpertRows::Sorted, &mut out)?;
/// assert_eq!(out, [32.0, 32.0, 32.0, 64.0, 64.0, 64.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// The errors of [`gemm_fp4`](crate::gemm_fp4()), [`crate::Error::Operands`] if there are no
/// experts, if they differ in shape, or if `chosen` does not have whole tokens,
/// [`crate::Error::Length`] if there are too few rows of activations or global scales, and
/// [`crate::Error::GlobalScale`] for global scales out of range.
pub fn gemm_experts_fp4<'a, 'b, T: Activation>(
    experts: impl IntoIterator<Item = impl Into<Fp4Weights<'a>>>,
    activations: impl Into<Fp4Rows<'b>>,
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    gemm_experts_fp4_with(Isa::best(), experts, activations, chosen, top_k, rows, out)
}

/// [`gemm_experts_fp4`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_experts_fp4`].
pub fn gemm_experts_fp4_with<'a, 'b, T: Activation>(
    isa: Isa,
    experts: impl IntoIterator<Item = impl Into<Fp4Weights<'a>>>,
    activations: impl Into<Fp4Rows<'b>>,
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    let experts: Vec<_> = experts.into_iter().map(|weights| [weights.into()]).collect();
    of_experts(isa, &experts, activations.into(), (chosen, top_k), rows, out, |[y]| y)
}

/// [`gemm_experts_fp4`] of two matrices per expert, whose results a gate combines.
///
/// `experts` are pairs of gate and up. [`gemm_fp4_gated`](crate::gemm_fp4_gated()) defines the
/// results of a token.
///
/// # Errors
///
/// The errors of [`gemm_experts_fp4`], and [`crate::OperandFault::GateRows`] if gate and up differ
/// in rows.
pub fn gemm_experts_fp4_gated<'a, 'b, T: Activation>(
    experts: impl IntoIterator<Item = [Fp4Weights<'a>; 2]>,
    activations: impl Into<Fp4Rows<'b>>,
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    by: Gate,
    out: &mut [T],
) -> Result<()> {
    gemm_experts_fp4_gated_with((Isa::best(), by), experts, activations, chosen, top_k, rows, out)
}

/// [`gemm_experts_fp4_gated`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_experts_fp4_gated`].
pub fn gemm_experts_fp4_gated_with<'a, 'b, T: Activation>(
    (isa, by): (Isa, Gate),
    experts: impl IntoIterator<Item = [Fp4Weights<'a>; 2]>,
    activations: impl Into<Fp4Rows<'b>>,
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    let experts: Vec<_> = experts.into_iter().collect();
    of_experts(isa, &experts, activations.into(), (chosen, top_k), rows, out, gated(by))
}

/// Multiplies rows by `N` matrices per expert, and combines the `N` results.
fn of_experts<T: Activation, const N: usize>(
    isa: Isa,
    experts: &[[Fp4Weights<'_>; N]],
    activations: Fp4Rows<'_>,
    (chosen, top_k): (&[u32], usize),
    rows: ExpertRows,
    out: &mut [T],
    combined: impl Fn([f64; N]) -> f64 + Sync,
) -> Result<()> {
    let pairs = (chosen.len(), top_k);
    let (results, views) = check_experts(activations, experts, pairs, rows, out.len())?;
    let scales = activations.view.linear_scales();
    let all: Vec<_> = experts.iter().zip(views).collect();
    let shares = shares(&all, results, (chosen, top_k), rows, out);
    // The rows of an expert are tasks too.
    shares.into_par_iter().try_for_each(|Share { weights: (weights, x), inputs, mut outputs }| {
        let x = x.with_linear_scales(&scales);
        let (all_rows, tokens) = (Rows::of(x), inputs.len());
        let codes = inputs.iter().map(|row| all_rows.at(*row).codes).collect::<Vec<_>>().concat();
        let scales = inputs.iter().map(|row| all_rows.at(*row).scales).collect::<Vec<_>>().concat();
        let shape = QuantizedShape { rows: tokens, ..x.shape() };
        let x = Fp4Rows::from(QuantizedView::of_tensor(shape, &codes, &scales, x.global_scale()));
        let of_rows =
            activations.token_scales.map(|all| -> Vec<_> { inputs.iter().map(|row| all[*row]).collect() });
        let x = of_rows.as_ref().map_or(x, |scales| x.token_scales(scales));
        let mut products = vec![T::default(); tokens * results];
        multiply(isa, x, *weights, &mut products, &combined)?;
        for (output, products) in outputs.iter_mut().zip(products.chunks_exact(results)) {
            output.copy_from_slice(products);
        }
        Ok(())
    })
}
