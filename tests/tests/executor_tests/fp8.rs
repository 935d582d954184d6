//! Cases of products of 4-bit weights and FP8 activations, and of the kernel that packs them.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use microscale::formats::fp8_dot::WIDEST;
use microscale::formats::{E4m3, fp4_dot, fp8_dot};
use microscale::{
    Activation, ActivationFormat, ActivationInput, ActivationRecipe, Dtype, Format, Fp8Scale,
    QuantizedTensor, ScaleLayout, Shape, quantize_activations,
};
use microscale_executor::Buffer;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::decoding::Decoding;
use microscale_kernels_abi::gemm::fp8::{PACK_FP8, PACK_MXFP4, quantize};
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams};
use microscale_kernels_abi::gemm::quantizing::Quantizing;
use microscale_kernels_abi::gemm::stage::ScalePieces;
use microscale_test_support::arithmetic::Scalars;
use microscale_test_support::operands::{Scales, in_fp8, row_of, sum_in_fp8, tensor};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Bound, ExactProducts};

use super::case::{MOST_SHARED, Prepared, argument, no_experts};
use super::cases::Case;
use super::fp4::{check, scales_in, sums_of_parts};
use super::gemm::{Multiplication, add_cases};
use super::steps::{Fused, STEPS};
use super::weights::shape;

/// A product, and how it is launched.
#[derive(Clone, Copy, Debug)]
struct Fp8Case {
    rows: usize,
    cols: usize,
    tokens: usize,
    thread_blocks: u32,
    stages: u32,
    /// Scales of the weights.
    scales: Scales,
    /// Activations have a scale per pack of columns.
    per_pack: bool,
    /// Some activations are NaN.
    nan: bool,
}

const CASE: Fp8Case = Fp8Case {
    rows: 1,
    cols: 64,
    tokens: 1,
    thread_blocks: 1,
    stages: 2,
    scales: Scales::Common,
    per_pack: false,
    nan: false,
};

/// One work tile and several, whole ones and split ones; rows, columns and tokens that end within a
/// tile, a pack or a block; fewer K-iterations than stages, and more; scales of weights that differ
/// by more than FP8 spans.
const CASES: [Fp8Case; 19] = [
    CASE,
    Fp8Case { rows: 16, cols: 128, tokens: 16, thread_blocks: 4, stages: 3, ..CASE },
    Fp8Case { rows: 200, cols: 192, tokens: 17, thread_blocks: 3, per_pack: true, ..CASE },
    Fp8Case { rows: 20, cols: 260, tokens: 5, scales: Scales::Any, stages: 3, ..CASE },
    Fp8Case { rows: 40, cols: 420, tokens: 9, thread_blocks: 3, scales: Scales::Any, per_pack: true, ..CASE },
    Fp8Case { rows: 70, cols: 640, tokens: 40, thread_blocks: 5, stages: 4, ..CASE },
    Fp8Case { rows: 300, cols: 256, tokens: 8, ..CASE },
    Fp8Case { rows: 33, cols: 160, tokens: 65, thread_blocks: 2, scales: Scales::Numbers, ..CASE },
    Fp8Case { rows: 6, cols: 2272, tokens: 30, stages: 8, per_pack: true, ..CASE },
    Fp8Case { rows: 260, cols: 704, tokens: 130, thread_blocks: 3, stages: 3, ..CASE },
    Fp8Case { rows: 10, cols: 96, tokens: 3, scales: Scales::Smallest, ..CASE },
    Fp8Case { rows: 10, cols: 4160, tokens: 2, thread_blocks: 7, nan: true, ..CASE },
    Fp8Case { rows: 130, cols: 37, tokens: 170, thread_blocks: 2, ..CASE },
    Fp8Case { rows: 256, cols: 416, tokens: 128, per_pack: true, nan: true, ..CASE },
    // Whole words of scales.
    Fp8Case { rows: 12, cols: 1536, tokens: 19, stages: 3, ..CASE },
    Fp8Case { rows: 20, cols: 512, tokens: 7, scales: Scales::Any, ..CASE },
    Fp8Case { rows: 18, cols: 384, tokens: 11, scales: Scales::Any, per_pack: true, ..CASE },
    Fp8Case { rows: 9, cols: 256, tokens: 3, scales: Scales::Largest, ..CASE },
    Fp8Case { rows: 17, cols: 640, tokens: 4, scales: Scales::Numbers, thread_blocks: 2, ..CASE },
];

