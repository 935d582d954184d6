//! Products of 4-bit weights and FP8 activations (W4A8), with the bits of Hopper's tensor cores.

use std::borrow::Cow;

use rayon::prelude::*;

use super::activations::quantize_activations_with;
use super::gemm_experts::{Share, shares};
use super::isa::Isa;
use crate::activations::{ActivationFormat, ActivationInput, ActivationRecipe, Fp8Scale};
use crate::cpu::products::by_panel::bands;
use crate::cpu::products::fp8::{Fp8Matrix, Fp8Tokens, ROWS};
use crate::cpu::products::rows::{Rows, scale_and_round};
use crate::cpu::simd::LANES;
use crate::error::Result;
use crate::experts::{ExpertRows, check_pairs, shape_of};
use crate::fp8::{Fp8Options, Fp8Rows};
use crate::gemv::Activation;
use crate::shape::Shape;
use crate::view::QuantizedView;

/// Most tokens per decoding of the weights. Their packs of 128 columns fit the L2 cache.
const TASK_TOKENS: usize = 256;

/// Multiplies weights in MXFP4 or NVFP4 by activations in FP8 (E4M3), on the CPU.
///
/// Computes `out[n, m] = Σₖ weights[m, k] · activations[n, k]`, with block scales, the scales of
/// activations and the global scale. `weights` is `[M, K]`, with linear scales; `activations` is
/// `[N, K]` for `tokens` tokens and `out` is `[N, M]`, both without gaps. K may be any number.
///
/// MXFP4 weights lose nothing. NVFP4 weights are rounded, which [`Fp8Options::round_weights`] must
/// allow.
///
/// # Bits
///
/// [`row`](microscale_formats::fp8_dot::row) defines the sum, and its module bounds the error.
/// `Gpu::linear_fp8` has these bits where thread blocks do not share K, except with MXFP4 and few
/// tokens. Every instruction set and every number of threads gives these bits. The global scale is
/// applied to the sum, and the result is rounded once. NaN scales and NaN activations make the
/// results of their row or token NaN.
///
/// Use it to check kernels and quality: [`gemm_weights`](crate::gemm_weights()) is faster.
///
/// ```
/// use microscale::{Fp8Options, Fp8Rows, Recipe, Shape, gemm_weights_fp8, quantize};
///
/// let weights = quantize(&[0.5f32; 2 * 32], Shape::new(2, 32), &Recipe::default())?.tensor;
/// let x = [[1f32; 32], [2f32; 32], [4f32; 32]].concat(); // three tokens
/// let (mut out, options) = ([0f32; 3 * 2], Fp8Options::default());
/// gemm_weights_fp8(&weights, Fp8Rows::Values(&x), 3, options, &mut out)?;
/// assert_eq!(out, [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]);
///
/// // The codes of 1 and 448, under scales of 2 and 0.5.
/// let codes = [[0x38u8; 32], [0x7E; 32]].concat();
/// let x = Fp8Rows::Quantized { codes: &codes, scales: &[2.0, 0.5] };
/// gemm_weights_fp8(&weights, x, 2, options, &mut out)?;
/// assert_eq!(out[..4], [32.0, 32.0, 3584.0, 3584.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// [`OperandFault::RoundedWeights`] for NVFP4 weights without [`Fp8Options::round_weights`],
/// [`crate::Error::Operands`] if the weights are in another format or have swizzled scales, and
/// [`crate::Error::Length`] if activations, their scales or `out` have too few elements.
///
/// [`OperandFault::RoundedWeights`]: crate::OperandFault::RoundedWeights
pub fn gemm_weights_fp8<'a, T: Activation>(
    weights: impl Into<QuantizedView<'a>>,
    activations: Fp8Rows<'_, T>,
    tokens: usize,
    options: Fp8Options,
    out: &mut [T],
) -> Result<()> {
    gemm_weights_fp8_with(Isa::best(), weights, activations, tokens, options, out)
}

/// [`gemm_weights_fp8`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_weights_fp8`].
pub fn gemm_weights_fp8_with<'a, T: Activation>(
    isa: Isa,
    weights: impl Into<QuantizedView<'a>>,
    activations: Fp8Rows<'_, T>,
    tokens: usize,
    options: Fp8Options,
    out: &mut [T],
) -> Result<()> {
    let weights = weights.into();
    let (rows, cols) = (weights.rows(), weights.cols());
    options.check_weights(weights.shape())?;
    let results = Shape::new(tokens, rows);
    results.check("the output", out.len())?;
    let x = quantized(isa, activations, [tokens, cols], options)?;
    if rows > 0 && tokens > 0 {
        let outputs = out[..results.elements()].chunks_exact_mut(rows).collect();
        let share = Share { weights, inputs: (0..tokens).collect(), outputs };
        multiply(isa, share, &Fp8Tokens::new(x, tokens));
    }
    Ok(())
}

