//! Times a linear layer of random weights, activations in f32, beside candle's own, in turns.
//!
//!     cargo run --release -p microscale-candle --example layer_speed -- [ROWS COLS]

use std::env;
use std::error::Error;
use std::time::{Duration, Instant};

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Tensor};
use microscale::{Convention, Format, Recipe};
use microscale_candle::QLinear;

/// How long each layer and number of tokens is measured, in turns of at least one product.
const TIME: Duration = Duration::from_secs(2);

fn main() -> Result<(), Box<dyn Error>> {
    let sizes = env::args().skip(1).map(|word| word.parse()).collect::<Result<Vec<usize>, _>>()?;
    let [rows, cols] = sizes.try_into().unwrap_or([4096, 4096]);
    let weight = random(&[rows, cols], 1)?;
    let ggml = |dtype| -> Result<Box<dyn Module>, Box<dyn Error>> {
        Ok(Box::new(QMatMul::from_qtensor(QTensor::quantize(&weight, dtype)?)?))
    };
    let quantized = |format, convention| -> Result<Box<dyn Module>, Box<dyn Error>> {
        Ok(Box::new(QLinear::quantize(&weight, None, &Recipe::of(format, convention)?)?))
    };
    let layers = [
        ("candle f32", Box::new(candle_nn::Linear::new(weight.clone(), None)) as Box<dyn Module>),
        ("candle Q4_0", ggml(GgmlDType::Q4_0)?),
        ("candle Q4_K", ggml(GgmlDType::Q4K)?),
        ("NVFP4", quantized(Format::Nvfp4, Convention::CompressedTensors)?),
        ("MXFP4", quantized(Format::Mxfp4, Convention::Ocp)?),
    ];

    println!("{rows}×{cols}, {} threads; ms, median and least", std::thread::available_parallelism()?);
    println!("| layer | 1 token | 8 tokens | 128 tokens |\n|---|---|---|---|");
    let mut cells = vec![String::new(); layers.len()];
    for tokens in [1, 8, 128] {
        let x = random(&[tokens, cols], 2)?;
        let mut times = vec![Vec::new(); layers.len()];
        let start = Instant::now();
        while start.elapsed() < TIME * layers.len() as u32 || times[0].len() < 5 {
            for ((_, layer), times) in layers.iter().zip(&mut times) {
                let start = Instant::now();
                std::hint::black_box(layer.forward(&x)?);
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        for (cell, mut times) in cells.iter_mut().zip(times) {
            times.sort_by(f64::total_cmp);
            *cell += &format!(" {:.2} ({:.2}) |", times[times.len() / 2], times[0]);
        }
    }
    for ((name, _), cell) in layers.iter().zip(cells) {
        println!("| {name} |{cell}");
    }
    Ok(())
}

fn random(shape: &[usize], seed: u64) -> candle_core::Result<Tensor> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.f32() + rng.f32() - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}
