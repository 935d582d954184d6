//! Tests products of 4-bit weights and FP8 activations.
//!
//! Results must have the bits of the definition where no work tile is split, and elsewhere differ
//! by the roundings of f32 additions.

use half::bf16;
use microscale::formats::{E4m3, fp4_dot, fp8_dot};
use microscale::gpu::{
    DeviceEpilogue, DeviceExperts, DeviceRouting, DeviceTensor, ExpertRows, Fp4, Fp8Activations, GemmConfig,
    GemmWorkspace, Gpu, Linear,
};
use microscale::{
    ActivationFormat, ActivationInput, ActivationRecipe, Dtype, Error, Format, Fp8Options, Fp8Rows, Fp8Scale,
    OperandFault, QuantizedActivations, QuantizedTensor, ScaleLayout, Shape, gemm_experts_fp8,
    quantize_activations,
};
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, in_fp8, sum_in_fp8, tensor};

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

/// Which sums of products a definition adds in f32.
#[derive(Clone, Copy, PartialEq)]
enum Sums {
    Packs,
    Blocks,
    /// None: fast accumulation.
    Rows,
}

impl Sums {
    fn of(config: Option<GemmConfig>) -> Self {
        match config {
            Some(config) if config.multiplies_blocks() => Self::Blocks,
            Some(config) if config.mainloop.accumulates_fast() => Self::Rows,
            _ => Self::Packs,
        }
    }
}

/// The product by its definition, or with the magnitudes of all operands.
fn defined(
    weights: &QuantizedTensor,
    x: &QuantizedActivations,
    tokens: usize,
    magnitudes: bool,
    sums_of: Sums,
) -> Vec<f32> {
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
            let codes = &codes[token * cols..][..cols];
            let sum = match scales {
                fp8_dot::Scales::Token(scale) if sums_of == Sums::Rows => {
                    fp8_dot::fast_row::<Scalars>(weights, weights.row_base(), codes, scale)
                }
                _ => sum_in_fp8(sums_of == Sums::Blocks, weights, codes, scales),
            };
            sums.push(factor * sum);
        }
    }
    sums
}

/// Multiplies on the GPU, from 16-bit values and from FP8, which must give the same bits. Returns
/// the plan's configuration, too.
fn multiplied(
    gpu: &Gpu,
    weights: &QuantizedTensor,
    (x, quantized): &(Vec<bf16>, QuantizedActivations),
    tokens: usize,
    options: Fp8Options,
    config: Option<GemmConfig>,
) -> (Vec<f32>, Option<GemmConfig>) {
    let stream = gpu.stream();
    let rows = weights.rows();
    let weights = DeviceTensor::from_host(stream, weights).unwrap();
    let linear = gpu.linear_fp8::<bf16, f32>(&weights).options(options);
    let linear = config.map_or(linear, |config| linear.by(config));
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
    (from_values, plan.config())
}

pub(crate) fn equals_its_definition(gpu: &Gpu) {
    if !has_fp8(gpu) {
        return;
    }
    let shapes: [(usize, usize, usize); 10] = [
        // Longer rows are quantized by a kernel of its own.
        (3, 8448, 5),
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
                let options = Fp8Options { per_group, round_weights: true, ..Fp8Options::default() };
                // Parts of split work tiles are rounded when they are added, and products that are
                // left out are added to other parts. With another global scale than 1, sums are
                // rounded once more.
                let exact = cols <= 128 && format == Format::Mxfp4;
                let of_magnitude = if exact { 0.0 } else { (4 + cols) as f32 * 2f32.powi(-24) };
                let blocks = if format == Format::Mxfp4 { Sums::Blocks } else { Sums::Packs };
                let definitions = [Sums::Packs, blocks].map(|sums| {
                    [false, true].map(|magnitudes| defined(&weights, &x.1, tokens, magnitudes, sums))
                });
                let configs = GemmConfig::for_fp8(format, Dtype::Bf16);
                let configs = configs.filter(|config| !config.mainloop.accumulates_fast());
                for config in configs.map(Some).chain([None]) {
                    let (found, config) = multiplied(gpu, &weights, &x, tokens, options, config);
                    let [right, magnitudes] = &definitions[usize::from(Sums::of(config) == Sums::Blocks)];
                    for (i, (found, right)) in found.iter().zip(right).enumerate() {
                        let allowed = of_magnitude * magnitudes[i];
                        let near = found.to_bits() == right.to_bits() || (found - right).abs() <= allowed;
                        let (token, row) = (i / rows, i % rows);
                        assert!(
                            near,
                            "{config:?}, {rows}x{cols}, {tokens} tokens, per group: {per_group}: {found:e} is \
                             not {right:e}: token {token}, row {row}"
                        );
                    }
                }
            }
        }
    }
}

