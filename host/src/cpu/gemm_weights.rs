//! Products of quantized weights and any number of tokens.

use std::sync::OnceLock;

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::gemv_weights;
#[cfg(target_arch = "x86_64")]
use super::gemv_weights::multiply_block;
use super::isa::Isa;
use crate::cpu::products::activations::{PackedActivations, Packing, TOKENS};
use crate::cpu::products::by_panel::{bands, fill_band, panels_per_task};
use crate::cpu::products::few_tokens::{self, PackedTokens};
#[cfg(target_arch = "x86_64")]
use crate::cpu::products::few_tokens_bf16::PackedTokenPairs;
use crate::cpu::products::panels::{self, Operands, Panel, Scratch, TokenSums};
use crate::cpu::products::rows::{Row, scale_and_round};
use crate::element::Element;
use crate::elements::{Elements, ElementsMut, by_dtype};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::view::QuantizedView;

/// The number of tokens at the end that are faster as few tokens.
///
/// A partial tile takes as long as a full tile of sixteen tokens. Without AMX, up to eight tokens
/// after whole tiles are faster, and up to twelve tokens if there is no whole tile.
const fn few(isa: Isa, tokens: usize) -> usize {
    let (without_tile, after_tiles) =
        if matches!(isa, Isa::AmxBf16) { (4, 0) } else { (12, few_tokens::TOKENS) };
    let rest = tokens % TOKENS;
    if rest <= if tokens < TOKENS { without_tile } else { after_tiles } { rest } else { 0 }
}

/// Most tokens per decoding of the weights. Their activations of a segment fit the L2 cache.
const TASK_TOKENS: usize = 256;

/// Multiplies weights in NVFP4 or MXFP4 by unquantized activations of many tokens, on the CPU.
///
/// Computes `out[n, m] = Σₖ weights[m, k] · activations[n, k]`, with block and global scales.
/// `weights` is `[M, K]`, with linear scales; `activations` is `[N, K]` and `out` is `[N, M]`, both
/// without gaps. Weights are decoded once for up to 256 tokens. A thread keeps up to 16 MiB of
/// packed activations for its next call.
///
/// # Bits
///
/// Every run gives the same bits, whatever the number of threads. All instruction sets give the
/// same bits, with two exceptions:
///
/// - [`Isa::Avx512Bf16`] multiplies activations in bf16 as pairs, and few tokens in another order.
/// - [`Isa::AmxBf16`] multiplies more than four tokens by matrix tiles of bf16, for every dtype.
///
/// Up to twelve tokens, and up to eight tokens after a multiple of sixteen, count as few. With
/// [`Isa::AmxBf16`] these are up to four tokens. Unless they are multiplied as pairs of bf16, few
/// tokens have the bits of [`gemv_weights`](crate::gemv_weights()). [`microscale_formats::weights`]
/// defines the arithmetic of many tokens and bounds its error. Activations in f32 are never
/// rounded. NaN scales, non-finite activations and sums that overflow give the results of
/// [`gemv_weights`](crate::gemv_weights()).
///
/// ```
/// use microscale::{Recipe, Shape, gemm_weights, quantize};
///
/// let weights = quantize(&[0.5f32; 2 * 32], Shape::new(2, 32), &Recipe::default())?.tensor;
/// let x = [[1f32; 32], [2f32; 32], [4f32; 32]].concat(); // three tokens
/// let mut out = [0f32; 3 * 2];
/// gemm_weights(&weights, &x, 3, &mut out)?;
/// assert_eq!(out, [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// The errors of [`gemv_weights`](crate::gemv_weights()).
pub fn gemm_weights<'a, T: Activation>(
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    gemm_weights_with(Isa::best(), weights, activations, tokens, out)
}

/// [`gemm_weights`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_weights`].
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

/// Multiplies checked operands. `out` determines the number of tokens.
fn multiply<T: Element>(isa: Isa, weights: QuantizedView<'_>, activations: Elements<'_>, out: &mut [T]) {
    let (rows, cols) = (weights.rows(), weights.cols());
    let tokens = out.len() / rows;
    let x = isa.pack_activations(activations, cols, tokens);
    // The panels of a task share a segment of activations while it is in the L2 cache.
    let panels = match x.packing() {
        Packing::Bf16Tiles => panels_per_task(rows.div_ceil(panels::ROWS)),
        Packing::F32 | Packing::Bf16Pairs => 1,
    };
    let prepared = (0..tokens.div_ceil(few_tokens::TOKENS)).map(|_| OnceLock::new()).collect();
    let product = Product { isa, weights, activations, x, prepared };
    out.par_chunks_mut(TASK_TOKENS * rows).enumerate().for_each(|(block, out)| {
        let tokens = out.len() / rows;
        let mut bands = bands(out.chunks_mut(rows), panels * panels::ROWS);
        let tasks = bands.par_chunks_mut(tokens).enumerate();
        let buffers = || (Scratch::new(), Vec::new());
        tasks.for_each_init(buffers, |(scratch, by_panel), (task, band)| {
            fill_band::<{ panels::ROWS }, T>(band, by_panel, |out| {
                product.rows(task * panels * panels::ROWS, block * TASK_TOKENS, tokens, out, scratch);
            });
        });
    });
}

/// Multiplies checked operands as few tokens.
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

/// Multiplies checked operands as pairs of bf16, for up to [`few_tokens::TOKENS`] tokens.
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

/// A product, shared by its tasks.
struct Product<'a> {
    isa: Isa,
    weights: QuantizedView<'a>,
    activations: Elements<'a>,
    /// The packed activations.
    x: PackedActivations,
    /// The activations packed as few tokens, [`few_tokens::TOKENS`] at a time, for the slow path.
    prepared: Vec<OnceLock<PackedTokens>>,
}

impl Product<'_> {
    /// Multiplies some tokens by consecutive panels. The output is by panel, then by token.
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

    /// Rounds the products of some tokens and the rows of a panel, by token, given their sums.
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

    /// The slow path: the products of one row and `few_tokens::TOKENS` tokens, as few tokens.
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

    /// The reference, for rows that do not need the slow path.
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