/// Rows that take all warps of a thread block, and several pieces per warp.
const QUANTIZED: [Fp8Case; 2] = [
    Fp8Case { cols: 17000, tokens: 3, ..CASE },
    Fp8Case { rows: 3, cols: 40009, tokens: 2, nan: true, ..CASE },
];

/// Tokens whose packs take several thread blocks, and a last one of few packs.
const DECODED: [Fp8Case; 2] = [
    Fp8Case { cols: 2100, tokens: 11, rows: 40, scales: Scales::Numbers, ..CASE },
    Fp8Case { rows: 3, cols: 4160, tokens: 20, ..CASE },
];

/// Products with an epilogue.
const WITH_STEPS: [Fp8Case; 2] = [
    Fp8Case { rows: 38, cols: 256, tokens: 21, thread_blocks: 2, ..CASE },
    Fp8Case { rows: 190, cols: 448, tokens: 70, thread_blocks: 3, stages: 3, per_pack: true, ..CASE },
];

/// Operands of a product.
struct Operands {
    weights: QuantizedTensor,
    /// Rows of codes.
    x: Vec<E4m3>,
    tokens: usize,
    /// Scales, `each` per token.
    scales: Vec<f32>,
    each: usize,
    per_pack: bool,
}

impl Operands {
    fn draw(format: Format, case: Fp8Case, seed: u64) -> Self {
        let Fp8Case { rows, tokens, scales, per_pack, nan, .. } = case;
        // NVFP4's rows of scales are whole words.
        let cols = match format {
            Format::Nvfp4 => case.cols.next_multiple_of(64) - case.cols % 2,
            _ => case.cols,
        };
        let mut random = fastrand::Rng::with_seed(seed);
        let mut code = || loop {
            let code = E4m3::from_bits(random.u8(..));
            if !code.is_nan() {
                return code;
            }
        };
        let mut x: Vec<_> = (0..tokens * cols).map(|_| code()).collect();
        if nan {
            let nan = random.usize(..x.len());
            x[nan] = E4m3::NAN;
        }
        let packs = cols.div_ceil(PACK_COLUMNS as usize);
        let per_pack = per_pack && packs > 1;
        let each = if per_pack { packs } else { 1 };
        let scales_of_x = (0..tokens * each).map(|_| random.f32() * 0.01).collect();
        let weights = tensor(format, rows, cols, scales, 3 * seed);
        let weights = if matches!(scales, Scales::Common) { near(&weights) } else { weights };
        Self { weights, x, tokens, scales: scales_of_x, each, per_pack }
    }

    /// Returns the sums as a launch computes them.
    fn sums(&self, config: GemmConfig, gemm: &GemmParams) -> Vec<f32> {
        let size = [self.weights.rows(), self.tokens];
        sums_of_parts(config, gemm, size, |token, row, range| self.part(config, token, row, range))
    }

    /// Returns the sum of a range of K-iterations.
    fn part(&self, config: GemmConfig, token: usize, row: usize, range: &Range<usize>) -> f32 {
        let format = self.weights.format();
        let packs = range.start * config.packs() as usize..range.end * config.packs() as usize;
        let columns = |all: usize| {
            let of = |pack: usize| all.min(pack * PACK_COLUMNS as usize);
            of(packs.start)..of(packs.end)
        };
        let (codes, scales) = row_of(&self.weights, row);
        let (of_codes, block) = (columns(codes.len() * 2), format.block());
        let weights = fp8_dot::Weights {
            format,
            codes: &codes[of_codes.start / 2..of_codes.end / 2],
            scales: &scales[of_codes.start / block..of_codes.end / block],
        };
        let cols = self.weights.cols();
        let x = &self.x[token * cols..][..cols][columns(cols)];
        let scales = &self.scales[token * self.each..][..self.each];
        if config.mainloop.accumulates_fast() {
            let (_, all) = row_of(&self.weights, row);
            let base = fp8_dot::Weights { scales: all, ..weights }.row_base();
            return fp8_dot::fast_row::<Scalars>(weights, base, x, scales[0]);
        }
        let scales = match self.per_pack {
            true => fp8_dot::Scales::Packs(&scales[packs.start..]),
            false => fp8_dot::Scales::Token(scales[0]),
        };
        sum_in_fp8(config.multiplies_blocks(), weights, x, scales)
    }
}

