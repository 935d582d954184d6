//! Products of quantized weights and activations that are rounded to INT8.

use microscale_formats::int8;
use rayon::prelude::*;

use super::isa::Isa;
use crate::cpu::products::by_panel::{bands, fill_band, panels_per_task};
use crate::cpu::products::int8::{Int8Tokens, ROWS, Scratch};
use crate::cpu::products::rows::Rows;
use crate::elements::{Elements, ElementsMut};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::view::QuantizedView;

/// Most tokens per decoding of the weights.
const TASK_TOKENS: usize = 256;

/// Most work that stays on this thread, about as long as waking another thread takes.
///
/// The unit is the product of a weight and an activation. Decoding a weight takes two units.
const SMALL: usize = 1 << 21;

/// Multiplies weights in NVFP4 or MXFP4 by activations that it rounds to INT8, on the CPU.
///
/// Like [`gemm_weights`](crate::gemm_weights()), but each 32 activations of a token are rounded to
/// integers of eight bits with one f32 scale, as ggml does for its quantized types. For activations
/// in f32 this is about twice as fast; bf16 gains little where AVX-512 BF16 or AMX multiplies it.
/// It loses up to amax / 254 per activation.
///
/// [`microscale_formats::int8`] defines the arithmetic and bounds its error. Every CPU gives the
/// same bits, for any number of tokens and threads. If an activation is NaN or infinite, all
/// results of its token are NaN. So are the results of rows with NaN scales.
///
/// ```
/// use microscale::{Recipe, Shape, cpu::gemm_weights_int8, quantize};
///
/// let weights = quantize(&[0.5f32; 2 * 32], Shape::new(2, 32), &Recipe::default())?.tensor;
/// let x = [[1f32; 32], [2f32; 32], [4f32; 32]].concat(); // three tokens
/// let mut out = [0f32; 3 * 2];
/// gemm_weights_int8(&weights, &x, 3, &mut out)?;
/// assert_eq!(out, [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]);
/// # Ok::<(), microscale::Error>(())
/// ```
///
/// # Errors
///
/// The errors of [`gemv_weights`](crate::gemv_weights()).
pub fn gemm_weights_int8<'a, T: Activation>(
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    gemm_weights_int8_with(Isa::best(), weights, activations, tokens, out)
}

/// [`gemm_weights_int8`] with a given instruction set, for tests and comparisons.
///
/// # Errors
///
/// The errors of [`gemm_weights_int8`].
pub fn gemm_weights_int8_with<'a, T: Activation>(
    isa: Isa,
    weights: impl Into<QuantizedView<'a>>,
    activations: &[T],
    tokens: usize,
    out: &mut [T],
) -> Result<()> {
    let weights = weights.into();
    let (cols, rows) =
        (weights.cols(), check_weights(weights.shape(), activations.len(), tokens, out.len())?);
    if rows > 0 {
        for (block, out) in out[..tokens * rows].chunks_mut(TASK_TOKENS * rows).enumerate() {
            let activations = &activations[block * TASK_TOKENS * cols..][..out.len() / rows * cols];
            multiply(isa, weights, activations, out);
        }
    }
    Ok(())
}

/// Multiplies up to [`TASK_TOKENS`] tokens. `out` determines their number.
fn multiply<T: Activation>(isa: Isa, weights: QuantizedView<'_>, activations: &[T], out: &mut [T]) {
    let (rows, cols) = (weights.rows(), weights.cols());
    let tokens = out.len() / rows;
    let is_small = rows * cols * (tokens + 2) <= SMALL;
    let x = packed(isa, activations, cols, tokens);
    let all_rows = Rows::of(weights);
    let multiply_panel = |panel: usize, out: &mut [T], buffers: &mut Buffers| {
        let count = out.len() / tokens;
        let first = panel * ROWS;
        // Repeats the last row to fill the array. Only existing rows are passed on.
        let panel_rows: [_; ROWS] = std::array::from_fn(|i| all_rows.at(first + i.min(count - 1)));
        let Buffers { sums, products } = buffers;
        sums.resize(out.len(), 0.0);
        isa.multiply_int8(weights.format(), &panel_rows[..count], &x, sums, products);
        let factor = int8::factor(weights.format());
        isa.round_int8(sums, factor, weights.global_scale(), ElementsMut::of(out));
    };
    if tokens == 1 {
        return for_each(is_small, out, ROWS, multiply_panel);
    }
    let panels = panels_per_task(rows.div_ceil(ROWS));
    let mut bands = bands(out.chunks_mut(rows), panels * ROWS);
    for_each(is_small, &mut bands, tokens, |task, band, (buffers, by_panel): &mut (Buffers, Vec<T>)| {
        fill_band::<ROWS, T>(band, by_panel, |out| {
            for (panel, out) in (task * panels..).zip(out.chunks_mut(ROWS * tokens)) {
                multiply_panel(panel, out, buffers);
            }
        });
    });
}

/// Buffers of a task, reused by the thread's next task.
#[derive(Default)]
struct Buffers {
    /// The sums of a panel.
    sums: Vec<f32>,
    products: Scratch,
}

/// Calls a function with the index of each chunk, on all threads unless the product is small.
fn for_each<T: Send, B: Default>(
    is_small: bool,
    all: &mut [T],
    chunk: usize,
    function: impl Fn(usize, &mut [T], &mut B) + Sync + Send,
) {
    if is_small {
        let mut buffers = B::default();
        return all.chunks_mut(chunk).enumerate().for_each(|(i, chunk)| function(i, chunk, &mut buffers));
    }
    let chunks = all.par_chunks_mut(chunk).enumerate();
    chunks.for_each_init(B::default, |buffers, (i, chunk)| function(i, chunk, buffers));
}

/// Rounds and packs the activations of all tokens.
fn packed<T: Activation>(isa: Isa, activations: &[T], cols: usize, tokens: usize) -> Int8Tokens {
    let mut x = Int8Tokens::new(cols, tokens);
    let pack = |(first, tokens, tile): (usize, usize, &mut [_])| {
        for token in 0..tokens.min(tile.len()) {
            let values = Elements::of(&activations[(first + token) * cols..][..cols]);
            isa.pack_int8(values, &mut tile[token..], tokens);
        }
    };
    if activations.len() <= SMALL / 16 {
        x.tiles_mut().for_each(pack);
    } else {
        x.tiles_mut().collect::<Vec<_>>().into_par_iter().for_each(pack);
    }
    x
}
