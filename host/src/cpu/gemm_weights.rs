//! Products of quantized weights and activations of any number of tokens, over rayon's threads.

use std::sync::OnceLock;

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::arranged::{Aligned, Arranged, TOKENS, Word};
use super::gemv_weights::gemv_weights_with;
#[cfg(target_arch = "x86_64")]
use super::gemv_weights::multiply_block;
use super::isa::Isa;
use super::panels::{self, PANELS, PanelRows, Scratch, TokenSums, lane_of_row};
use super::rows::{Row, finished};
use super::tiles::{self, TileOperands, TiledActivations};
use super::vector::LANES;
use super::weigh::{self, Prepared};
#[cfg(target_arch = "x86_64")]
use super::weigh_pairs::PreparedPairs;
use crate::element::Element;
use crate::elements::{Elements, ElementsMut, by_dtype};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::view::QuantizedView;

/// The most tokens for which [`gemv_weights_with`] is faster.
const FEW: usize = 4;

/// Tokens that share one decoding of the weights, at most: their activations of a segment have room in a
/// core's second-level cache.
const TASK_TOKENS: usize = 256;

/// Multiplies weights in NVFP4 or MXFP4 with activations of any number of tokens that are not quantized, on
/// the CPU: `out[n, m] = Σₖ weights[m, k] · activations[n, k]`, with block and global scales.
///
/// `weights` is `[M, K]`, with linear scales; `activations` is `[N, K]` and `out` `[N, M]`, without gaps.
/// Weights are decoded once for up to 256 tokens.
///
/// Up to four tokens have the bits of [`gemv_weights`](crate::gemv_weights()). The arithmetic of more is in
/// [`microscale_formats::weights`], which says how far it may be from the exact sum. Every run gives the same
/// bits, whatever the number of threads, and so do all instruction sets but two: [`Isa::Avx512Bf16`]
/// multiplies activations in bf16 by instructions of its own, those of up to eight tokens in another order than
/// those of more, and [`Isa::AmxBf16`] those of more than eight tokens, in any dtype, by matrix tiles of bf16. Activations in f32 are never rounded. NaN scales, activations that are not finite and
/// sums that overflow come out as of [`gemv_weights`](crate::gemv_weights()).
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
    let pairs = isa.word_of(T::DTYPE) == Word::Pair;
    if tokens <= FEW && !pairs {
        return gemv_weights_with(isa, weights, activations, tokens, out);
    }
    let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
    if rows > 0 && tokens > 0 {
        let (activations, out) = (Elements::of(activations), ElementsMut::of(&mut out[..tokens * rows]));
        match (activations, out) {
            #[cfg(target_arch = "x86_64")]
            (Elements::Bf16(activations), ElementsMut::Bf16(out)) if pairs && tokens <= TOKENS => {
                multiply_few_pairs(isa, weights, activations, out);
            }
            (_, out) => by_dtype!(ElementsMut, out => multiply(isa, weights, activations, out)),
        }
    }
    Ok(())
}

/// Multiplies operands that were found to fit, for as many tokens as the output has room for.
fn multiply<T: Element>(isa: Isa, weights: QuantizedView<'_>, activations: Elements<'_>, out: &mut [T]) {
    let (rows, cols) = (weights.rows(), weights.cols());
    let tokens = out.len() / rows;
    let has_tiles = isa == Isa::AmxBf16 && tokens > TOKENS;
    let product = Product {
        isa,
        weights,
        activations,
        operand: if has_tiles {
            Operand::Tiles(isa.tiles(activations, cols, tokens))
        } else {
            Operand::Words(Arranged::of(isa.word_of(activations.dtype()), activations, cols, tokens))
        },
        prepared: (0..tokens.div_ceil(TOKENS)).map(|_| OnceLock::new()).collect(),
    };
    let groups = if has_tiles { tiles::groups(rows.div_ceil(panels::ROWS)) } else { 1 };
    out.par_chunks_mut(TASK_TOKENS * rows).enumerate().for_each(|(block, out)| {
        let tokens = out.len() / rows;
        // By rows that are multiplied together, then by token.
        let mut by_rows = vec![T::default(); out.len()];
        let tasks = by_rows.par_chunks_mut(groups * panels::ROWS * tokens).enumerate();
        tasks.for_each_init(
            || Scratch::new(groups),
            |scratch, (task, out)| {
                product.rows(task * groups * panels::ROWS, block * TASK_TOKENS, tokens, out, scratch);
            },
        );
        out.par_chunks_mut(rows).enumerate().for_each(|(token, out)| {
            let by_rows = by_rows.chunks(panels::ROWS * tokens);
            for (out, by_rows) in out.chunks_mut(panels::ROWS).zip(by_rows) {
                out.copy_from_slice(&by_rows[token * out.len()..][..out.len()]);
            }
        });
    });
}

/// Multiplies operands that were found to fit, for up to [`TOKENS`] tokens, by instructions for pairs.
#[cfg(target_arch = "x86_64")]
fn multiply_few_pairs(isa: Isa, weights: QuantizedView<'_>, activations: &[bf16], out: &mut [bf16]) {
    let (format, cols) = (weights.format(), weights.cols());
    let tokens = out.len() / weights.rows();
    let pairs = PreparedPairs::of(activations, cols, tokens);
    let prepared = OnceLock::new();
    multiply_block(weights, out, |rows, sums| {
        isa.weigh_pairs(format, rows, &pairs, sums);
        for (row, sums) in rows.iter().zip(sums) {
            let is_nan = format.is_nan_scale(row.most());
            if is_nan || sums.iter().any(|sum| !sum.is_finite()) {
                let prepared = prepared.get_or_init(|| Prepared::of(Elements::of(activations), cols, tokens));
                let mut by_definition = [[0.0; TOKENS]; weigh::ROWS];
                isa.weigh(format, &[*row], prepared, &mut by_definition);
                for (sum, by_definition) in sums.iter_mut().zip(by_definition[0]) {
                    if is_nan || !sum.is_finite() {
                        *sum = by_definition;
                    }
                }
            }
        }
    });
}