/// Returns the tensor with scales of MXFP4 that FP8 spans. Kernels take long for others.
pub(super) fn near(weights: &QuantizedTensor) -> QuantizedTensor {
    if weights.format() != Format::Mxfp4 {
        return weights.clone();
    }
    let scales = weights.scales().iter().map(|scale| (*scale).max(127 - WIDEST as u8)).collect();
    QuantizedTensor::from_parts(weights.shape(), weights.codes().to_vec(), scales).expect("the same shape")
}

/// Packs activations and multiplies. `T` is the dtype of results.
fn multiplying<T: Exact + Activation>(
    operands: &Arc<Operands>,
    config: GemmConfig,
    case: Fp8Case,
    fused: Option<Fused>,
) -> Prepared {
    let Fp8Case { thread_blocks, stages, .. } = case;
    let Operands { weights, x, tokens, scales: x_scales, each, per_pack } = &**operands;
    let thread_blocks = thread_blocks * config.row_sharers();
    let mut case = Prepared::new();
    let (cols, count) = (weights.cols() as u64, *tokens as u64);
    let aligned = weights.cols().is_multiple_of(8);
    let mut pack = PackParams::new(config, cols, count, aligned).expect("a small launch");
    if config.has_row_bases() {
        pack = pack.with_rows(shape(weights));
    }
    let bytes: Vec<u8> = x.iter().map(|code| code.to_bits()).collect();
    let x = case.memory.allocate_from_aligned("x", &bytes, 8);
    let x_scales = case.memory.allocate_from_aligned("scales of x", bytemuck::cast_slice(x_scales), 4);
    let packed = case.memory.allocate_aligned("packed", pack.bytes() as usize, 16);
    let [plan, from, to] = no_experts();
    let codes = case.memory.allocate_from_aligned("codes", weights.codes(), 16);
    let scales = case.memory.allocate_from_aligned("scales", weights.scales(), 16);
    let row_bases = case.memory.allocate_aligned("bases of rows", pack.rows as usize * size_of::<u32>(), 4);
    let arguments = vec![
        x.into(),
        x_scales.into(),
        packed.into(),
        plan.clone(),
        from.clone(),
        argument(&pack),
        (*each as u32).into(),
        scales.into(),
        row_bases.into(),
    ];
    case.step(PACK_FP8.kernel().name, u64::from(pack.thread_blocks), arguments);

    let stage = config.stage(ScalePieces::MOST);
    let shared = stage.shared_bytes(stages.min(stage.count(MOST_SHARED)));
    let mut gemm =
        GemmParams::new(config, shape(weights), count, thread_blocks, shared).expect("a small launch");
    gemm.pack_scales = u32::from(*per_pack);
    let (slot, apply) = case.global_scale(weights);
    let results = weights.rows() * tokens;
    let [bytes, each] =
        fused.as_ref().map_or([results * size_of::<T>(), size_of::<T>()], |fused| fused.bytes);
    let out = case.memory.allocate_aligned("out", bytes, each as u64);
    let ([bias, residual], steps) = Fused::arguments(fused.as_ref(), &mut case);
    Multiplication {
        config,
        gemm: &gemm,
        thread_blocks: gemm.thread_blocks(config),
        codes: (codes, 1),
        weights: [scales.into(), slot],
        apply,
        activations: row_bases.into(),
        packed: packed.into(),
        out,
        routed: [plan, from, to],
        epilogue: ([bias, residual], steps),
    }
    .launch(&mut case);
    let operands = Arc::clone(operands);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let sums = operands.sums(config, &gemm);
        let factor = fp4_dot::factor(1.0, [None, operands.weights.global_scale()]);
        let Some(fused) = &fused else {
            return check::<T>(&bytes, &sums, factor);
        };
        let scaled = sums.iter().map(|sum| f64::from(*sum) * f64::from(factor));
        let exact = ExactProducts::of_sums(operands.weights.rows(), scaled);
        fused.check(&bytes, &exact, &Bound::NONE)
    }));
    case
}

