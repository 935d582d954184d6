//! Cases of products of weights and activations of any number of tokens.

use std::fmt::Display;
use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::formats::fp4_dot;
use microscale::{Activation, Dtype, Format, GlobalScale, Words};
use microscale_executor::{Argument, Buffer, Swizzle, TensorMap};
use microscale_kernels_abi::epilogue::{MergeGrid, PARTS, SplitGrid};
use microscale_kernels_abi::gemm::params::{
    GemmParams, PackParams, SEMAPHORES, WeightsBoxes, partial_sum_bytes,
};
use microscale_kernels_abi::gemm::stage::ScalePieces;
use microscale_kernels_abi::{ApplyGlobal, GemmConfig, Mainloop};
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Bound, ExactProducts};

use super::case::{MOST_SHARED, Prepared, argument, no_experts};
use super::cases::Case;
use super::gemm_sizes::{CLUSTERS, GemmCase, SINGLE, WITH_STEPS};
use super::steps::{Fused, STEPS};
use super::weights::{LEAST, Lazy, Product, kernel_of, shape};

/// Packs activations, unless the configuration does, and multiplies, on a GPU that has room for a
/// number of thread blocks. Buffers are aligned so far and no further.
fn multiplying<T: Exact + Activation>(
    product: &Arc<Product<T>>,
    config: GemmConfig,
    thread_blocks: u32,
    stages: u32,
) -> Prepared {
    let Product { weights, x, tokens, .. } = &**product;
    let mut case = Prepared::new();
    // Activations start in the middle of 16 bytes if the number of tokens is odd, unless the kernel
    // needs aligned ones. Otherwise their rows do.
    let odd = tokens % 2 == 1 && !config.packs_activations();
    let activations = if odd {
        case.values(x, true)
    } else {
        case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(x), 16).into()
    };
    let aligned = !odd && weights.cols().is_multiple_of(8);
    let [plan, from, to] = no_experts();
    let pack = PackParams::new(config, weights.cols() as u64, *tokens as u64, aligned);
    let routed = [plan.clone(), from.clone()];
    let packed = pack_activations::<T>(&mut case, config, pack, activations.clone(), routed);
    let stage = config.stage(ScalePieces::MOST);
    let shared = stage.shared_bytes(stages.min(stage.count(MOST_SHARED)));
    let gemm = GemmParams::new(config, shape(weights), *tokens as u64, thread_blocks, shared);
    let gemm = gemm.expect("a small launch");
    let codes = case.memory.allocate_from_aligned("codes", weights.codes(), 16);
    let scales = case.memory.allocate_from_aligned("scales", weights.scales(), 16);
    let (slot, apply) = case.global_scale(weights);
    let [bytes, each] = product.result_bytes();
    let out = case.memory.allocate_aligned("out", bytes, each as u64);
    let ([bias, residual], steps) = Fused::arguments(product.fused.as_ref(), &mut case);
    Multiplication {
        config,
        gemm: &gemm,
        thread_blocks: gemm.thread_blocks(config),
        codes: (codes, 1),
        weights: [scales.into(), slot],
        apply,
        activations,
        packed,
        out,
        routed: [plan, from, to],
        epilogue: ([bias, residual], steps),
    }
    .launch(&mut case);
    let product = Arc::clone(product);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let bound = Bound::of_gemm::<T>(product.weights.cols(), LEAST);
        if let Some(fused) = &product.fused {
            return fused.check(&bytes, &product.exact, &bound);
        }
        let found: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
        product.check(&found, &bound)
    }));
    case
}

/// Adds the launch that packs activations, if the configuration does not. Returns the address of the
/// packed activations, or 0. `routed` has the experts' plan and the list of rows of activations.
pub(super) fn pack_activations<T: Activation>(
    case: &mut Prepared,
    config: GemmConfig,
    pack: Option<PackParams>,
    activations: Argument,
    [plan, from]: [Argument; 2],
) -> Argument {
    if config.packs_activations() {
        return 0u64.into();
    }
    let pack = pack.expect("a small launch");
    let packed = case.memory.allocate_aligned("packed", pack.bytes() as usize, 16);
    let arguments = vec![activations, packed.into(), plan, from, argument(&pack)];
    case.step(pack_kernel::<T>(), u64::from(pack.thread_blocks), arguments);
    packed.into()
}

