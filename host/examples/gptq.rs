//! Quantizes a layer by GPTQ from files of f32, and prints times and the layer's loss.
//!
//!     gptq WEIGHTS HESSIAN ROWS COLUMNS FORMAT [--search SEARCH] [--static]
//!         [--natural | --columns] [--numerics NUMERICS] [--damping DAMPING] [--dequantized FILE]
//!         [--device DEVICE]
//!
//! WEIGHTS is `[rows, columns]` and HESSIAN `[columns, columns]`, little-endian. With `random`
//! instead of a file they are random, with correlated inputs. `--dequantized` writes the
//! dequantized matrix. With `--device cuda`, a GPU quantizes too, and its bytes are compared. Its
//! time includes copies of weights and result, but not of the factor.

use std::error::Error;
use std::time::Instant;

use microscale::{
    Device, DeviceChoice, Format, GptqFactor, GptqOptions, GptqOrder, GptqScales, Numerics, Recipe, Search,
    Shape, dequantize, quantize, quantize_gptq,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut positional = Vec::new();
    let mut options = GptqOptions::new();
    let (mut scales, mut search) = (GptqScales::InLoop, Search::None);
    let (mut numerics, mut dequantized, mut device) = (None, None, DeviceChoice::Cpu);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or("a value is missing");
        match arg.as_str() {
            "--search" => search = value()?.parse()?,
            "--numerics" => numerics = Some(value()?.parse::<Numerics>()?),
            "--damping" => options = options.damping(value()?.parse()?),
            "--dequantized" => dequantized = Some(value()?),
            "--device" => device = value()?.parse()?,
            "--static" => scales = GptqScales::Static,
            "--columns" => options = options.order(GptqOrder::ActivationColumns),
            "--natural" => options = options.order(GptqOrder::Natural),
            _ => positional.push(arg),
        }
    }
    let [weights, hessian, rows, columns, format] = &positional[..] else {
        return Err("usage: gptq WEIGHTS HESSIAN ROWS COLUMNS FORMAT [options]".into());
    };
    let shape = Shape::new(rows.parse()?, columns.parse()?);
    let format: Format = format.parse()?;
    let numerics = numerics.unwrap_or(Numerics::default_for(format));
    let recipe = Recipe { search, ..Recipe::of(format, numerics)? };
    let weights = if weights == "random" { random(shape.elements()) } else { read(weights)? };
    let hessian = if hessian == "random" { correlated(shape.cols) } else { read(hessian)? };

    let start = Instant::now();
    let factor = GptqFactor::new(&hessian, shape.cols, format, options)?;
    println!("factor_s {:.3}", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let gptq = quantize_gptq(&weights, shape, &recipe, &factor, scales)?;
    println!("loop_s {:.3}", start.elapsed().as_secs_f64());
    if device != DeviceChoice::Cpu {
        let device = Device::choose(device)?;
        let quantize = || device.quantize_gptq(&weights, shape, &recipe, &factor, scales);
        // The first call compiles kernels and copies the factor.
        let start = Instant::now();
        let found = quantize()?;
        println!("device_first_s {:.3}", start.elapsed().as_secs_f64());
        if found != gptq {
            return Err(format!("{device} gives other bytes than the CPU").into());
        }
        let mut times: Vec<f64> = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            quantize()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        println!("device_s {:.4} (median of 5, {:.4} to {:.4}), {device}", times[2], times[0], times[4]);
    }
    let plain = quantize(&weights, shape, &recipe)?;
    let start = Instant::now();
    for (name, tensor) in [("gptq", &gptq.tensor), ("plain", &plain.tensor)] {
        println!("{name}_loss {:.6e}", factor.output_loss(&weights, shape, tensor)?.relative());
    }
    println!("losses_s {:.3}", start.elapsed().as_secs_f64());
    println!("tried_per_block {:.2}", gptq.report.tried_scales as f64 / gptq.tensor.scales().len() as f64);
    if let Some(file) = dequantized {
        let values: Vec<f32> = dequantize(&gptq.tensor);
        std::fs::write(file, bytemuck::cast_slice(&values))?;
    }
    Ok(())
}

/// Reads a file of f32.
fn read(file: &str) -> Result<Vec<f32>, Box<dyn Error>> {
    let bytes = std::fs::read(file)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Returns nearly normal numbers.
fn random(count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(1);
    (0..count).map(|_| 0.02 * ((0..4).map(|_| random.f32()).sum::<f32>() - 2.0)).collect()
}

/// Returns the Hessian of inputs whose columns are correlated with their neighbours'.
fn correlated(columns: usize) -> Vec<f32> {
    let size = |i: usize| if i % 61 == 7 { 8.0 } else { 1.0 + (i as f32 * 0.7).sin() * 0.5 };
    let entry = |i: usize, j: usize| 0.98f32.powi(i.abs_diff(j) as i32) * size(i) * size(j);
    (0..columns * columns).map(|at| entry(at / columns, at % columns)).collect()
}