/// Quantizes random values and packs them, by one kernel, and on the CPU with the kernel that packs.
fn quantizing<T: Exact + Activation>(config: GemmConfig, case: Fp8Case, seed: u64) -> Prepared {
    let Fp8Case { rows, cols, tokens, per_pack, nan, .. } = case;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut x: Vec<T> = (0..tokens * cols)
        .map(|_| T::from_f32((random.f32() - 0.5) * [1e-30, 0.1, 6.0, 1e4][random.usize(..4)]))
        .collect();
    if nan {
        for value in [f32::NAN, f32::INFINITY] {
            let at = random.usize(..x.len());
            x[at] = T::from_f32(value);
        }
    }
    let per_pack = per_pack && cols > PACK_COLUMNS as usize;
    let scale = if per_pack { Fp8Scale::PerGroup { power_of_two: false } } else { Fp8Scale::PerToken };
    let recipe = ActivationRecipe::new(ActivationFormat::Fp8(scale));
    let input = ActivationInput::new(&x, Shape::new(tokens, cols));
    let quantized = quantize_activations(input, &recipe).expect("a small matrix");

    let mut prepared = Prepared::new();
    let aligned = cols.is_multiple_of(8);
    let pack = PackParams::new(config, cols as u64, tokens as u64, aligned).expect("a small launch");
    let weights = tensor(Format::Mxfp4, rows, cols, Scales::Any, seed);
    let with_rows = pack.with_rows(shape(&weights));
    let weight_scales = prepared.memory.allocate_from_aligned("scales of weights", weights.scales(), 4);
    let row_bases = prepared.memory.allocate_aligned("bases of rows", rows * size_of::<u32>(), 4);
    let packed = ["quantized and packed", "packed"]
        .map(|name| prepared.memory.allocate_aligned(name, pack.bytes() as usize, 16));
    let quantizing = Quantizing::new(with_rows, aligned, per_pack);
    let arguments = vec![
        prepared.values(&x, !aligned),
        packed[0].into(),
        argument(&quantizing.pack),
        argument(&quantizing.params),
        weight_scales.into(),
        row_bases.into(),
    ];
    let kernel = quantize(T::DTYPE).expect("16 bits").kernel().name;
    prepared.step(kernel, u64::from(quantizing.launch.thread_blocks), arguments);
    prepared.shaped((quantizing.launch.threads, quantizing.launch.shared));

    packs_like(&mut prepared, packed, pack, (&quantized.codes, &quantized.f32_scales));
    expect_bases(&mut prepared, row_bases, &weights);
    prepared
}

/// Packs codes and their scales to the second buffer by the kernel that packs, and expects the same
/// bytes in the first.
fn packs_like(
    prepared: &mut Prepared,
    packed: [Buffer; 2],
    pack: PackParams,
    (codes, scales): (&[u8], &[f32]),
) {
    let each = scales.len() / pack.tokens as usize;
    let codes = prepared.memory.allocate_from_aligned("codes", codes, 8);
    let scales = prepared.memory.allocate_from_aligned("scales", bytemuck::cast_slice(scales), 4);
    let [plan, from, _] = no_experts();
    let arguments = vec![
        codes.into(),
        scales.into(),
        packed[1].into(),
        plan,
        from,
        argument(&pack),
        (each as u32).into(),
        0u64.into(),
        0u64.into(),
    ];
    prepared.step(PACK_FP8.kernel().name, u64::from(pack.thread_blocks), arguments);
    prepared.checks.push(Box::new(move |memory| {
        let [found, right] = packed.map(|buffer| memory.bytes(buffer).map_err(|error| error.to_string()));
        if found? == right? { Ok(()) } else { Err("other bytes than by the kernel that packs".into()) }
    }));
}

/// Expects the largest scale of each row of weights.
fn expect_bases(prepared: &mut Prepared, row_bases: Buffer, weights: &QuantizedTensor) {
    let largest = weights.scales().chunks(weights.blocks_per_row()).map(|row| row.iter().max());
    let largest = largest.flat_map(|scale| u32::from(*scale.expect("a block")).to_le_bytes());
    prepared.expect("bases of rows", row_bases, largest.collect());
}

/// The NaN that f32 operations of GPUs give.
const GPU_NAN: u32 = 0x7FFF_FFFF;