pub(crate) fn fast_accumulation_equals_its_definition(gpu: &Gpu) {
    if !has_fp8(gpu) {
        return;
    }
    let options = Fp8Options { round_weights: true, fast_accumulation: true, ..Fp8Options::default() };
    let shapes: [(usize, usize, usize); 6] =
        [(300, 128, 9), (1, 32, 1), (35, 96, 5), (200, 380, 70), (40, 1152, 260), (136, 2048, 33)];
    let mut numbers = 0;
    for format in Format::MULTIPLIED {
        for (seed, (rows, cols, tokens)) in (0..).zip(shapes) {
            // NVFP4's rows of scales are whole words.
            let cols = if format == Format::Nvfp4 { cols.next_multiple_of(64) } else { cols };
            let weights = tensor(format, rows, cols, Scales::Common, seed);
            let x = activations(tokens, cols, false, seed + 1);
            let right = defined(&weights, &x.1, tokens, false, Sums::Rows);
            let magnitudes = defined(&weights, &x.1, tokens, true, Sums::Rows);
            // One pack is never split. Parts of longer rows keep other bits, and another global
            // scale than 1 rounds once more.
            let exact = cols <= 128 && format == Format::Mxfp4;
            let each = cols.div_ceil(32) as f32 * 2f32.powi(-13);
            let configs = GemmConfig::for_fp8(format, Dtype::Bf16);
            for config in configs.filter(|config| config.mainloop.accumulates_fast()) {
                let (found, _) = multiplied(gpu, &weights, &x, tokens, options, Some(config));
                for (i, (found, right)) in found.iter().zip(&right).enumerate() {
                    let allowed = if exact { 0.0 } else { each * magnitudes[i] };
                    let near = found.to_bits() == right.to_bits() || (found - right).abs() <= allowed;
                    let (token, row) = (i / rows, i % rows);
                    assert!(
                        near,
                        "{config}, {rows}x{cols}, {tokens} tokens: {found:e} is not {right:e}: token {token}, \
                         row {row}"
                    );
                    numbers += usize::from(exact);
                }
            }
        }
    }
    assert!(numbers > 0);
}

pub(crate) fn fast_accumulation_of_mxfp4_has_the_bits_of_fp8(gpu: &Gpu) {
    if !has_fp8(gpu) {
        return;
    }
    let (stream, options) = (gpu.stream(), Fp8Options { fast_accumulation: true, ..Fp8Options::default() });
    let shapes: [(usize, usize, usize); 7] = [
        (300, 128, 9),
        (1, 32, 1),
        (35, 96, 5),
        (200, 416, 70),
        (40, 1152, 260),
        (136, 2144, 33),
        (600, 4096, 600),
    ];
    for (seed, (rows, cols, tokens)) in (0..).zip(shapes) {
        let weights = tensor(Format::Mxfp4, rows, cols, Scales::Common, seed);
        let scales = [Scales::Common, Scales::Any, Scales::Numbers][seed as usize % 3];
        let (x, alpha) =
            (tensor(Format::Mxfp4, tokens, cols, scales, seed + 1), [1.0, -0.75][seed as usize % 2]);
        let (codes, token_scales) = in_fp8(&x, alpha);
        let codes = stream.clone_htod(&codes).unwrap();
        let token_scales = stream.clone_htod(&token_scales).unwrap();
        let given = Fp8Activations::Quantized { codes: (&codes).into(), scales: (&token_scales).into() };
        let weights = DeviceTensor::from_host(stream, &weights).unwrap();
        let configs = GemmConfig::for_fp8(Format::Mxfp4, Dtype::Bf16);
        for config in configs.filter(|config| config.mainloop.accumulates_fast()) {
            let mut right = stream.alloc_zeros::<f32>(tokens * rows).unwrap();
            let plan =
                gpu.linear_fp8::<bf16, f32>(&weights).options(options).by(config).plan(tokens).unwrap();
            let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
            plan.run(stream, given, &mut workspace, &mut right).unwrap();
            let right = stream.clone_dtoh(&right).unwrap();
            for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
                let x = DeviceTensor::from_host(stream, &x.convert_layout(layout)).unwrap();
                let mut found = stream.alloc_zeros::<f32>(tokens * rows).unwrap();
                let linear = gpu.linear_fp4::<bf16, f32>(&weights).alpha(alpha).fast_accumulation();
                let plan = linear.by(config).plan(tokens).unwrap();
                assert_eq!(plan.config().map(|config| config.mainloop), Some(config.mainloop));
                let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
                for _ in 0..2 {
                    plan.run(stream, &x, &mut workspace, &mut found).unwrap();
                }
                let found = stream.clone_dtoh(&found).unwrap();
                for (i, (found, right)) in found.iter().zip(&right).enumerate() {
                    let equal = found.to_bits() == right.to_bits() || (found.is_nan() && right.is_nan());
                    let (token, row) = (i / rows, i % rows);
                    assert!(
                        equal,
                        "{config}, {rows}x{cols}, {tokens} tokens, {layout:?}: {found:e} is not {right:e}: token \
                         {token}, row {row}"
                    );
                }
            }
        }
    }
    // Without the option, and where it is slower, products have 16 bits.
    let weights =
        DeviceTensor::from_host(stream, &tensor(Format::Mxfp4, 4096, 4096, Scales::Common, 1)).unwrap();
    let in_fp8 = |linear: Linear<'_, bf16, bf16, Fp4>, tokens: usize| {
        let plan = linear.plan(tokens).unwrap();
        let most = gpu.fp4_workspace_bytes(weights.shape(), tokens, false).unwrap();
        assert!(plan.workspace_bytes() <= most, "{tokens} tokens");
        plan.config().unwrap().mainloop.takes_fp8()
    };
    let linear = gpu.linear_fp4::<bf16, bf16>(&weights);
    assert!(!in_fp8(linear, 4096) && !in_fp8(linear.fast_accumulation(), 1));
    assert!(in_fp8(linear.fast_accumulation(), 4096));
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