/// The activations, as they are multiplied.
enum Operand {
    Words(Arranged),
    Tiles(TiledActivations),
}

/// A product, as its tasks need it.
struct Product<'a> {
    isa: Isa,
    weights: QuantizedView<'a>,
    activations: Elements<'a>,
    operand: Operand,
    /// By tile, the activations for rows and sums that are computed by the definition of few tokens.
    prepared: Vec<OnceLock<Prepared>>,
}

impl Product<'_> {
    /// Some tokens' products with groups of up to [`panels::ROWS`] rows, by group and token.
    fn rows<T: Element>(
        &self,
        first_row: usize,
        first_token: usize,
        tokens: usize,
        out: &mut [T],
        scratch: &mut Scratch,
    ) {
        let (weights, format) = (self.weights, self.weights.format());
        let rows: Vec<_> = (0..out.len() / tokens).map(|i| Row::of(weights, first_row + i)).collect();
        let groups = rows.chunks(panels::ROWS);
        let mut sums = vec![[Aligned([0.0; LANES]); PANELS]; groups.len() * tokens];
        if self.isa == Isa::Reference {
            for (rows, sums) in groups.clone().zip(sums.chunks_mut(tokens)) {
                self.reference(rows, first_token, sums);
            }
        } else {
            let groups: Vec<_> = groups.clone().map(|rows| PanelRows::of(format, rows)).collect();
            match &self.operand {
                Operand::Words(x) => {
                    for (rows, sums) in groups.iter().zip(sums.chunks_mut(tokens)) {
                        self.isa.multiply(format, rows, x, first_token / TOKENS, sums, scratch);
                    }
                }
                Operand::Tiles(x) => {
                    let first_tile = first_token / tiles::TOKENS;
                    let operands = TileOperands { format, groups: &groups, x, first_tile };
                    self.isa.multiply_tiles(&operands, &mut sums, scratch);
                }
            }
        }
        let outputs = out.chunks_mut(panels::ROWS * tokens);
        for ((rows, sums), out) in groups.zip(sums.chunks(tokens)).zip(outputs) {
            self.finish(rows, first_token, sums, out);
        }
    }

    /// The products of some tokens and rows that are multiplied together, by token, given their sums.
    fn finish<T: Element>(&self, rows: &[Row<'_>], first_token: usize, sums: &[TokenSums], out: &mut [T]) {
        let (count, format) = (rows.len(), self.weights.format());
        let globals = [self.weights.global_scale()];
        let factors: Vec<_> = rows.iter().map(|row| panels::factor(format, *row)).collect();
        let are_unusual: Vec<_> = rows.iter().map(|row| panels::is_unusual(format, *row)).collect();
        if let Some(factors) = factors.first_chunk()
            && !are_unusual.contains(&true)
            && self.isa.finish(sums, factors, globals[0], ElementsMut::of(out))
        {
            return;
        }
        let token_tiles = sums.chunks(TOKENS).zip(out.chunks_mut(TOKENS * count));
        for (tile, (sums, out)) in token_tiles.enumerate() {
            let mut by_definition = [None; panels::ROWS];
            for (token, (sums, out)) in sums.iter().zip(out.chunks_mut(count)).enumerate() {
                for (i, out) in out.iter_mut().enumerate() {
                    let mut sum = factors[i] * f64::from(sums[i / LANES].0[lane_of_row(i % LANES)]);
                    if are_unusual[i] || !sum.is_finite() {
                        let few = || self.few(rows[i], first_token / TOKENS + tile);
                        sum = by_definition[i].get_or_insert_with(few)[token];
                    }
                    *out = finished(sum, &globals);
                }
            }
        }
    }

    /// A row's products with a tile's tokens, as of few tokens.
    fn few(&self, row: Row<'_>, tile: usize) -> [f64; TOKENS] {
        let cols = self.weights.cols();
        let prepared = self.prepared[tile].get_or_init(|| {
            let first = tile * TOKENS * cols;
            let elements = (self.activations.len() - first).min(TOKENS * cols);
            Prepared::of(self.activations.part(first, elements), cols, elements / cols)
        });
        let mut sums = [[0.0; weigh::TOKENS]; weigh::ROWS];
        self.isa.weigh(self.weights.format(), &[row], prepared, &mut sums);
        sums[0]
    }

    /// The definition.
    fn reference(&self, rows: &[Row<'_>], first_token: usize, sums: &mut [TokenSums]) {
        let cols = self.weights.cols();
        for (token, sums) in sums.iter_mut().enumerate() {
            let x = self.activations.part((first_token + token) * cols, cols);
            let x: Vec<_> = by_dtype!(Elements, x => x.iter().map(|x| x.to_f32()).collect());
            for (i, row) in rows.iter().enumerate() {
                if !panels::is_unusual(self.weights.format(), *row) {
                    sums[i / LANES].0[lane_of_row(i % LANES)] =
                        panels::reference(self.weights.format(), *row, &x);
                }
            }
        }
    }
}

const _: () = assert!(TOKENS == weigh::TOKENS);
const _: () = assert!(TASK_TOKENS.is_multiple_of(TOKENS) && TASK_TOKENS.is_multiple_of(tiles::TOKENS));