/// Decodes random activations in MXFP4 and packs them, by one kernel, and by the definition with the
/// kernel that packs.
fn decoding(
    config: GemmConfig,
    case: Fp8Case,
    (layout, scales): (ScaleLayout, Scales),
    seed: u64,
) -> Prepared {
    let Fp8Case { rows, cols, tokens, .. } = case;
    let x = tensor(Format::Mxfp4, tokens, cols, scales, seed);
    let alpha = [1.0, -0.75][seed as usize % 2];
    let (codes, mut token_scales) = in_fp8(&x, alpha);
    token_scales.iter_mut().filter(|scale| scale.is_nan()).for_each(|scale| *scale = f32::from_bits(GPU_NAN));

    let mut prepared = Prepared::new();
    let cols = x.blocks_per_row() * Format::Mxfp4.block();
    let pack = PackParams::new(config, cols as u64, tokens as u64, true).expect("a small launch");
    let weights = tensor(Format::Mxfp4, rows, cols, Scales::Any, seed);
    let with_rows = pack.with_rows(shape(&weights));
    let weight_scales = prepared.memory.allocate_from_aligned("scales of weights", weights.scales(), 4);
    let row_bases = prepared.memory.allocate_aligned("bases of rows", rows * size_of::<u32>(), 4);
    let packed = ["decoded and packed", "packed"]
        .map(|name| prepared.memory.allocate_aligned(name, pack.bytes() as usize, 16));
    let (scales, grid) = scales_in(layout, &x);
    let decoding = Decoding::new(with_rows, grid, alpha);
    let arguments = vec![
        prepared.memory.allocate_from_aligned("codes of x", x.codes(), 4).into(),
        prepared.memory.allocate_from("scales of x", &scales).into(),
        packed[0].into(),
        argument(&decoding.pack),
        argument(&decoding.params),
        weight_scales.into(),
        row_bases.into(),
    ];
    prepared.step(PACK_MXFP4.kernel().name, u64::from(decoding.thread_blocks), arguments);

    packs_like(&mut prepared, packed, pack, (&codes, &token_scales));
    expect_bases(&mut prepared, row_bases, &weights);
    prepared
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    // Token tiles whose K-iterations have one pack, or two.
    for config in GemmConfig::for_fp8(Format::Mxfp4, T::DTYPE).filter(|config| config.cluster == 1) {
        for (i, case) in (0..).zip(CASES.into_iter().chain(QUANTIZED)) {
            let kernel = quantize(T::DTYPE).expect("16 bits").kernel().name.into();
            let make = move || quantizing::<T>(config, case, i);
            let quantizing = Case::new(format!("{config}, {case:?}"), kernel, make);
            cases.push(Case { mainloop: Some(config.mainloop), ..quantizing });
        }
        let layouts = [ScaleLayout::Linear, ScaleLayout::Swizzled];
        for (i, case) in (0..).zip(CASES.into_iter().chain(DECODED)) {
            let of = (layouts[i as usize % 2], [Scales::Any, case.scales][i as usize / 2 % 2]);
            let make = move || decoding(config, case, of, i);
            let decoding =
                Case::new(format!("{config}, {case:?}, {of:?}"), PACK_MXFP4.kernel().name.into(), make);
            cases.push(Case { mainloop: Some(config.mainloop), ..decoding });
        }
    }
    for format in Format::MULTIPLIED {
        let mut add = |case: Fp8Case, seed: u64, number: Option<usize>| {
            // Fast accumulation is for a scale per token.
            let configs = GemmConfig::for_fp8(format, T::DTYPE)
                .filter(|config| !case.per_pack || !config.mainloop.accumulates_fast());
            let what = format!("{case:?}, {:?}", number.map(|number| STEPS[number]));
            let draw = move || Operands::draw(format, case, seed);
            add_cases(cases, configs, what, draw, move |operands, config| {
                let fused = number.map(|number| Fused::new::<T>(number, case.rows, case.tokens));
                multiplying::<T>(operands, config, case, fused)
            });
        };
        for (i, case) in (0..).zip(CASES) {
            add(case, i, None);
        }
        for (i, case) in (0..).zip(WITH_STEPS) {
            (0..STEPS.len()).for_each(|number| add(case, i, Some(number)));
        }
    }
}

/// Adds every case of these kernels.
pub(crate) fn fp8_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
    // The kernel that packs is a step of every product.
    let format = Format::Mxfp4;
    let config = GemmConfig::for_fp8(format, Dtype::Bf16).next().expect("a configuration");
    for (i, case) in (0..).zip(CASES) {
        let make =
            move || multiplying::<bf16>(&Arc::new(Operands::draw(format, case, i)), config, case, None);
        let mainloop = Some(config.mainloop);
        let kernel = PACK_FP8.kernel().name.into();
        cases.push(Case { mainloop, ..Case::new(format!("{case:?}"), kernel, make) });
    }
}