/// Experts' products in an order of rows, on the GPU and on the CPU. K of up to 128 columns is never
/// split, so sums of packs have the CPU's bits there. Sums of blocks are near them; the executor's
/// cases compare their bits.
fn check_experts(gpu: &Gpu, config: Option<GemmConfig>, cols: usize, order: ExpertRows, per_group: bool) {
    let (stream, format) = (gpu.stream(), Format::Mxfp4);
    let (rows, top_k, count) = (300, 2, 5);
    let mut random = fastrand::Rng::with_seed(cols as u64);
    let experts: Vec<_> =
        (0..count).map(|expert| tensor(format, rows, cols, Scales::Common, 3 * expert + 2)).collect();
    // Expert 2 has no rows, and numbers from `count` on leave their pairs out.
    let chosen: Vec<u32> = (0..200).map(|_| [0, 0, 0, 1, 3, 4, 5, u32::MAX][random.usize(..8)]).collect();
    let (pairs, options) = (chosen.len(), Fp8Options { per_group, ..Fp8Options::default() });
    let by_token = matches!(order, ExpertRows::Gathered | ExpertRows::Indexed);
    let tokens = if by_token { pairs / top_k } else { pairs };
    let (x, quantized) = activations(tokens, cols, per_group && cols > 128, 1);
    let mut right = vec![7f32; pairs * rows];
    let x_rows = Fp8Rows::Quantized { codes: &quantized.codes, scales: &quantized.f32_scales };
    gemm_experts_fp8(&experts, x_rows, &chosen, top_k, order, options, &mut right).unwrap();

    let there = DeviceExperts::from_host(stream, &experts).unwrap();
    let mut routing = DeviceRouting::zeros(stream, experts.len(), pairs + 3).unwrap();
    gpu.route_on(stream, &stream.clone_htod(&chosen).unwrap(), top_k, &mut routing).unwrap();
    let linear = gpu.linear_experts_fp8::<bf16, f32>(&there).options(options);
    let linear = config.map_or(linear, |config| linear.by(config));
    let plan = linear.plan(pairs).unwrap();
    let needed = plan.workspace_bytes();
    assert!(needed <= gpu.experts_fp8_workspace_bytes(&there, pairs).unwrap());
    let mut workspace = GemmWorkspace::new(stream, needed).unwrap();
    let (x, codes) = (stream.clone_htod(&x).unwrap(), stream.clone_htod(&quantized.codes).unwrap());
    let scales = stream.clone_htod(&quantized.f32_scales).unwrap();
    let given = Fp8Activations::Quantized { codes: (&codes).into(), scales: (&scales).into() };
    let what = format!("{:?}, {cols} columns, {order:?}, per group: {per_group}", plan.config());
    for x in [Fp8Activations::Values((&x).into()), given] {
        // Twice: the workspace must be left as it was found.
        for _ in 0..2 {
            let mut out = stream.clone_htod(&vec![7f32; pairs * rows]).unwrap();
            plan.run(stream, x, &routing, order, &mut workspace, &mut out).unwrap();
            let found = stream.clone_dtoh(&out).unwrap();
            for (i, (found, right)) in found.iter().zip(&right).enumerate() {
                // Terms are below 12. Each of eight parts and eight packs or fewer is rounded once.
                // CPUs add sums of packs. Products are below 16. The truncations of 32 of them
                // largely cancel: each side is off by less than 4 units of 2^-13 · 16 per k-step.
                let allowed = match Sums::of(plan.config()) {
                    Sums::Blocks => 2.0 * (cols as f32 / 32.0) * 4.0 * 16.0 * 2f32.powi(-13),
                    _ if cols <= 128 => 0.0,
                    _ => 16.0 * 12.0 * cols as f32 * 2f32.powi(-24),
                };
                let near = found.to_bits() == right.to_bits() || (found - right).abs() <= allowed;
                assert!(near, "{what}: {found:e} is not {right:e}: row {}, {}", i / rows, i % rows);
            }
        }
    }
}

