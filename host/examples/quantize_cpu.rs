//! Quantizes a matrix on the CPU with each library's numerics, and prints the loss.
//!
//! ```text
//! cargo run --release --example quantize_cpu
//! ```

use half::bf16;
use microscale::{Error, ErrorStats, Format, Numerics, Recipe, Shape, Words, cpu, dequantize, quantize};

fn main() -> Result<(), Error> {
    // K need not be a multiple of the block. The last block of a row is padded with zeros, and the
    // shape keeps K.
    let shape = Shape::new(1024, 1000);
    let weights = about_normal(shape.elements());
    let bytes_before = size_of_val(&weights[..]);
    println!("{} rows of {}, bf16, on {}", shape.rows, shape.cols, cpu::Isa::best().word());

    for format in Format::MULTIPLIED {
        for &(name, numerics) in Numerics::WORDS {
            // Not every library has every format.
            let Ok(recipe) = Recipe::of(format, numerics) else { continue };
            let quantized = quantize(&weights, shape, &recipe)?;
            let back: Vec<f32> = dequantize(&quantized.tensor);
            let loss = ErrorStats::between(&weights, &back);
            println!(
                "{format} {name:18}  {bytes_before} bytes became {}, relative squared error {:.5}, {:.2} dB",
                quantized.tensor.bytes(),
                loss.relative_squared_error(),
                loss.sqnr_db(),
            );
        }
    }
    Ok(())
}

/// Returns nearly normal values: sums of four uniform ones.
fn about_normal(count: usize) -> Vec<bf16> {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| bf16::from_f32(uniform() + uniform() + uniform() + uniform())).collect()
}