/// A launch of a kernel that multiplies packed activations.
pub(super) struct Multiplication<'a> {
    pub(super) config: GemmConfig,
    pub(super) gemm: &'a GemmParams,
    pub(super) thread_blocks: u32,
    /// The codes, and the number of matrices.
    pub(super) codes: (Buffer, usize),
    /// Scales and the slots of global scales.
    pub(super) weights: [Argument; 2],
    pub(super) apply: Argument,
    pub(super) activations: Argument,
    pub(super) packed: Argument,
    pub(super) out: Buffer,
    /// The experts' plan, and the lists of rows of activations and of results.
    pub(super) routed: [Argument; 3],
    /// Bias, residual and the other steps.
    pub(super) epilogue: ([Argument; 2], Argument),
}

impl Multiplication<'_> {
    /// Adds the launch, which must leave zeros in the semaphores.
    pub(super) fn launch(self, case: &mut Prepared) {
        let Self { config, gemm, thread_blocks, apply, activations, packed, out, .. } = self;
        let (codes, matrices) = self.codes;
        let zeros = vec![0; 4 * SEMAPHORES as usize];
        let semaphores = case.memory.allocate_from_aligned("semaphores", &zeros, 4);
        let sums_bytes = partial_sum_bytes(thread_blocks, config) as usize;
        let partial_sums = case.memory.allocate_aligned("partial sums", sums_bytes, 16);
        let (operands, steps) = self.epilogue;
        let mut arguments = vec![codes.into()];
        arguments.extend(self.weights.into_iter().chain([activations, packed]));
        arguments.extend([out, semaphores, partial_sums].map(Argument::from));
        arguments.extend(self.routed.into_iter().chain(operands));
        arguments.extend([argument(gemm), apply, steps]);
        if let Some(WeightsBoxes { sizes, strides, box_sizes }) =
            WeightsBoxes::new(config, gemm.shape, matrices as u64)
        {
            let map = TensorMap::new(codes.address(), &sizes, &strides, &box_sizes, Swizzle::Bytes128);
            arguments.push(map.expect("sizes within the limits").into());
        }
        case.step(kernel_of(config), u64::from(thread_blocks), arguments);
        case.shaped((config.threads(), gemm.shared));
        case.in_clusters(config.cluster);
        case.expect("semaphores", semaphores, zeros);
    }
}

/// Adds a case for each configuration, with operands that are drawn when a case first needs them.
pub(super) fn add_cases<O: Send + Sync + 'static>(
    cases: &mut Vec<Case>,
    configs: impl Iterator<Item = GemmConfig>,
    what: impl Display,
    draw: impl FnOnce() -> O + Send + 'static,
    make: impl Fn(&Arc<O>, GemmConfig) -> Prepared + Clone + Send + Sync + 'static,
) {
    let draw: Box<dyn FnOnce() -> Arc<O> + Send> = Box::new(move || Arc::new(draw()));
    let drawn = Arc::new(LazyLock::new(draw));
    for config in configs {
        let (drawn, make) = (Arc::clone(&drawn), make.clone());
        let kernel = kernel_of(config).into();
        let case = Case::new(format!("{config}, {what}"), kernel, move || make(&drawn, config));
        cases.push(Case { mainloop: Some(config.mainloop), ..case });
    }
}

/// The name of the kernel that packs activations.
pub(super) fn pack_kernel<T: Activation>() -> String {
    format!("pack_{}", T::DTYPE.word())
}

/// The product of a case, with an epilogue if it has a number.
fn product<T: Exact + Activation>(
    format: Format,
    case: GemmCase,
    seed: u64,
    steps: Option<usize>,
) -> Lazy<T> {
    let GemmCase { rows, cols, tokens, weights, activations, .. } = case;
    let make = move || {
        let product = Product::<T>::new(format, (rows, cols, tokens), weights, activations, seed);
        Arc::new(match steps {
            None => product,
            Some(number) => product.with_steps(number),
        })
    };
    Arc::new(LazyLock::new(Box::new(make)))
}

/// The configurations of the GEMM for a format and rows of `cols` columns, with clusters that share
/// K-iterations, or others.
fn configs<T: Activation>(format: Format, cols: usize, share_k: bool) -> impl Iterator<Item = GemmConfig> {
    let all = GemmConfig::for_operands(format, T::DTYPE);
    let takes = move |config: &GemmConfig| cols.is_multiple_of(8) || !config.packs_activations();
    all.filter(move |config| {
        !config.mainloop.is_gemv() && (config.k_sharers() > 1) == share_k && takes(config)
    })
}

