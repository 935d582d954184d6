//! Products of two matrices of FP4.

use std::ops::Range;

use microscale_formats::{Gate, fp4_dot, int8};
use rayon::prelude::*;

use super::isa::Isa;
use crate::cpu::products::by_panel::{bands, fill_band, panels_per_task};
use crate::cpu::products::int8::{Int8Tokens, ROWS, Scratch};
use crate::cpu::products::rows::{Rows, scale_and_round};
use crate::cpu::simd::Scalars;
use crate::element::Element;
use crate::error::Result;
use crate::fp4::{Fp4Rows, Fp4Weights, check};
use crate::gemv::Activation;

/// Most tokens per decoding of the weights.
const TASK_TOKENS: usize = 256;

/// Multiplies weights by quantized activations, both in NVFP4 or both in MXFP4, on the CPU.
///
/// Computes `out[n, m] = alpha · Σₖ weights[m, k] · activations[n, k] + bias[m]`, with block scales
/// and both global scales; activations may have [one per token](Fp4Rows::token_scales).
/// `activations` is `[N, K]`, `weights` is `[M, K]` and `out` is `[N, M]` without gaps, in f32, f16
/// or bf16. Scales may be linear or swizzled. K may be any number: rows end with whole blocks, and
/// the elements after K are multiplied as they are stored. Quantizing stores zeros there.
///
/// # Bits
///
/// [`microscale_formats::int8`] defines the sum, and bounds its error: the products of a group of
/// 16 elements are added exactly, and groups in f32. Every instruction set, every number of tokens
/// and every number of threads gives these bits. The sum is multiplied by a
/// [factor](microscale_formats::fp4_dot::factor), alpha times both global scales in f32, and the
/// bias is added. The result is rounded once. A NaN scale makes the results of its row or token
/// NaN.
///
/// Tensor cores add in another order: [`microscale_formats::fp4_dot::row`] has the bits of
/// Blackwell's. To round least, call [`gemv`](crate::gemv()), which takes the same operands.
///
/// ```
/// use microscale::{Fp4Weights, Recipe, Shape, gemm_fp4, quantize};
///
/// let recipe = Recipe::default(); // MXFP4
/// let weights = quantize(&[0.5f32; 2 * 32], Shape::new(2, 32), &recipe)?.tensor;
/// let x = [[1f32; 32], [2f32; 32], [4f32; 32]].concat(); // three tokens
/// let x = quantize(&x, Shape::new(3, 32), &recipe)?.tensor;
/// let mut out = [0f32; 3 * 2];
/// gemm_fp4(&x, &weights, &mut out)?;
/// assert_eq!(out, [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]);
///
/// let weights = Fp4Weights::from(&weights).alpha(0.5).bias(&[1.0, -1.0]);
/// gemm_fp4(&x, weights, &mut out)?;
/// assert_eq!(out, [9.0, 7.0, 17.0, 15.0, 33.0, 31.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// [`crate::Error::Operands`] if the operands differ in format or columns or are in other formats,
/// [`crate::Error::NoGlobalScale`] for MXFP4 with a global scale per token, and
/// [`crate::Error::Length`] if `out` has fewer elements than `[N, M]`, the bias fewer than `[M]`,
/// or the global scales fewer than `[N]`.
pub fn gemm_fp4<'a, 'b, T: Activation>(
    activations: impl Into<Fp4Rows<'a>>,
    weights: impl Into<Fp4Weights<'b>>,
    out: &mut [T],
) -> Result<()> {
    gemm_fp4_with(Isa::best(), activations, weights, out)
}

/// [`gemm_fp4`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_fp4`].
pub fn gemm_fp4_with<'a, 'b, T: Activation>(
    isa: Isa,
    activations: impl Into<Fp4Rows<'a>>,
    weights: impl Into<Fp4Weights<'b>>,
    out: &mut [T],
) -> Result<()> {
    multiply(isa, activations.into(), [weights.into()], out, |[y]| y)
}

/// Multiplies quantized activations by two matrices and combines the results with a gate, on the
/// CPU.
///
/// `gate` and `up` are `[M, K]`, and each has its own global scale, alpha and bias. Both products
/// are rounded to f32, [`Gate::of`] combines them in f32, and the result is rounded once. Otherwise
/// like [`gemm_fp4`].
///
/// ```
/// use microscale::{Gate, Recipe, Shape, gemm_fp4_gated, quantize};
///
/// let recipe = Recipe::default();
/// let [x, gate, up] = [1f32, 0.5, 2.0].map(|x| quantize(&[x; 32], Shape::new(1, 32), &recipe));
/// let mut out = [0f32];
/// gemm_fp4_gated(&x?.tensor, &gate?.tensor, &up?.tensor, Gate::SILU, &mut out)?;
/// assert!((out[0] - 64.0 * 16.0).abs() < 1e-3); // 64 · silu(16)
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// The errors of [`gemm_fp4`], and [`crate::OperandFault::GateRows`] if `gate` and `up` differ in
/// rows.
pub fn gemm_fp4_gated<'a, 'b, 'c, T: Activation>(
    activations: impl Into<Fp4Rows<'a>>,
    gate: impl Into<Fp4Weights<'b>>,
    up: impl Into<Fp4Weights<'c>>,
    by: Gate,
    out: &mut [T],
) -> Result<()> {
    gemm_fp4_gated_with(Isa::best(), activations, [gate.into(), up.into()], by, out)
}