/// Multiplies rows of activations in FP8 by the weights of their experts, on the CPU.
///
/// Like [`gemm_experts`](crate::gemm_experts()), which describes the operands. `activations` is
/// `[tokens, K]`, or `[pairs, K]` if each pair has its own row. The results have the bits of
/// [`gemm_weights_fp8`].
///
/// ```
/// use microscale::{ExpertRows, Fp8Options, Fp8Rows, Recipe, Shape, gemm_experts_fp8, quantize};
///
/// let expert = |value: f32| quantize(&[value; 32], Shape::new(1, 32), &Recipe::default());
/// let experts = [expert(1.0)?.tensor, expert(2.0)?.tensor];
/// // The first token goes to both experts, the second one to expert 1 twice.
/// let (x, chosen) = (Fp8Rows::Values(&[1f32; 2 * 32]), [0, 1, 1, 1]);
/// let (mut out, options) = ([0f32; 4], Fp8Options::default());
/// gemm_experts_fp8(&experts, x, &chosen, 2, ExpertRows::Indexed, options, &mut out)?;
/// assert_eq!(out, [32.0, 64.0, 64.0, 64.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// The errors of [`gemm_experts`](crate::gemm_experts()) and [`gemm_weights_fp8`].
pub fn gemm_experts_fp8<'a, T: Activation>(
    experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    activations: Fp8Rows<'_, T>,
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    options: Fp8Options,
    out: &mut [T],
) -> Result<()> {
    gemm_experts_fp8_with((Isa::best(), options), experts, activations, chosen, top_k, rows, out)
}

/// [`gemm_experts_fp8`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_experts_fp8`].
pub fn gemm_experts_fp8_with<'a, T: Activation>(
    (isa, options): (Isa, Fp8Options),
    experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    activations: Fp8Rows<'_, T>,
    chosen: &[u32],
    top_k: usize,
    rows: ExpertRows,
    out: &mut [T],
) -> Result<()> {
    let experts: Vec<QuantizedView<'a>> = experts.into_iter().map(Into::into).collect();
    let shape = shape_of(&experts)?;
    options.check_weights(shape)?;
    check_pairs(chosen.len(), top_k)?;
    Shape::new(chosen.len(), shape.rows).check("the output", out.len())?;
    let tokens = rows.activation_rows([chosen.len(), top_k]);
    let x = quantized(isa, activations, [tokens, shape.cols], options)?;
    let x = Fp8Tokens::new(x, tokens);
    // The rows of an expert are tasks too.
    let shares = shares(&experts, shape.rows, (chosen, top_k), rows, out);
    shares.into_par_iter().for_each(|share| multiply(isa, share, &x));
    Ok(())
}

/// Returns rows of columns in FP8. Quantizes values, as GPUs do.
///
/// # Errors
/// [`crate::Error::Length`] if there are fewer codes, scales or values.
fn quantized<'a, T: Activation>(
    isa: Isa,
    activations: Fp8Rows<'a, T>,
    [rows, cols]: [usize; 2],
    options: Fp8Options,
) -> Result<Fp8Matrix<'a>> {
    let (shape, token_scales) = (Shape::new(rows, cols), options.token_scales(cols));
    let (codes, scales) = match activations {
        Fp8Rows::Values(values) => {
            shape.check("the activations", values.len())?;
            let scale = match token_scales {
                1 => Fp8Scale::PerToken,
                _ => Fp8Scale::PerGroup { power_of_two: false },
            };
            let recipe = ActivationRecipe::new(ActivationFormat::Fp8(scale));
            let quantized = quantize_activations_with(isa, ActivationInput::new(values, shape), &recipe)?;
            (Cow::Owned(quantized.codes), Cow::Owned(quantized.f32_scales))
        }
        Fp8Rows::Quantized { codes, scales } => {
            shape.check("the codes of the activations", codes.len())?;
            Shape::new(rows, token_scales).check("the scales of the activations", scales.len())?;
            (Cow::Borrowed(codes), Cow::Borrowed(scales))
        }
    };
    Ok(Fp8Matrix { cols, codes, scales, token_scales })
}

/// Multiplies the rows of activations of a share by its weights.
fn multiply<T: Activation>(isa: Isa, share: Share<'_, QuantizedView<'_>, T>, x: &Fp8Tokens<'_>) {
    let Share { weights, inputs, mut outputs } = share;
    let (globals, all_rows) = ([weights.global_scale()], Rows::of(weights));
    for (tokens, outputs) in inputs.chunks(TASK_TOKENS).zip(outputs.chunks_mut(TASK_TOKENS)) {
        let mut bands = bands(outputs.iter_mut().map(|out| &mut **out), ROWS);
        let panels = bands.par_chunks_mut(tokens.len()).enumerate();
        panels.for_each_init(Vec::new, |sums, (panel, band)| {
            let rows = band[0].len();
            // Repeats the last row to fill the array. Only existing rows are passed on.
            let of_panel: [_; ROWS] = std::array::from_fn(|i| all_rows.at(panel * ROWS + i.min(rows - 1)));
            sums.resize(tokens.len(), [0.0; LANES]);
            isa.multiply_fp8(weights.format(), &of_panel[..rows], x, tokens, sums);
            for (out, sums) in band.iter_mut().zip(&*sums) {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = scale_and_round(f64::from(*sum), &globals);
                }
            }
        });
    }
}
