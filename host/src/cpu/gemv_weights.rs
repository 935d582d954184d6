//! Products of quantized weights and few tokens.

use super::isa::Isa;
use crate::cpu::products::few_tokens::{PackedTokens, ROWS, RowSums, TOKENS};
use crate::cpu::products::rows::{Row, Rows, for_each_rows, scale_and_round};
use crate::element::Element;
use crate::elements::{Elements, ElementsMut, by_dtype};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::view::QuantizedView;

/// Multiplies weights in NVFP4 or MXFP4 by unquantized activations of few tokens, on the CPU.
///
/// Computes `out[n, m] = Σₖ weights[m, k] · activations[n, k]`, with block and global scales, for
/// `tokens` rows of activations (N). `weights` is `[M, K]`, with linear scales; `activations` is
/// `[N, K]` and `out` is `[N, M]`, both without gaps. Up to eight tokens share one pass over the
/// weights.
///
/// [`microscale_formats::weights`] defines the arithmetic and bounds its error. Every CPU gives the
/// same bits. NaN scales and non-finite activations give canonical NaN and infinities.
///
/// Call [`gemm_weights`](crate::gemm_weights()) instead unless you need these bits: it decodes the
/// weights once for up to 256 tokens, and uses more instructions.
///
/// ```
/// use microscale::{Recipe, Shape, gemv_weights, quantize};
///
/// let weights = quantize(&[0.5f32; 2 * 32], Shape::new(2, 32), &Recipe::default())?.tensor;
/// let mut out = [0f32; 2];
/// gemv_weights(&weights, &[1f32; 32], 1, &mut out)?; // one token
/// assert_eq!(out, [16.0, 16.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// [`crate::Error::Operands`] if the weights are in another format or have swizzled scales, and
/// [`crate::Error::Length`] if `activations` or `out` have too few elements.
pub fn gemv_weights<'a, T: Activation>(
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    gemv_weights_with(Isa::best(), weights, activations, tokens, out)
}

/// [`gemv_weights`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemv_weights`].
pub fn gemv_weights_with<'a, T: Activation>(
    isa: Isa,
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    let weights = weights.into();
    let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
    if rows > 0 {
        let (activations, out) = (Elements::of(activations), ElementsMut::of(&mut out[..tokens * rows]));
        by_dtype!(ElementsMut, out => multiply(isa, weights, activations, out));
    }
    Ok(())
}

/// Multiplies checked operands. `out` determines the number of tokens.
pub(super) fn multiply<T: Element>(
    isa: Isa,
    weights: QuantizedView<'_>,
    activations: Elements<'_>,
    out: &mut [T],
) {
    let (rows, cols) = (weights.rows(), weights.cols());
    for (block, out) in out.chunks_mut(TOKENS * rows).enumerate() {
        let tokens = out.len() / rows;
        let activations = activations.part(block * TOKENS * cols, tokens * cols);
        let prepared = PackedTokens::of(activations, cols, tokens);
        multiply_block(weights, out, |rows, sums| {
            isa.multiply_few_tokens(weights.format(), rows, &prepared, sums)
        });
    }
}

/// Multiplies up to [`TOKENS`] tokens. `multiply_rows` computes the sums of up to [`ROWS`] rows.
pub(super) fn multiply_block<T: Element>(
    weights: QuantizedView<'_>,
    out: &mut [T],
    multiply_rows: impl Fn(&[Row<'_>], &mut RowSums) + Sync,
) {
    let rows = weights.rows();
    let tokens = out.len() / rows;
    let (globals, all_rows) = ([weights.global_scale()], Rows::of(weights));
    let mut by_row = vec![T::default(); out.len()];
    for_each_rows(weights, &mut by_row, ROWS, tokens, |first, out| {
        let mut sums = [[0.0; TOKENS]; ROWS];
        // Repeats the last row to fill the array. Only existing rows are passed on.
        let rows: [_; ROWS] = std::array::from_fn(|i| all_rows.at((first + i).min(rows - 1)));
        multiply_rows(&rows[..out.len() / tokens], &mut sums);
        for (out, sums) in out.chunks_mut(tokens).zip(sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = scale_and_round(sum, &globals);
            }
        }
    });
    for (token, out) in out.chunks_mut(rows).enumerate() {
        for (out, row) in out.iter_mut().zip(by_row.chunks(tokens)) {
            *out = row[token];
        }
    }
}