/// [`gemm_fp4_gated`] with a given instruction set, for tests and comparisons.
///
/// `weights` are gate and up.
///
/// # Errors
///
/// The errors of [`gemm_fp4_gated`].
pub fn gemm_fp4_gated_with<'a, T: Activation>(
    isa: Isa,
    activations: impl Into<Fp4Rows<'a>>,
    weights: [Fp4Weights<'_>; 2],
    by: Gate,
    out: &mut [T],
) -> Result<()> {
    multiply(isa, activations.into(), weights, out, gated(by))
}

/// Returns the function that combines the results of gate and up.
pub(super) fn gated(by: Gate) -> impl Fn([f64; 2]) -> f64 + Sync {
    move |both| {
        let [gate, up] = both.map(|y| y as f32);
        f64::from(by.of::<Scalars>(gate, up))
    }
}

/// Multiplies by `N` matrices, and combines the `N` results at a place before they are rounded.
pub(super) fn multiply<T: Element, const N: usize>(
    isa: Isa,
    activations: Fp4Rows<'_>,
    weights: [Fp4Weights<'_>; N],
    out: &mut [T],
    combined: impl Fn([f64; N]) -> f64 + Sync,
) -> Result<()> {
    let (rows, mut activations) = check(activations, &weights, out.len())?;
    let tokens = activations.view.rows();
    if rows == 0 || tokens == 0 {
        return Ok(());
    }
    let out = &mut out[..tokens * rows];
    let scales = activations.view.linear_scales();
    activations.view = activations.view.with_linear_scales(&scales);
    let scales = weights.each_ref().map(|weights| weights.view.linear_scales());
    let mut matrices = weights;
    for (matrix, scales) in matrices.iter_mut().zip(&scales) {
        matrix.view = matrix.view.with_linear_scales(scales);
    }
    let product = Product { isa, activations, matrices, combined };
    for (block, out) in out.chunks_mut(TASK_TOKENS * rows).enumerate() {
        product.block(block * TASK_TOKENS, out);
    }
    Ok(())
}

/// A product with linear scales, shared by its tasks.
struct Product<'a, F, const N: usize> {
    isa: Isa,
    activations: Fp4Rows<'a>,
    matrices: [Fp4Weights<'a>; N],
    combined: F,
}

impl<F: Fn([f64; N]) -> f64 + Sync, const N: usize> Product<'_, F, N> {
    /// Multiplies up to [`TASK_TOKENS`] tokens. `out` determines their number.
    fn block<T: Element>(&self, first: usize, out: &mut [T]) {
        let rows = self.matrices[0].view.rows();
        let view = self.activations.view;
        let (format, tokens) = (view.format(), out.len() / rows);
        let all_tokens = Rows::of(view).skip(first);
        let mut x = Int8Tokens::new(view.cols(), tokens);
        let tiles: Vec<_> = x.tiles_mut().collect();
        tiles.into_par_iter().for_each(|(first, tokens, tile)| {
            for token in 0..tokens.min(tile.len()) {
                self.isa.pack_fp4(format, all_tokens.at(first + token), &mut tile[token..], tokens);
            }
        });
        let panels = panels_per_task(rows.div_ceil(ROWS));
        let mut bands = bands(out.chunks_mut(rows), panels * ROWS);
        let tasks = bands.par_chunks_mut(tokens).enumerate();
        let buffers = || (Buffers::default(), Vec::new());
        tasks.for_each_init(buffers, |(buffers, by_panel), (task, band)| {
            fill_band::<ROWS, T>(band, by_panel, |out| {
                for (panel, out) in (task * panels..).zip(out.chunks_mut(ROWS * tokens)) {
                    let count = out.len() / tokens;
                    self.panel(panel * ROWS..panel * ROWS + count, first, &x, out, buffers);
                }
            });
        });
    }

    /// Multiplies the rows of a panel, by token. The block's first token has number `first_token`.
    fn panel<T: Element>(
        &self,
        panel: Range<usize>,
        first_token: usize,
        x: &Int8Tokens,
        out: &mut [T],
        buffers: &mut Buffers,
    ) {
        let (first, count) = (panel.start, panel.len());
        let format = self.activations.view.format();
        buffers.sums.resize(N * out.len(), 0.0);
        for (matrix, sums) in self.matrices.iter().zip(buffers.sums.chunks_mut(out.len())) {
            let all_rows = Rows::of(matrix.view);
            // Repeats the last row to fill the array. Only existing rows are passed on.
            let rows: [_; ROWS] = std::array::from_fn(|i| all_rows.at(first + i.min(count - 1)));
            self.isa.multiply_int8(format, &rows[..count], x, sums, &mut buffers.products);
        }
        let mut factors = [0.0; N];
        for (i, out) in out.iter_mut().enumerate() {
            if i % count == 0 {
                let of_token = self.activations.global_scale(first_token + i / count);
                factors = self.matrices.each_ref().map(|matrix| {
                    let globals = [of_token, matrix.view.global_scale()];
                    int8::factor(format) * f64::from(fp4_dot::factor(matrix.alpha, globals))
                });
            }
            let results = std::array::from_fn(|matrix| {
                let sum = buffers.sums[matrix * (buffers.sums.len() / N) + i];
                self.matrices[matrix].result(f64::from(sum) * factors[matrix], first + i % count)
            });
            *out = scale_and_round((self.combined)(results), &[]);
        }
    }
}

impl Fp4Weights<'_> {
    /// The result of a row, given its sum times the factor.
    fn result(&self, sum: f64, row: usize) -> f64 {
        sum + self.bias.map_or(0.0, |bias| f64::from(bias[row]))
    }
}

/// Buffers of a task, reused by the thread's next task.
#[derive(Default)]
struct Buffers {
    /// The sums of a panel, by matrix.
    sums: Vec<f32>,
    products: Scratch,
}
