//! Products of quantized weights and activations of any number of tokens, over rayon's threads.

use std::sync::OnceLock;

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::gemv_weights;
#[cfg(target_arch = "x86_64")]
use super::gemv_weights::multiply_block;
use super::isa::Isa;
use crate::cpu::products::activations::{PackedActivations, Packing, TOKENS};
use crate::cpu::products::few_tokens::{self, PackedTokens};
#[cfg(target_arch = "x86_64")]
use crate::cpu::products::few_tokens_bf16::PackedTokenPairs;
use crate::cpu::products::panels::{self, Operands, Panel, Scratch, TokenSums};
use crate::cpu::products::rows::{Row, scale_and_round};
use crate::cpu::products::tiles;
use crate::element::Element;
use crate::elements::{Elements, ElementsMut, by_dtype};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::view::QuantizedView;

/// The tokens at the end that are multiplied as few are, which is faster. Without matrix tiles these are up to eight behind
/// whole tiles of sixteen tokens, or up to twelve that are all. A tile that is not full takes as long as a full one.
const fn few(isa: Isa, tokens: usize) -> usize {
    let (alone, behind) = if matches!(isa, Isa::AmxBf16) { (4, 0) } else { (12, few_tokens::TOKENS) };
    let rest = tokens % TOKENS;
    if rest <= if tokens < TOKENS { alone } else { behind } { rest } else { 0 }
}

/// Tokens that share one decoding of the weights, at most: their activations of a segment have room in a
/// core's second-level cache.
const TASK_TOKENS: usize = 256;

/// Multiplies weights in NVFP4 or MXFP4 with activations of any number of tokens that are not quantized, on
/// the CPU: `out[n, m] = Σₖ weights[m, k] · activations[n, k]`, with block and global scales.
///
/// `weights` is `[M, K]`, with linear scales; `activations` is `[N, K]` and `out` `[N, M]`, without gaps.
/// Weights are decoded once for up to 256 tokens.
///
/// Up to twelve tokens, and up to eight behind a multiple of sixteen, have the bits of [`gemv_weights`](crate::gemv_weights()) if
/// nothing multiplies pairs; with [`Isa::AmxBf16`], up to four tokens in f16 or f32. The arithmetic of the others is in
/// [`microscale_formats::weights`], which says how far it may be from the exact sum. Every run gives the same
/// bits, whatever the number of threads, and so do all instruction sets but two: [`Isa::Avx512Bf16`]
/// multiplies activations in bf16 by instructions of its own, those of few tokens in another order than
/// the others, and [`Isa::AmxBf16`] those of more than four tokens, in any dtype, by matrix tiles of bf16. Activations in f32 are never
/// rounded. NaN scales, activations that are not finite and sums that overflow come out as of [`gemv_weights`](crate::gemv_weights()).
///
/// # Errors
/// Those of [`gemv_weights`](crate::gemv_weights()).
pub fn gemm_weights<'a, T: Activation>(
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    gemm_weights_with(Isa::best(), weights, activations, tokens, out)
}

/// [`gemm_weights`] on a chosen instruction set: for tests and comparisons.
///
/// # Errors
/// Those of [`gemm_weights`].
pub fn gemm_weights_with<'a, T: Activation>(
    isa: Isa,
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    let weights = weights.into();
    let (cols, rows) =
        (weights.cols(), check_weights(weights.shape(), activations.len(), tokens, out.len())?);
    if rows > 0 && tokens > 0 {
        let many = tokens - few(isa, tokens);
        let (x, few_x) = activations[..tokens * cols].split_at(many * cols);
        let (out, few_out) = out[..tokens * rows].split_at_mut(many * rows);
        if !out.is_empty() {
            let (x, out) = (Elements::of(x), ElementsMut::of(out));
            by_dtype!(ElementsMut, out => multiply(isa, weights, x, out));
        }
        if !few_out.is_empty() {
            multiply_few(isa, weights, Elements::of(few_x), ElementsMut::of(few_out));
        }
    }
    Ok(())
}

