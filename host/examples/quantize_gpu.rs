//! Quantizes and dequantizes on a GPU with data that stays there.
//!
//! The example uses device buffers, its own stream, and one report that it reads once. Without a
//! GPU it prints why there is none.
//!
//! ```text
//! cargo run --release --example quantize_gpu
//! ```

use std::error::Error;

use half::bf16;
use microscale::gpu::{DeviceQuantizeOptions, DeviceReport, DeviceTensor, Gpu};
use microscale::{ErrorStats, NonFinite, QuantizedShape, Recipe, Shape, dequantize, quantize};

const LAYERS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(microscale::Error::NoGpu(why)) => {
            println!("no GPU: {why}");
            return Ok(());
        }
        Err(other) => return Err(other.into()),
    };
    println!("{} with the PTX for {}", gpu.info().name, gpu.info().target.unwrap_or("none"));

    let shape = Shape::new(1024, 4096);
    // A kernel cannot refuse input. Blocks with NaN or infinities become NaN blocks, and the report
    // counts them.
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::default() };
    let stream = gpu.context().new_stream()?;

    // Everything is allocated before the work starts. The report accumulates the counts of all
    // layers.
    let layers: Vec<Vec<bf16>> = (0..LAYERS).map(|layer| weights(shape.elements(), layer)).collect();
    let inputs = layers.iter().map(|layer| stream.clone_htod(layer)).collect::<Result<Vec<_>, _>>()?;
    let mut report = DeviceReport::zeros(&stream)?;
    let mut tensors = Vec::new();
    for _ in 0..LAYERS {
        let quantized = QuantizedShape::new(recipe.format(), shape.rows, shape.cols);
        tensors.push(DeviceTensor::zeros(&stream, quantized)?);
    }
    let mut back = stream.alloc_zeros::<f32>(shape.elements())?;

    // Each call enqueues one kernel and returns. Nothing is copied, and nothing waits.
    for (input, tensor) in inputs.iter().zip(&mut tensors) {
        gpu.quantize_on(
            &stream,
            input,
            shape,
            &recipe,
            DeviceQuantizeOptions::new().report(&mut report),
            tensor,
        )?;
    }
    gpu.dequantize_on(&stream, &tensors[0], &mut back, shape.cols)?;

    // Reading waits for the stream.
    let report = report.read(&stream, shape, recipe.format())?;
    println!(
        "{LAYERS} layers quantized: {} blocks clipped, {} NaN, {} infinite",
        report.clipped_blocks, report.nan, report.infinite
    );
    let back = stream.clone_dtoh(&back)?;
    stream.synchronize()?;
    let loss = ErrorStats::between(&layers[0], &back);
    println!("the first layer's relative squared error: {:.5}", loss.relative_squared_error());

    let on_cpu = quantize(&layers[0], shape, &recipe)?.tensor;
    let same = tensors[0].to_host(&stream)? == on_cpu && back == dequantize::<f32>(&on_cpu);
    println!("the CPU gives {}", if same { "the same bytes" } else { "OTHER BYTES: please report this" });
    Ok(())
}

/// Returns values that stand for a layer's weights: a sum of waves, different for every layer.
fn weights(count: usize, layer: usize) -> Vec<bf16> {
    let wave = |i: usize, frequency: f32| ((i + 1000 * layer) as f32 * frequency).sin();
    let value = |i| wave(i, 0.37) + wave(i, 0.71) + wave(i, 1.3);
    (0..count).map(|i| bf16::from_f32(0.02 * value(i))).collect()
}
