//! Measures the table of times that `plan/choose.rs` uses to choose configurations.

use std::num::NonZeroUsize;
use std::path::Path;

use half::bf16;
use microscale::formats::words::Words as _;
use microscale::gpu::internals::{MeasuredProduct, Times};
use microscale::gpu::{GemmConfig, Gpu};
use microscale::{Format, Numerics, Recipe, Result};

use super::gpu::measure_configs;
use super::product::matrix;
use super::size::Size;
use super::workload::random;

/// Rows and columns of the measured layers: small, square, wide and tall. Published figures are of
/// other layers.
const SHAPES: [[usize; 2]; 12] = [
    [512, 2048],
    [1024, 1024],
    [2048, 2048],
    [2048, 8192],
    [4096, 4096],
    [8192, 2048],
    [4096, 14336],
    [14336, 4096],
    [8192, 8192],
    [8192, 28672],
    [28672, 8192],
    [32768, 4096],
];

/// The measured numbers of tokens in NVFP4. MXFP4 is measured up to eight tokens.
const TOKENS: [usize; 16] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096];

/// Measures the configurations of the GPU's target that are missing in the table of a file, if
/// given.
///
/// Returns the complete table. A second run with an older target adds the configurations of that
/// target.
///
/// # Errors
/// The errors of planning and of launching.
pub(crate) fn tune(gpu: &Gpu, file: &Path) -> Result<String> {
    let there = std::fs::read_to_string(file).ok().and_then(|text| Times::read(&text));
    let mut times = there.unwrap_or_default();
    for weights in [Format::Nvfp4, Format::Mxfp4] {
        let most = if weights == Format::Nvfp4 { TOKENS[TOKENS.len() - 1] } else { 8 };
        for [rows, cols] in SHAPES {
            let size = Size { rows, cols, batches: 1, tokens: NonZeroUsize::new(most), top_k: 0 };
            let matrix = matrix(&Recipe::of(weights, Numerics::default_for(weights))?, size)?;
            let activations = random::<bf16>(most * cols, 2);
            let configs = gpu.gemm_configs(matrix.shape());
            let tokens = TOKENS.into_iter().filter(|tokens| *tokens <= most);
            let products: Vec<_> = tokens
                .flat_map(|tokens| {
                    let missing = |config: &&GemmConfig| {
                        is_worth(**config, tokens) && !times.has(**config, [rows, cols, tokens])
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
    tokens > 4 && (tokens <= 8 * tile || tile == 256 || tile == 64)
}