/// The case of a configuration. It is about `kernel`: the one that multiplies, or the one that packs.
fn case_of<T: Exact + Activation>(
    made: &Lazy<T>,
    case: GemmCase,
    config: GemmConfig,
    kernel: String,
    steps: Option<usize>,
) -> Case {
    let GemmCase { thread_blocks, stages, .. } = case;
    let thread_blocks = thread_blocks * config.row_sharers();
    let made = Arc::clone(made);
    let what = format!("{config}, {case:?}, {:?}", steps.map(|number| STEPS[number]));
    let make = move || multiplying(&made, config, thread_blocks, stages);
    Case { by_tensor_cores: true, mainloop: Some(config.mainloop), ..Case::new(what, kernel, make) }
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        for (i, case) in (0..).zip(SINGLE) {
            let made = product::<T>(format, case, i, None);
            for config in configs::<T>(format, case.cols, false) {
                cases.push(case_of(&made, case, config, kernel_of(config).into(), None));
            }
            // Each mainloop reads another order of packed activations.
            for mainloop in Mainloop::ALL {
                let of_mainloop = configs::<T>(format, case.cols, false)
                    .find(|config| config.mainloop == mainloop && !config.packs_activations());
                cases
                    .extend(of_mainloop.map(|config| case_of(&made, case, config, pack_kernel::<T>(), None)));
            }
        }
        for (i, case) in (0..).zip(CLUSTERS) {
            for steps in [None, Some(i as usize % STEPS.len())] {
                let made = product::<T>(format, case, i, steps);
                for config in configs::<T>(format, case.cols, true) {
                    cases.push(case_of(&made, case, config, kernel_of(config).into(), steps));
                }
            }
        }
        for (i, case) in (0..).zip(WITH_STEPS) {
            for number in 0..STEPS.len() {
                let made = product::<T>(format, case, i, Some(number));
                for config in configs::<T>(format, case.cols, false) {
                    cases.push(case_of(&made, case, config, kernel_of(config).into(), Some(number)));
                }
            }
        }
    }
}

/// Splits f32 activations into parts.
///
/// Each activation must equal the sum of its parts, down to 2^-133.
fn splitting(rows: usize, cols: usize, odd: bool) -> Prepared {
    let mut case = Prepared::new();
    let mut random = fastrand::Rng::with_seed((rows * cols) as u64);
    let mut x: Vec<f32> = (0..rows * cols).map(|_| f32::from_bits(random.u32(..))).collect();
    for (x, special) in
        x.iter_mut().zip([f32::INFINITY, f32::NAN, f32::from_bits(0xFF80_0001), f32::MAX, -0.0, 1e-45])
    {
        *x = special;
    }
    let from = if odd {
        case.values(&x, true)
    } else {
        case.memory.allocate_from_aligned("x", bytemuck::cast_slice(&x), 16).into()
    };
    let out = case.memory.allocate_aligned("parts", x.len() * PARTS as usize * 2, 16);
    let grid = SplitGrid::new(rows as u64, cols as u64, !odd);
    let [plan, list, _] = no_experts();
    case.step("split_f32", grid.count, vec![from, out.into(), plan, list, argument(&grid)]);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let parts: Vec<bf16> = bytemuck::pod_collect_to_vec(&bytes);
        for (i, x) in x.iter().enumerate() {
            let (row, col) = (i / cols, i % cols);
            let part = |j: usize| parts[(row * PARTS as usize + j) * cols + col].to_f64();
            let (sum, x) = (part(0) + part(1) + part(2), f64::from(*x));
            let near = if x.is_finite() {
                (sum - x).abs() < 2f64.powi(-133)
            } else {
                sum == x || sum.is_nan() && x.is_nan()
            };
            if !near {
                return Err(format!("{x:e} became {sum:e}, row {row}, column {col}"));
            }
        }
        Ok(())
    }));
    case
}

/// Merges partial sums, with the epilogue of this number.
fn merging(rows: usize, tokens: usize, number: usize) -> Prepared {
    let mut case = Prepared::new();
    let mut random = fastrand::Rng::with_seed(rows as u64);
    let sums: Vec<f32> = (0..rows * tokens * PARTS as usize).map(|_| random.f32() * 8.0 - 4.0).collect();
    let exact = ExactProducts::of_sums(
        rows,
        sums.chunks(rows * PARTS as usize).flat_map(|of_token| {
            (0..rows)
                .map(|row| (0..PARTS as usize).map(|i| f64::from(of_token[i * rows + row])).sum())
                .collect::<Vec<f64>>()
        }),
    );
    let fused = Fused::of::<f32, f32>(Dtype::F32, number, rows, tokens);
    let ([bias, residual], steps) = Fused::arguments(Some(&fused), &mut case);
    let from = case.memory.allocate_from_aligned("sums", bytemuck::cast_slice(&sums), 4);
    let out = case.memory.allocate_aligned("out", fused.bytes[0], 4);
    let results = fused.bytes[0] / 4 / tokens;
    let grid = MergeGrid::of_parts(rows as u64, results as u64, tokens as u64);
    merge(&mut case, [from.into(), out.into(), bias, residual], [0u64.into(), 0u64.into()], &grid, steps);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        fused.check(&bytes, &exact, &Bound::NONE)
    }));
    case
}

