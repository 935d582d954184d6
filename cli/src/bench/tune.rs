//! Choosing kernels for products: tables of the fastest, or of times, over sizes.

use std::num::NonZeroUsize;

use microscale::gpu::{GemmTimes, GemvChoices, GemvKernel, GemvWeightsChoices, GemvWeightsKernel, Gpus};
use microscale::{Convention, Device, Dtype, Error, Format, QuantizedTensor, Recipe, Result, Words};

use super::case::Case;
use super::gpu::Effort;
use super::gpu::WeightsKernel;
use super::measure;
use super::measurement::Measurement;
use super::op::Op;
use super::product::matrix_bytes;
use super::size::Size;
use super::weights::{WeightsProduct, by_kernels};

/// Measures which kernel is the fastest, over the sizes of a table of choices, for results in f16: the table
/// as a file.
///
/// # Errors
/// Those of [`super::measure`], at the first measurement that fails.
pub(crate) fn gemv(
    recipe: &Recipe,
    device: &Device,
    mut measured: impl FnMut(Measurement),
) -> Result<String> {
    let choices = GemvChoices::new(|rows, cols| {
        let size = Size { rows, cols, batches: 1, tokens: None, top_k: 0 };
        let mut fastest = (f64::INFINITY, None);
        for op in Op::GEMV_KERNELS {
            let case = Case { op, recipe: *recipe, dtype: Dtype::F16, size, kernel: None };
            let measurement = measure(&case, device)?;
            if measurement.median_seconds < fastest.0 {
                fastest = (measurement.median_seconds, op.gemv_kernel());
            }
            measured(measurement);
        }
        Ok(fastest.1.unwrap_or(GemvKernel::Rows4))
    })?;
    Ok(choices.text(&format!("{device}, {}", recipe.format())))
}

/// Measures which kernel is the fastest, over the formats and sizes of the tables of choices, with
/// activations in bf16: the tables as a file. Of each size and number of tokens the fastest kernel's
/// measurement is told.
///
/// # Errors
/// Those of [`super::measure`], at the first measurement that fails.
pub(crate) fn gemv_weights(device: &Device, mut measured: impl FnMut(Measurement)) -> Result<String> {
    let gpus = gpus(device)?;
    let all = GemvWeightsChoices::TOKENS;
    let products = all.iter().flat_map(|&tokens| {
        // Kernels for more tokens at a time than are measured here are chosen by the times of `gemm_weights`.
        let most = all[all.len() - 1];
        let kernels = GemvWeightsKernel::all()
            .filter(move |kernel| kernel.tokens() <= most && (kernel.tokens() == 1) == (tokens == 1));
        kernels.map(move |kernel| (tokens, kernel))
    });
    let products: Vec<_> = products.collect();
    let choices = GemvWeightsChoices::new(|format, rows, cols| {
        let recipe = &Recipe::of(format, Convention::default_for(format))?;
        let size = Size { rows, cols, batches: 1, tokens: NonZeroUsize::new(all[all.len() - 1]), top_k: 0 };
        let product = WeightsProduct::<half::bf16>::new(recipe, size)?;
        let by = products.iter().map(|(tokens, kernel)| (*tokens, WeightsKernel::Gemv(*kernel)));
        let times = by_kernels(&product, gpus.first(), &by.collect::<Vec<_>>(), Effort::LESS)?;
        Ok(all.map(|tokens| {
            let of_these = products.iter().zip(&times).filter(|((of, _), _)| *of == tokens);
            let fastest = of_these.min_by(|(_, a), (_, b)| a.total_cmp(b));
            // There is a kernel for any number of tokens.
            let chosen = (GemvWeightsKernel::choose(product.weights.shape(), tokens), f64::INFINITY);
            let (kernel, median_seconds) =
                fastest.map_or(chosen, |((_, kernel), seconds)| (*kernel, *seconds));
            let size = Size { tokens: NonZeroUsize::new(tokens), ..size };
            measured(measurement(
                (Op::GemvWeights, *recipe, size),
                device,
                &product.weights,
                (kernel.word(), median_seconds),
            ));
            kernel
        }))
    })?;
    Ok(choices.text(&format!("{device}, bf16")))
}

/// Measures how long each kernel for more than eight tokens takes, over the sizes of [`GemmTimes`], with weights in NVFP4 and
/// activations in bf16: the times as a file.
///
/// # Errors
/// The errors of [`super::measure`], at the first measurement that fails.
pub(crate) fn gemm_weights(device: &Device, mut measured: impl FnMut(Measurement)) -> Result<String> {
    let gpus = gpus(device)?;
    let recipe = Recipe::of(Format::Nvfp4, Convention::default_for(Format::Nvfp4))?;
    let mut times = GemmTimes::default();
    for [rows, cols] in GemmTimes::SHAPES {
        let size = |tokens| Size { rows, cols, batches: 1, tokens: NonZeroUsize::new(tokens), top_k: 0 };
        for tokens in GemmTimes::TOKENS {
            let product = WeightsProduct::<half::bf16>::new(&recipe, size(tokens))?;
            let few = GemmTimes::few(tokens).map(|kernel| (kernel.word(), WeightsKernel::Gemv(kernel)));
            let many = gpus.first().gemm_kernels().filter(|kernel| GemmTimes::takes(*kernel, tokens));
            let many = many.map(|kernel| (kernel.word(), WeightsKernel::Gemm(Some(kernel))));
            let kernels: Vec<_> = few.chain(many).collect();
            let by: Vec<_> = kernels.iter().map(|(_, kernel)| (tokens, *kernel)).collect();
            for ((word, _), seconds) in
                kernels.iter().zip(by_kernels(&product, gpus.first(), &by, Effort::LESS)?)
            {
                times.add([rows, cols, tokens], word, seconds * 1e6);
                measured(measurement(
                    (Op::GemmWeights, recipe, size(tokens)),
                    device,
                    &product.weights,
                    (word, seconds),
                ));
            }
        }
    }
    Ok(times.text(&format!("{device}, nvfp4, bf16")))
}

/// The GPUs of a device.
fn gpus(device: &Device) -> Result<&Gpus> {
    match device {
        Device::Gpus(gpus) => Ok(gpus),
        Device::Cpu => Err(Error::NoGpu("kernels are chosen for GPUs only".into())),
    }
}

/// The measurement of a kernel that multiplies weights with activations in bf16.
fn measurement(
    (op, recipe, size): (Op, Recipe, Size),
    device: &Device,
    weights: &QuantizedTensor,
    (kernel, median_seconds): (&'static str, f64),
) -> Measurement {
    Measurement {
        op,
        recipe,
        dtype: Dtype::Bf16,
        size,
        device: device.to_string(),
        threads: 0,
        bytes: matrix_bytes(weights) as u64,
        median_seconds,
        read_seconds: None,
        copy_seconds: None,
        kernel: Some(kernel),
        tensor_cores_per_second: None,
    }
}
