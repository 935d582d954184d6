//! Measures the table of times that `plan/choose.rs` uses to choose configurations.

use std::num::NonZeroUsize;

use half::bf16;
use microscale::formats::words::Words as _;
use microscale::gpu::internals::{Layers, MeasuredProduct, Times};
use microscale::gpu::{GemmConfig, Gpu};
use microscale::{Format, Numerics, Recipe, Result};

use super::gpu::measure_configs;
use super::layers::Half;
use super::product::matrix;
use super::size::Size;
use super::workload::random;

/// Rows and columns of layers of small models, which are measured with the layers of `layers.txt`.
const SMALL: [[usize; 2]; 5] = [[512, 2048], [1024, 1024], [2048, 2048], [2048, 8192], [8192, 2048]];

/// The largest number of tokens that MXFP4 is measured with, with 16-bit activations. NVFP4's times
/// stand in above it, and MXFP4's for NVFP4's with FP8 activations.
const MXFP4_TOKENS: usize = 8;

/// Measures the configurations of the GPU's target that are missing in a table.
///
/// `layers` are the dense layers of `layers.txt` to measure; `None` measures the tuned ones and
/// small shapes. Plans use no times of held-out layers: tests judge their choices by them. With
/// `fp8_only`, only products with FP8 activations are measured.
///
/// Returns the complete table. A second run with an older target adds the configurations of that
/// target.
///
/// # Errors
/// The errors of planning and of launching.
pub(crate) fn tune(gpu: &Gpu, mut times: Times, layers: Option<Half>, fp8_only: bool) -> Result<String> {
    let small: &[_] = if layers.is_none() { &SMALL } else { &[] };
    let of_half = Layers::built_in().dense().filter(|layer| layers.unwrap_or_default().has(layer));
    let shapes: Vec<_> = small.iter().copied().chain(of_half.map(|layer| [layer.rows, layer.cols])).collect();
    let tokens = &Layers::built_in().tuned_tokens;
    // Products with FP8 activations are measured with MXFP4.
    let formats: &[_] = if fp8_only { &[Format::Mxfp4] } else { &[Format::Nvfp4, Format::Mxfp4] };
    for &weights in formats {
        let most = tokens.last().copied().unwrap_or(1);
        for &[rows, cols] in &shapes {
            let size = Size { rows, cols, batches: 1, tokens: NonZeroUsize::new(most), top_k: 0 };
            let matrix = matrix(&Recipe::of(weights, Numerics::default_for(weights))?, size)?;
            let activations = random::<bf16>(most * cols, 2);
            let mut configs = if fp8_only { Vec::new() } else { gpu.gemm_configs(matrix.shape()) };
            if weights == Format::Mxfp4 {
                configs.extend(gpu.fp8_configs(weights));
            }
            let products: Vec<_> = tokens
                .iter()
                .flat_map(|&tokens| {
                    let missing = |config: &&GemmConfig| {
                        let fp8 = config.mainloop.takes_fp8();
                        (fp8 || weights == Format::Nvfp4 || tokens <= MXFP4_TOKENS)
                            && is_worth(**config, tokens)
                            && !times.has(**config, [rows, cols, tokens])
                    };
                    configs.iter().filter(missing).map(|config| (tokens, *config)).collect::<Vec<_>>()
                })
                .collect();
            let seconds = measure_configs(gpu, (&matrix, &activations, most), &products)?;
            let measured: Vec<_> = products.iter().zip(seconds).collect();
            for of_tokens in measured.chunk_by(|((a, _), _), ((b, _), _)| a == b) {
                let tokens = of_tokens[0].0.0;
                let configs = of_tokens.iter().filter_map(|((_, config), seconds)| {
                    seconds.map(|seconds| (*config, (seconds * 1e6) as f32))
                });
                times.add(MeasuredProduct { weights, rows, cols, tokens, configs: configs.collect() });
            }
            eprintln!("measured {} {rows}x{cols}", weights.word());
        }
    }
    let info = gpu.info();
    Ok(times.text(&format!("{}, bf16", info.name)))
}

/// Returns whether a configuration may be the fastest for a number of tokens.
fn is_worth(config: GemmConfig, tokens: usize) -> bool {
    let tile = config.tile_n as usize;
    if config.mainloop.is_gemv() {
        // One token has its own configurations. More tokens take at most three token tiles.
        return (tile == 1) == (tokens == 1) && (tokens <= 8) == (tile <= 8) && tokens <= 3 * tile;
    }
    // In the tables of 2026-11-25, tiles within 2 % of the fastest time had at most eight times the
    // number of tokens. Only large tiles are measured with more than eight token tiles.
    let least = if config.mainloop.takes_fp8() { 0 } else { 4 };
    tokens > least && tile <= 8 * tokens.max(2) && (tile >= 64 || tokens <= 8 * tile)
}
