//! Times a linear layer or experts with random weights against candle's own.
//!
//! Activations are in f32. Layers take turns in random order: the first product after a layer of
//! candle takes longer, since its threads and caches were another library's. Rows with INT8 round
//! activations, as candle's quantized types do.
//!
//!     cargo run --release -p microscale-candle --example layer_speed -- \
//!         [ROWS COLS [EXPERTS TOP_K]]
//!
//! candle has no experts on CPUs. The example loops over candle's layers, and gives each one the
//! tokens of its expert.

use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Tensor};
use microscale::{Format, Numerics, Recipe};
use microscale_candle::{QExperts, QLinear, RoundedInputs};

/// Time to measure each layer and number of tokens, in rounds of one product per layer.
const TIME: Duration = Duration::from_secs(2);

const USAGE: &str = "pass nothing, ROWS COLS, or ROWS COLS EXPERTS TOP_K";

const HELP: &str = "\
Times a linear layer with random weights against candle's own layers

Usage: layer_speed [ROWS COLS [EXPERTS TOP_K]]

  ROWS COLS   Size of the weights [default: 4096 4096]
  EXPERTS     Number of experts: times a mixture instead of one layer
  TOP_K       Experts per token";

/// A timed product of activations `[tokens, K]` and each token's experts `[tokens, k]`.
type Product = Box<dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>>;

