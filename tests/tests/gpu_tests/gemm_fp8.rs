//! Tests products of 4-bit weights and FP8 activations.
//!
//! Results must have the bits of the definition where no work tile is split, and elsewhere differ by
//! the roundings of f32 additions.

use half::bf16;
use microscale::formats::{E4m3, fp4_dot, fp8_dot};
use microscale::gpu::{DeviceEpilogue, DeviceTensor, Fp8Activations, GemmWorkspace, Gpu};
use microscale::{
    ActivationFormat, ActivationInput, ActivationRecipe, Error, Format, Fp8Scale, OperandFault,
    QuantizedActivations, QuantizedTensor, Shape, quantize_activations,
};
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, tensor};

/// Returns whether the GPU has these products.
fn has_fp8(gpu: &Gpu) -> bool {
    gpu.info().compute_capability == (9, 0)
}

/// Random activations, quantized on the CPU.
fn activations(tokens: usize, cols: usize, per_group: bool, seed: u64) -> (Vec<bf16>, QuantizedActivations) {
    let mut random = fastrand::Rng::with_seed(seed);
    let x: Vec<_> = (0..tokens * cols).map(|_| bf16::from_f32(random.f32() * 4.0 - 2.0)).collect();
    let scale = if per_group { Fp8Scale::PerGroup { power_of_two: false } } else { Fp8Scale::PerToken };
    let recipe = ActivationRecipe::new(ActivationFormat::Fp8(scale));
    let quantized = quantize_activations(ActivationInput::new(&x, Shape::new(tokens, cols)), &recipe);
    (x, quantized.unwrap())
}

/// The product by its definition, or with the magnitudes of all operands.
fn defined(weights: &QuantizedTensor, x: &QuantizedActivations, tokens: usize, magnitudes: bool) -> Vec<f32> {
    let (format, cols, rows) = (weights.format(), weights.cols(), weights.rows());
    let blocks = weights.blocks_per_row();
    let bytes = blocks * format.block_bytes();
    let [of_weights, of_x] = if magnitudes { [0x77, 0x7F] } else { [0xFF; 2] };
    let codes: Vec<_> = x.codes.iter().map(|code| E4m3::from_bits(code & of_x)).collect();
    let weight_codes: Vec<u8> = weights.codes().iter().map(|code| code & of_weights).collect();
    let each = x.f32_scales.len() / tokens;
    let factor = fp4_dot::factor(1.0, [None, weights.global_scale()]);
    let mut sums = Vec::new();
    for token in 0..tokens {
        let scales = &x.f32_scales[token * each..][..each];
        let scales =
            if each > 1 { fp8_dot::Scales::Packs(scales) } else { fp8_dot::Scales::Token(scales[0]) };
        for row in 0..rows {
            let weights = fp8_dot::Weights {
                format,
                codes: &weight_codes[row * bytes..][..bytes],
                scales: &weights.scales()[row * blocks..][..blocks],
            };
            sums.push(factor * fp8_dot::row::<Scalars>(weights, &codes[token * cols..][..cols], scales));
        }
    }
    sums
}

/// Multiplies on the GPU, from 16-bit values and from FP8, which must give the same bits.
fn multiplied(
    gpu: &Gpu,
    weights: &QuantizedTensor,
    (x, quantized): &(Vec<bf16>, QuantizedActivations),
    tokens: usize,
    per_group: bool,
) -> Vec<f32> {
    let stream = gpu.stream();
    let rows = weights.rows();
    let weights = DeviceTensor::from_host(stream, weights).unwrap();
    let linear = gpu.linear_fp8::<bf16, f32>(&weights).round_weights();
    let linear = if per_group { linear.per_group() } else { linear };
    let plan = linear.plan(tokens).unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.alloc_zeros::<f32>(tokens * rows).unwrap();
    let (x, codes) = (stream.clone_htod(x).unwrap(), stream.clone_htod(&quantized.codes).unwrap());
    let scales = stream.clone_htod(&quantized.f32_scales).unwrap();
    let given = Fp8Activations::Quantized { codes: (&codes).into(), scales: (&scales).into() };
    let found = [Fp8Activations::Values((&x).into()), given].map(|x| {
        // Twice: the workspace must be left as it was found.
        for _ in 0..2 {
            plan.run(stream, x, &mut workspace, &mut out).unwrap();
        }
        stream.clone_dtoh(&out).unwrap()
    });
    let [from_values, from_fp8] = found;
    assert!(from_values.iter().zip(&from_fp8).all(|(a, b)| a.to_bits() == b.to_bits()));
    from_values
}

pub(crate) fn equals_its_definition(gpu: &Gpu) {
    if !has_fp8(gpu) {
        return;
    }
    let shapes: [(usize, usize, usize); 9] = [
        (256, 128, 120),
        (300, 128, 9),
        (1, 32, 1),
        (35, 128, 5),
        (200, 380, 17),
        (17, 1152, 70),
        (40, 416, 130),
        (300, 1024, 260),
        (130, 4096, 33),
    ];
    for format in Format::MULTIPLIED {
        for (seed, (rows, cols, tokens)) in (0..).zip(shapes) {
            // NVFP4's rows of scales are whole words.
            let cols = if format == Format::Nvfp4 { cols.next_multiple_of(64) } else { cols };
            for per_group in [false, true] {
                let weights = tensor(format, rows, cols, Scales::Common, seed);
                let x = activations(tokens, cols, per_group, seed + 1);
                let found = multiplied(gpu, &weights, &x, tokens, per_group);
                let right = defined(&weights, &x.1, tokens, false);
                let magnitudes = defined(&weights, &x.1, tokens, true);
                // Parts of split work tiles are rounded when they are added, and products that are
                // left out are added to other parts. With another global scale than 1, sums are
                // rounded once more.
                let exact = cols <= 128 && format == Format::Mxfp4;
                let of_magnitude = if exact { 0.0 } else { (4 + cols) as f32 * 2f32.powi(-24) };
                for (i, (found, right)) in found.iter().zip(&right).enumerate() {
                    let allowed = of_magnitude * magnitudes[i];
                    let near = found.to_bits() == right.to_bits() || (found - right).abs() <= allowed;
                    let (token, row) = (i / rows, i % rows);
                    assert!(
                        near,
                        "{format} {rows}x{cols}, {tokens} tokens, per group: {per_group}: {found:e} is not \
                         {right:e}: token {token}, row {row}"
                    );
                }
            }
        }
    }
}

pub(crate) fn is_refused_where_it_would_lose(gpu: &Gpu) {
    let stream = gpu.stream();
    let weights =
        |format| DeviceTensor::from_host(stream, &tensor(format, 16, 64, Scales::Common, 1)).unwrap();
    let (nvfp4, mxfp4) = (weights(Format::Nvfp4), weights(Format::Mxfp4));
    let error = gpu.linear_fp8::<bf16, bf16>(&nvfp4).plan(2).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::RoundedWeights)), "{error}");
    let plan = gpu.linear_fp8::<bf16, bf16>(&mxfp4).epilogue(DeviceEpilogue::default()).plan(2);
    if !has_fp8(gpu) {
        let error = plan.unwrap_err();
        assert!(matches!(error, Error::Operands(OperandFault::NoFp8)), "{error}");
        return;
    }
    let plan = plan.unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut out = stream.alloc_zeros::<bf16>(32).unwrap();
    let x = stream.alloc_zeros::<bf16>(127).unwrap();
    let error = plan.run(stream, Fp8Activations::Values((&x).into()), &mut workspace, &mut out).unwrap_err();
    assert!(matches!(error, Error::Length { .. }), "{error}");
}