/// Multiplies operands that were found to fit, for as many tokens as the output has room for.
fn multiply<T: Element>(isa: Isa, weights: QuantizedView<'_>, activations: Elements<'_>, out: &mut [T]) {
    let (rows, cols) = (weights.rows(), weights.cols());
    let tokens = out.len() / rows;
    let x = isa.pack_activations(activations, cols, tokens);
    let panels =
        if x.packing() == Packing::Bf16Tiles { tiles::panels(rows.div_ceil(panels::ROWS)) } else { 1 };
    let prepared = (0..tokens.div_ceil(few_tokens::TOKENS)).map(|_| OnceLock::new()).collect();
    let product = Product { isa, weights, activations, x, prepared };
    out.par_chunks_mut(TASK_TOKENS * rows).enumerate().for_each(|(block, out)| {
        let tokens = out.len() / rows;
        // By panel, then by token.
        let mut by_panel = vec![T::default(); out.len()];
        let tasks = by_panel.par_chunks_mut(panels * panels::ROWS * tokens).enumerate();
        tasks.for_each_init(Scratch::new, |scratch, (task, out)| {
            product.rows(task * panels * panels::ROWS, block * TASK_TOKENS, tokens, out, scratch);
        });
        out.par_chunks_mut(rows).enumerate().for_each(|(token, out)| {
            let by_panel = by_panel.chunks(panels::ROWS * tokens);
            for (out, by_panel) in out.chunks_mut(panels::ROWS).zip(by_panel) {
                out.copy_from_slice(&by_panel[token * out.len()..][..out.len()]);
            }
        });
    });
}

/// Multiplies operands that were found to fit, for few tokens.
fn multiply_few(isa: Isa, weights: QuantizedView<'_>, activations: Elements<'_>, out: ElementsMut<'_>) {
    match (activations, out) {
        #[cfg(target_arch = "x86_64")]
        (Elements::Bf16(activations), ElementsMut::Bf16(out)) if isa.has_bf16_pairs() => {
            let cols = weights.cols();
            for (block, out) in out.chunks_mut(few_tokens::TOKENS * weights.rows()).enumerate() {
                let first = block * few_tokens::TOKENS * cols;
                let elements = out.len() / weights.rows() * cols;
                multiply_few_pairs(isa, weights, &activations[first..first + elements], out);
            }
        }
        (activations, out) => {
            by_dtype!(ElementsMut, out => gemv_weights::multiply(isa, weights, activations, out));
        }
    }
}

/// Multiplies operands that were found to fit, for up to [`few_tokens::TOKENS`] tokens, by instructions for pairs.
#[cfg(target_arch = "x86_64")]
fn multiply_few_pairs(isa: Isa, weights: QuantizedView<'_>, activations: &[bf16], out: &mut [bf16]) {
    let (format, cols) = (weights.format(), weights.cols());
    let tokens = out.len() / weights.rows();
    let pairs = PackedTokenPairs::of(activations, cols, tokens);
    let prepared = OnceLock::new();
    multiply_block(weights, out, |rows, sums| {
        isa.multiply_few_tokens_bf16(format, rows, &pairs, sums);
        for (row, sums) in rows.iter().zip(sums) {
            let is_nan = format.is_nan_scale(row.max_scale());
            if is_nan || sums.iter().any(|sum| !sum.is_finite()) {
                let prepared =
                    prepared.get_or_init(|| PackedTokens::of(Elements::of(activations), cols, tokens));
                let mut slow_path = [[0.0; few_tokens::TOKENS]; few_tokens::ROWS];
                isa.multiply_few_tokens(format, &[*row], prepared, &mut slow_path);
                for (sum, slow_path) in sums.iter_mut().zip(slow_path[0]) {
                    if is_nan || !sum.is_finite() {
                        *sum = slow_path;
                    }
                }
            }
        }
    });
}

/// A product, as its tasks need it.
struct Product<'a> {
    isa: Isa,
    weights: QuantizedView<'a>,
    activations: Elements<'a>,
    /// The activations, as they are multiplied.
    x: PackedActivations,
    /// By as many tokens as are few, the activations for rows and sums that are computed by the definition of those.
    prepared: Vec<OnceLock<PackedTokens>>,
}