pub(crate) fn experts_equal_their_own_products(gpu: &Gpu) {
    if !has_fp8(gpu) {
        return;
    }
    let orders = [
        ExpertRows::Gathered,
        ExpertRows::Sorted,
        ExpertRows::Scattered,
        ExpertRows::Indexed,
        ExpertRows::Paired,
    ];
    let configs = GemmConfig::for_fp8(Format::Mxfp4, Dtype::Bf16)
        .filter(|config| config.cluster == 1 && !config.mainloop.accumulates_fast());
    for config in configs.map(Some).chain([None]) {
        for order in orders {
            for (cols, per_group) in [(128, false), (96, true), (640, false), (640, true), (1000, true)] {
                check_experts(gpu, config, cols, order, per_group);
            }
        }
    }
}

pub(crate) fn experts_are_refused_where_they_do_not_fit(gpu: &Gpu) {
    let stream = gpu.stream();
    let experts = |format, rows, cols| {
        let weights = [0, 3].map(|seed| tensor(format, rows, cols, Scales::Common, seed));
        DeviceExperts::from_host(stream, &weights).unwrap()
    };
    let refused = |experts: &DeviceExperts, round_weights: bool| {
        let options = Fp8Options { round_weights, ..Fp8Options::default() };
        let plan = gpu.linear_experts_fp8::<bf16, bf16>(experts).options(options).plan(4);
        plan.map(|plan| plan.workspace_bytes()).unwrap_err()
    };
    let error = refused(&experts(Format::Nvfp4, 16, 64), false);
    assert!(matches!(error, Error::Operands(OperandFault::RoundedWeights)), "{error}");
    // Three rows of one block, and NVFP4's rows of three: no whole words of scales.
    let ragged =
        [refused(&experts(Format::Mxfp4, 3, 32), false), refused(&experts(Format::Nvfp4, 4, 48), true)];
    for error in ragged {
        let fits = match error {
            Error::Operands(OperandFault::Fp8Experts { .. }) => has_fp8(gpu),
            Error::Operands(OperandFault::NoFp8) => !has_fp8(gpu),
            _ => false,
        };
        assert!(fits, "{error}");
    }
    if !has_fp8(gpu) {
        return;
    }
    // A cluster does not multiply experts' rows.
    let weights = experts(Format::Mxfp4, 16, 64);
    let pair = GemmConfig::for_fp8(Format::Mxfp4, Dtype::Bf16).find(|config| config.cluster > 1).unwrap();
    let error = gpu.linear_experts_fp8::<bf16, bf16>(&weights).by(pair).plan(4).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::NoFp8)), "{error}");

    let plan = gpu.linear_experts_fp8::<bf16, bf16>(&weights).plan(4).unwrap();
    let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes()).unwrap();
    let mut routing = DeviceRouting::zeros(stream, 2, 6).unwrap();
    let mut out = stream.alloc_zeros::<bf16>(4 * 16).unwrap();
    let x = stream.alloc_zeros::<bf16>(2 * 64).unwrap();
    let mut run = |routing: &DeviceRouting, elements: usize| {
        let x = x.slice(..elements);
        let x = Fp8Activations::Values((&x).into());
        plan.run(stream, x, routing, ExpertRows::Gathered, &mut workspace, &mut out)
    };
    let error = run(&routing, 128).unwrap_err();
    assert!(matches!(error, Error::Operands(OperandFault::Routing { .. })), "{error}");
    gpu.route_on(stream, &stream.clone_htod(&[0, 1, 1, 0]).unwrap(), 2, &mut routing).unwrap();
    let error = run(&routing, 127).unwrap_err();
    assert!(matches!(error, Error::Length { .. }), "{error}");
    run(&routing, 128).unwrap();
}