fn main() -> ExitCode {
    if env::args().any(|word| word == "--help" || word == "-h") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    // A `main` that returns an error would print its `Debug` form.
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let size = |word: String| word.parse::<usize>().map_err(|_| format!("{word:?} is not a number; {USAGE}"));
    let sizes = env::args().skip(1).map(size).collect::<Result<Vec<_>, _>>()?;
    let (rows, cols, mixture) = match sizes[..] {
        [] => (4096, 4096, None),
        [rows, cols] => (rows, cols, None),
        [rows, cols, experts, top_k] => (rows, cols, Some((experts, top_k))),
        _ => return Err(USAGE.into()),
    };
    let (experts, top_k) = mixture.unwrap_or((1, 1));
    let weights: Vec<Tensor> =
        (0..experts).map(|expert| random(&[rows, cols], expert as u64 + 1)).collect::<Result<_, _>>()?;
    let nvfp4 = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors)?;
    let mxfp4 = Recipe::of(Format::Mxfp4, Numerics::Ocp)?;
    let products = [
        (
            "candle f32",
            candle(&weights, |weight| Ok(Box::new(candle_nn::Linear::new(weight.clone(), None))))?,
        ),
        ("candle Q4_0", candle(&weights, |weight| ggml(weight, GgmlDType::Q4_0))?),
        ("candle Q4_K", candle(&weights, |weight| ggml(weight, GgmlDType::Q4K))?),
        ("candle Q8_0", candle(&weights, |weight| ggml(weight, GgmlDType::Q8_0))?),
        ("NVFP4", ours(&weights, &nvfp4, None)?),
        ("MXFP4", ours(&weights, &mxfp4, None)?),
        ("NVFP4, INT8", ours(&weights, &nvfp4, Some(RoundedInputs::Int8))?),
        ("MXFP4, INT8", ours(&weights, &mxfp4, Some(RoundedInputs::Int8))?),
    ];

    let threads = candle_core::utils::get_num_threads();
    match mixture {
        None => print!("{rows}×{cols}"),
        Some(_) => print!("{top_k} of {experts} experts of {rows}×{cols} a token"),
    }
    println!(", {threads} threads; ms, median and least");
    println!("| layer | 1 token | 8 tokens | 32 tokens | 128 tokens |\n|---|---|---|---|---|");
    let mut cells = vec![String::new(); products.len()];
    for tokens in [1, 8, 32, 128] {
        let (x, chosen) = (random(&[tokens, cols], 2)?, chosen(tokens, top_k, experts)?);
        eprintln!("measuring: tokens = {tokens}");
        let mut times = vec![Vec::new(); products.len()];
        let mut order: Vec<_> = (0..products.len()).collect();
        let mut rng = fastrand::Rng::with_seed(4);
        let start = Instant::now();
        while start.elapsed() < TIME * products.len() as u32 || times[0].len() < 5 {
            rng.shuffle(&mut order);
            for &i in &order {
                let start = Instant::now();
                std::hint::black_box(products[i].1(&x, &chosen)?);
                times[i].push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        for (cell, mut times) in cells.iter_mut().zip(times) {
            times.sort_by(f64::total_cmp);
            *cell += &format!(" {:.2} ({:.2}) |", times[times.len() / 2], times[0]);
        }
    }
    for ((name, _), cell) in products.iter().zip(cells) {
        println!("| {name} |{cell}");
    }
    Ok(())
}

/// A candle layer, or a loop over several.
fn candle(
    weights: &[Tensor],
    layer: impl Fn(&Tensor) -> candle_core::Result<Box<dyn Module>>,
) -> candle_core::Result<Product> {
    let mut layers = weights.iter().map(layer).collect::<candle_core::Result<Vec<_>>>()?;
    if layers.len() == 1 {
        let layer = layers.remove(0);
        return Ok(Box::new(move |x, _| layer.forward(x)));
    }
    Ok(Box::new(move |x, chosen| {
        let (tokens, top_k) = chosen.dims2()?;
        let mut pairs = vec![Vec::new(); layers.len()];
        for (pair, expert) in chosen.flatten_all()?.to_vec1::<u32>()?.into_iter().enumerate() {
            pairs[expert as usize].push(pair as u32);
        }
        let (mut results, mut places) = (Vec::new(), vec![0u32; tokens * top_k]);
        let mut sorted = 0;
        for (layer, pairs) in layers.iter().zip(&pairs).filter(|(_, pairs)| !pairs.is_empty()) {
            let rows: Vec<u32> = pairs.iter().map(|pair| pair / top_k as u32).collect();
            results.push(layer.forward(&x.index_select(&Tensor::new(rows, x.device())?, 0)?)?);
            for pair in pairs {
                places[*pair as usize] = sorted;
                sorted += 1;
            }
        }
        Tensor::cat(&results, 0)?.index_select(&Tensor::new(places, x.device())?, 0)
    }))
}

fn ggml(weight: &Tensor, dtype: GgmlDType) -> candle_core::Result<Box<dyn Module>> {
    Ok(Box::new(QMatMul::from_qtensor(QTensor::quantize(weight, dtype)?)?))
}

/// A microscale layer, or experts.
fn ours(weights: &[Tensor], recipe: &Recipe, rounded: Option<RoundedInputs>) -> candle_core::Result<Product> {
    let layer = |weight| QLinear::quantize(weight, None, recipe)?.with_activations(rounded);
    if let [weight] = weights {
        let layer = layer(weight)?;
        return Ok(Box::new(move |x, _| layer.forward(x)));
    }
    let layers = weights.iter().map(|weight| Ok(layer(weight)?.weight().clone()));
    let experts = QExperts::new(layers.collect::<candle_core::Result<_>>()?, None)?;
    let experts = experts.with_activations(rounded)?;
    Ok(Box::new(move |x, chosen| experts.forward(x, chosen)))
}

/// Different experts for each token, at random.
fn chosen(tokens: usize, top_k: usize, experts: usize) -> candle_core::Result<Tensor> {
    let mut rng = fastrand::Rng::with_seed(3);
    let of_token = |_| rng.choose_multiple(0..experts as u32, top_k);
    Tensor::from_vec((0..tokens).flat_map(of_token).collect(), (tokens, top_k), &Device::Cpu)
}

fn random(shape: &[usize], seed: u64) -> candle_core::Result<Tensor> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.f32() + rng.f32() - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}