impl Product<'_> {
    /// Some tokens' products with panels, by panel and token.
    fn rows<T: Element>(
        &self,
        first_row: usize,
        first_token: usize,
        tokens: usize,
        out: &mut [T],
        scratch: &mut Scratch,
    ) {
        let format = self.weights.format();
        let rows: Vec<_> = (0..out.len() / tokens).map(|i| Row::of(self.weights, first_row + i)).collect();
        let panels: Vec<_> = rows.chunks(panels::ROWS).map(Panel::of).collect();
        let mut sums = vec![[0.0; panels::ROWS]; panels.len() * tokens];
        if self.isa == Isa::Reference {
            for (rows, sums) in rows.chunks(panels::ROWS).zip(sums.chunks_mut(tokens)) {
                self.reference(rows, first_token, sums);
            }
        } else {
            let operands = Operands { format, panels: &panels, x: &self.x, first_tile: first_token / TOKENS };
            self.isa.multiply(&operands, &mut sums, scratch);
        }
        let outputs = out.chunks_mut(panels::ROWS * tokens).zip(rows.chunks(panels::ROWS));
        for ((panel, sums), (out, rows)) in panels.iter().zip(sums.chunks(tokens)).zip(outputs) {
            self.round_sums(panel, rows, first_token, sums, out);
        }
    }

    /// The products of some tokens and a panel's rows, by token, given their sums.
    fn round_sums<T: Element>(
        &self,
        panel: &Panel<'_>,
        rows: &[Row<'_>],
        first_token: usize,
        sums: &[TokenSums],
        out: &mut [T],
    ) {
        let (count, format) = (rows.len(), self.weights.format());
        let globals = [self.weights.global_scale()];
        let (factors, slow_rows) = (panel.factors(format), panel.slow_rows(format));
        if count == panels::ROWS
            && !slow_rows.contains(&true)
            && self.isa.round_sums(sums, &factors, globals[0], ElementsMut::of(out))
        {
            return;
        }
        let few_tokens = sums.chunks(few_tokens::TOKENS).zip(out.chunks_mut(few_tokens::TOKENS * count));
        for (few, (sums, out)) in few_tokens.enumerate() {
            let mut slow_path = [None; panels::ROWS];
            for (token, (sums, out)) in sums.iter().zip(out.chunks_mut(count)).enumerate() {
                for (i, out) in out.iter_mut().enumerate() {
                    let mut sum = factors[i] * f64::from(sums[i]);
                    if slow_rows[i] || !sum.is_finite() {
                        let few = || self.few(rows[i], first_token / few_tokens::TOKENS + few);
                        sum = slow_path[i].get_or_insert_with(few)[token];
                    }
                    *out = scale_and_round(sum, &globals);
                }
            }
        }
    }

    /// A row's products with as many tokens as are few, by the definition of those.
    fn few(&self, row: Row<'_>, few: usize) -> [f64; few_tokens::TOKENS] {
        let cols = self.weights.cols();
        let prepared = self.prepared[few].get_or_init(|| {
            let first = few * few_tokens::TOKENS * cols;
            let elements = (self.activations.len() - first).min(few_tokens::TOKENS * cols);
            PackedTokens::of(self.activations.part(first, elements), cols, elements / cols)
        });
        let mut sums = [[0.0; few_tokens::TOKENS]; few_tokens::ROWS];
        self.isa.multiply_few_tokens(self.weights.format(), &[row], prepared, &mut sums);
        sums[0]
    }

    /// The definition.
    fn reference(&self, rows: &[Row<'_>], first_token: usize, sums: &mut [TokenSums]) {
        let (cols, format) = (self.weights.cols(), self.weights.format());
        for (token, sums) in sums.iter_mut().enumerate() {
            let x = self.activations.part((first_token + token) * cols, cols);
            let x: Vec<_> = by_dtype!(Elements, x => x.iter().map(|x| x.to_f32()).collect());
            for (sum, row) in sums.iter_mut().zip(rows) {
                if !panels::needs_slow_path(format, *row, row.max_scale()) {
                    *sum = panels::reference(format, *row, &x);
                }
            }
        }
    }
}

const _: () = assert!(TASK_TOKENS.is_multiple_of(TOKENS) && TASK_TOKENS.is_multiple_of(few_tokens::TOKENS));