/// Adds a launch of the kernel that merges to a case, without experts. `operands` has the addresses
/// of sums, results, bias and residual, and `factors` the addresses of the scales of tokens and of
/// the global scale of the weights, or zeros.
fn merge(
    case: &mut Prepared,
    operands: [Argument; 4],
    factors: [Argument; 2],
    grid: &MergeGrid,
    steps: Argument,
) {
    let lists = no_experts().into_iter().chain(factors);
    let arguments = operands.into_iter().chain(lists).chain([argument(grid), steps]).collect();
    case.step("merge_f32", grid.count, arguments);
}

/// Multiplies sums by factors of their tokens, with the epilogue of this number, a bias of `T` and
/// results of `O`.
fn token_merging<T: Exact + Activation, O: Exact + Activation>(
    rows: usize,
    tokens: usize,
    number: usize,
) -> Prepared {
    let mut case = Prepared::new();
    let mut random = fastrand::Rng::with_seed(rows as u64);
    let sums: Vec<f32> = (0..rows * tokens).map(|_| random.f32() * 8.0 - 4.0).collect();
    let scales: Vec<f32> = (0..tokens).map(|_| random.f32() + 0.5).collect();
    let (alpha, divisor) = (0.75, 3.5f32);
    let exact = ExactProducts::of_sums(
        rows,
        sums.iter().enumerate().map(|(i, sum)| {
            let globals = [GlobalScale::Multiplier(scales[i / rows]), GlobalScale::Divisor(divisor)];
            f64::from(*sum) * f64::from(fp4_dot::factor(alpha, globals.map(Some)))
        }),
    );
    let fused = Fused::of::<T, O>(Dtype::Bf16, number, rows, tokens);
    let ([bias, residual], steps) = Fused::arguments(Some(&fused), &mut case);
    let from = case.memory.allocate_from_aligned("sums", bytemuck::cast_slice(&sums), 4);
    let out = case.memory.allocate_aligned("out", fused.bytes[0], 4);
    let scales = case.memory.allocate_from_aligned("token scales", bytemuck::cast_slice(&scales), 4);
    // The kernel reads only the first word of a slot.
    let slot = case.memory.allocate_from_aligned("weight globals", &divisor.to_ne_bytes(), 4);
    let results = fused.bytes[0] / fused.bytes[1] / tokens;
    let grid = MergeGrid::of_parts(rows as u64, results as u64, tokens as u64);
    let grid = grid.of_tokens(alpha, ApplyGlobal::Divisor);
    merge(&mut case, [from.into(), out.into(), bias, residual], [scales.into(), slot.into()], &grid, steps);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        fused.check(&bytes, &exact, &Bound::NONE)
    }));
    case
}

/// Adds every case of these kernels.
pub(crate) fn gemm_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
    for (rows, cols, odd) in [(1, 4, false), (3, 260, false), (5, 63, false), (2, 512, true), (40, 100, true)]
    {
        let what = format!("{rows}x{cols}, odd: {odd}");
        cases.push(Case::new(what, "split_f32".into(), move || splitting(rows, cols, odd)));
    }
    for (number, steps) in STEPS.iter().enumerate() {
        for (rows, tokens) in [(2, 1), (300, 3)] {
            let what = format!("{rows} rows, {tokens} tokens, {steps:?}");
            let merge = "merge_f32".to_owned();
            cases.push(Case::new(what.clone(), merge.clone(), move || merging(rows, tokens, number)));
            let what = format!("factors by token, {what}");
            cases.push(Case::new(what, merge, move || match number % 3 {
                0 => token_merging::<bf16, bf16>(rows, tokens, number),
                1 => token_merging::<f16, f16>(rows, tokens, number),
                _ => token_merging::<bf16, f32>(rows, tokens, number),
            }));
        }
    }
}
