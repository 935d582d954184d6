//! Cases of products of weights and activations.

use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::formats::nvfp4::Direction;
use microscale::{Activation, Format, GlobalScale, QuantizedTensor, gemv_weights};
use microscale_executor::Argument;
use microscale_kernels_abi::gemm::gemv::{GemvParams, PlainParams, TokenTiles};
use microscale_kernels_abi::gemm::{TILE_COLUMNS, WeightsShape};
use microscale_kernels_abi::{GemmConfig, Mainloop};
use microscale_test_support::operands::{Scales, changed, scale_of_one, tensor};
use microscale_test_support::oracle::{self, Exact, dot};
use microscale_test_support::order::{Order, cancelling};
use microscale_test_support::weights::{
    Activations, Bound, ExactProducts, activations, is_unusual, segments, usual_scales,
};

use super::case::{Prepared, argument, no_experts};
use super::cases::Case;
use super::steps::{Fused, STEPS};
use super::weights_sizes::{GEMV, GemvCase, GemvCases, WITH_STEPS};

/// Kinds of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Weights {
    Of(Scales),
    /// The global scale is 2^80 times larger or smaller than usual, out of range for the f32 fast
    /// path.
    Far,
    /// Some blocks are zeros, under the smallest or the largest scale, or in the second row under
    /// NaN.
    Zeros,
    /// MXFP4's two smallest and two largest scales without a fallback to the reference.
    ///
    /// NVFP4's are arbitrary.
    Edges,
    /// [`Self::Edges`], but two rows have a scale just out of range.
    Beyond,
    /// Ones in the last chunk, with activations that cancel almost all of a row's sum for each
    /// token.
    ///
    /// The last bits of all sums then matter. MXFP4's rows fall back to the reference.
    Cancelling,
    /// [`cancelling`] weights. Results must equal the kernel's [`Order`], bit by bit.
    Ordered,
}

use self::Activations as X;
use self::Weights::{Beyond, Cancelling, Edges, Far, Of, Ordered, Zeros};

/// Draws weights. The kind of global scale alternates with the seed.
fn weights<T: Exact>(format: Format, rows: usize, cols: usize, kind: Weights, seed: u64) -> QuantizedTensor {
    let scales = match kind {
        Of(scales) => scales,
        Edges | Beyond if format == Format::Nvfp4 => Scales::Numbers,
        _ => Scales::Common,
    };
    let drawn = tensor(format, rows, cols, scales, seed);
    if kind == Far {
        let Some(global) = drawn.global_scale() else { return drawn };
        let value = global.value() * 2f32.powi(if seed.is_multiple_of(2) { 80 } else { -80 });
        let far = match global.direction() {
            Direction::Divisor => GlobalScale::Divisor(value),
            Direction::Multiplier => GlobalScale::Multiplier(value),
        };
        return drawn.with_global_scale(far).expect("in range");
    }
    if matches!(kind, Of(_)) || matches!(kind, Edges | Beyond) && format == Format::Nvfp4 {
        return drawn;
    }
    let blocks = drawn.blocks_per_row();
    let mut random = fastrand::Rng::with_seed(seed);
    let [first, last] = usual_scales::<T>();
    changed(drawn, |codes, scales| {
        for (i, (scale, codes)) in scales.iter_mut().zip(codes.chunks_mut(format.block_bytes())).enumerate() {
            let (row, block) = (i / blocks, i % blocks);
            let beyond = kind == Beyond && block == row % blocks;
            match kind {
                Zeros if block % 3 == row % 3 => {
                    codes.iter_mut().for_each(|code| *code &= 0x88);
                    *scale = if random.bool() { 0 } else { oracle::nan_scale(format) - 1 };
                    if row == 1 {
                        *scale = oracle::nan_scale(format);
                    }
                }
                Edges | Beyond => {
                    *scale = [first, first + 1, last - 1, last][random.usize(..4)];
                    if beyond && row == 0 {
                        *scale = first - 1;
                    }
                    if beyond && row == rows - 1 {
                        *scale = last + 1;
                    }
                }
                Cancelling if block + 32 / format.block() >= blocks => {
                    codes.fill(0x22);
                    *scale = scale_of_one(format);
                }
                Cancelling if format == Format::Mxfp4 && block == 0 => *scale = first - 1,
                _ => {}
            }
        }
    })
}

/// Minimum loss of tensor cores. The executor supports subnormal numbers.
pub(super) const LEAST: f64 = f64::from_bits((1023 - 149) << 52);

/// Operands and results of a product, made once for all launches.
pub(crate) struct Product<T> {
    pub(super) weights: QuantizedTensor,
    pub(super) x: Vec<T>,
    pub(super) tokens: usize,
    /// The reference's results.
    pub(super) results: Vec<T>,
    pub(super) exact: ExactProducts,
    /// Set if tensor cores lose nothing.
    ordered: bool,
    /// The epilogue.
    pub(super) fused: Option<Fused>,
}

impl<T: Exact + Activation> Product<T> {
    pub(crate) fn new(
        format: Format,
        (rows, cols, tokens): (usize, usize, usize),
        kind: Weights,
        x: X,
        seed: u64,
    ) -> Self {
        let (weights, x) = if kind == Ordered {
            cancelling(format, [rows, cols, tokens], seed)
        } else {
            let weights = weights::<T>(format, rows, cols, kind, seed);
            let mut x = activations(cols * tokens, x, &mut fastrand::Rng::with_seed(seed));
            if kind == Cancelling {
                x.chunks_mut(cols).enumerate().for_each(|(token, x)| cancel(&weights, token % rows, x));
            }
            (weights, x)
        };
        let mut results = vec![T::default(); weights.rows() * tokens];
        gemv_weights(&weights, &x, tokens, &mut results).expect("operands that fit");
        let exact = ExactProducts::of(&weights, &x, tokens);
        Self { weights, x, tokens, results, exact, ordered: kind == Ordered, fused: None }
    }

    /// Adds an epilogue to the product.
    pub(super) fn with_steps(self, number: usize) -> Self {
        let fused = Fused::new::<T>(number, self.weights.rows(), self.tokens);
        Self { fused: Some(fused), ..self }
    }

    /// Returns the size of all results and of one result, in bytes.
    pub(super) fn result_bytes(&self) -> [usize; 2] {
        self.fused.as_ref().map_or([size_of_val(&self.results[..]), size_of::<T>()], |fused| fused.bytes)
    }

    /// Checks results of tensor cores for several tokens.
    ///
    /// Rows with out-of-range scales must have the reference's bits.
    pub(super) fn check(&self, found: &[T], bound: &Bound) -> Result<(), String> {
        let defined = |row: usize| is_unusual::<T>(&self.weights, row);
        for (i, (found, right)) in found.iter().zip(&self.results).enumerate() {
            let row = i % self.weights.rows();
            if defined(row) && found.bits() != right.bits() {
                return Err(format!(
                    "{found:?} is not {right:?}, row {row}, which is computed by definition"
                ));
            }
        }
        self.exact.check_some(found, bound, |row| !defined(row)).map(|_| ())
    }

    /// Makes a launch without checks of its results.
    ///
    /// Buffers have exactly the alignment that the kernel requires: 16 bytes, and for scales the
    /// size of a chunk's scales or 4 bytes. Ragged kernels require 8 bytes and 1 byte.
    fn launch(&self, config: GemmConfig, params: Argument, elements: u64, unaligned: bool) -> Launched {
        let Self { weights, x, .. } = self;
        let mut case = Prepared::new();
        let [codes, scales] = match config.mainloop {
            Mainloop::GemvRagged => [8, 1],
            Mainloop::GemvPlain => [16, 32 / weights.format().block() as u64],
            _ => [16, 4],
        };
        let codes = case.memory.allocate_from_aligned("codes", weights.codes(), codes);
        let scales = case.memory.allocate_from_aligned("scales", weights.scales(), scales);
        let (slot, apply) = case.global_scale(weights);
        let x: Argument = if unaligned {
            case.values(x, true)
        } else {
            case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(x), 16).into()
        };
        let [bytes, each] = self.result_bytes();
        let out = case.memory.allocate_aligned("out", bytes, each as u64);
        let [plan, from, to] = no_experts();
        let ([bias, residual], steps) = Fused::arguments(self.fused.as_ref(), &mut case);
        let routed = [plan, from, to, bias, residual, params, apply, steps];
        let arguments = [vec![codes.into(), scales.into(), slot, x, out.into()], routed.into()].concat();
        case.step(kernel_of(config), elements, arguments);
        Launched { case, out }
    }
}

/// Chooses the last chunk of activations to cancel a row's sum as far as possible.
///
/// The chunk's weights are ones.
fn cancel<T: Exact>(weights: &QuantizedTensor, row: usize, x: &mut [T]) {
    let last = (x.len() - 1) / 32 * 32;
    x[last..].fill(T::default());
    let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    let mut left = dot::weighted(weights, row, &wide).sum.to_f64();
    for x in &mut x[last..] {
        *x = T::round_f64(-left);
        left += x.to_f64();
    }
}

pub(crate) struct Launched {
    pub(crate) case: Prepared,
    pub(crate) out: microscale_executor::Buffer,
}

/// The name of a configuration's kernel.
pub(super) fn kernel_of(config: GemmConfig) -> &'static str {
    config.id().expect("a kernel of the list").kernel().name
}

pub(super) fn shape(weights: &QuantizedTensor) -> WeightsShape {
    let [rows, cols, blocks] = [weights.rows(), weights.cols(), weights.blocks_per_row()].map(|n| n as u64);
    WeightsShape { rows, cols, blocks }
}

/// Segments of a row that a warp has side by side.
pub(super) fn segments_of(config: GemmConfig, tokens: usize) -> usize {
    if config.tile_n > TILE_COLUMNS { 1 } else { segments(tokens) }
}

/// Returns whether a configuration adds as kernels for one token do.
pub(super) fn adds_one_token(config: GemmConfig) -> bool {
    config.mainloop == Mainloop::Gemv && config.tile_n == 1
}

/// The bound of a configuration's results for weights and tokens that it takes.
pub(super) fn gemv_bound<T: Exact>(config: GemmConfig, weights: &QuantizedTensor, tokens: usize) -> Bound {
    let slices = config.slices as usize;
    if adds_one_token(config) {
        return Bound::of_one_token::<T>(weights, slices, LEAST);
    }
    Bound::of_tensor_cores::<T>(weights.cols(), [segments_of(config, tokens), slices], LEAST)
}

/// Launches a configuration that does not copy ahead.
fn launch_plain<T: Exact + Activation>(
    product: &Product<T>,
    config: GemmConfig,
    unaligned: bool,
) -> Launched {
    let (weights, tokens) = (&product.weights, product.tokens as u64);
    let tiles = TokenTiles::of(tokens, TILE_COLUMNS);
    let params = PlainParams::new(config, shape(weights), tokens, tiles).expect("a small launch");
    let elements = match config.mainloop {
        Mainloop::GemvRagged => weights.rows() as u64,
        _ => params.thread_blocks(),
    };
    product.launch(config, argument(&params), elements, unaligned)
}

/// Launches a configuration that copies ahead, with a number of warps per thread block, on a GPU that has room
/// for a number of thread blocks.
pub(crate) fn launch_ahead<T: Exact + Activation>(
    product: &Product<T>,
    config: GemmConfig,
    warps: u32,
    thread_blocks: u32,
) -> Launched {
    let (shape, tokens) = (shape(&product.weights), product.tokens as u64);
    let tiles = TokenTiles::of(tokens, config.tile_n);
    let params = GemvParams::new(config, shape, tokens, tiles, warps, thread_blocks);
    let params = params.expect("a small launch");
    let mut launched = product.launch(config, argument(&params), params.thread_blocks(), false);
    launched.case.shaped(params.threads_and_shared(config));
    launched
}

/// Launches a configuration of the GEMV. If it copies ahead, thread blocks have one warp group per tile of a
/// warp, and the GPU has room for few thread blocks, so that each group has several work tiles.
fn launch<T: Exact + Activation>(product: &Product<T>, config: GemmConfig) -> Launched {
    if config.mainloop == Mainloop::GemvPlain {
        return launch_plain(product, config, false);
    }
    let slices = config.slices;
    let (warps, thread_blocks) =
        [(slices, 3), (2 * slices, 2), (4 * slices, 1)][config.row_tiles().ilog2() as usize];
    launch_ahead(product, config, warps.min(config.gemv_warps()), thread_blocks)
}

/// Expects results as near to the exact sums as the kernels promise. Rows that tensor cores do not compute for
/// several tokens must have the definition's bits.
fn prepare<T: Exact + Activation>(product: &Arc<Product<T>>, config: GemmConfig) -> Prepared {
    let Launched { mut case, out } = launch(product, config);
    if product.ordered {
        let (segments, slices) = (segments_of(config, product.tokens), config.slices as usize);
        let order =
            if adds_one_token(config) { Order::M1 { slices } } else { Order::M8 { segments, slices } };
        let results = order.results(&product.weights, &product.x, product.tokens);
        case.expect("results", out, bytemuck::cast_slice(&results).to_vec());
    }
    let product = Arc::clone(product);
    case.checks.push(Box::new(move |memory| {
        let Product { weights, tokens, exact, .. } = &*product;
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let bound = gemv_bound::<T>(config, weights, *tokens);
        if let Some(fused) = &product.fused {
            return fused.check(&bytes, exact, &bound);
        }
        let found: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
        if adds_one_token(config) {
            return exact.check(&found, &bound).map(|_| ());
        }
        product.check(&found, &bound)
    }));
    case
}

/// Launches a configuration for ragged rows, which does without tensor cores, and expects the definition's bits.
fn ragged<T: Exact + Activation>(product: &Arc<Product<T>>, config: GemmConfig, unaligned: bool) -> Prepared {
    let Launched { mut case, out } = launch_plain(product, config, unaligned);
    if product.fused.is_some() {
        let product = Arc::clone(product);
        case.checks.push(Box::new(move |memory| {
            let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
            let bound = Bound::of_definition(&product.weights);
            product.fused.as_ref().map_or(Ok(()), |fused| fused.check(&bytes, &product.exact, &bound))
        }));
        return case;
    }
    case.expect("results", out, bytemuck::cast_slice(&product.results).to_vec());
    case
}

/// A product that is made when a case first needs it.
pub(super) type Lazy<T> = Arc<LazyLock<Arc<Product<T>>, Box<dyn FnOnce() -> Arc<Product<T>> + Send>>>;

/// A case of a configuration of the GEMV.
fn case<T: Exact + Activation>(what: String, config: GemmConfig, unaligned: bool, made: &Lazy<T>) -> Case {
    let made = Arc::clone(made);
    let by_tensor_cores = config.mainloop != Mainloop::GemvRagged;
    let make =
        move || if by_tensor_cores { prepare(&made, config) } else { ragged(&made, config, unaligned) };
    Case { by_tensor_cores, ..Case::new(what, kernel_of(config).into(), make) }
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        for GemvCases { are_for, cases: of_configs } in GEMV {
            let configs = || GemmConfig::for_operands(format, T::DTYPE).filter(|config| are_for(*config));
            let ahead = configs().any(|config| config.mainloop == Mainloop::Gemv);
            for (i, of_configs) in (0..).zip(of_configs) {
                let GemvCase { rows, cols, tokens, slices, unaligned, weights, activations } = *of_configs;
                // Whole words of scales.
                let half = ahead && format == Format::Nvfp4 && cols % 256 != 0;
                let shape = (rows, if half { (cols / 64 + 1) * 64 } else { cols }, tokens);
                let make = move || Arc::new(Product::<T>::new(format, shape, weights, activations, i));
                let made: Lazy<T> = Arc::new(LazyLock::new(Box::new(make)));
                for config in configs() {
                    // Two tiles come with other slices than one, so that all numbers of both meet.
                    let slices = if config.row_tiles() == 2 { (8 / slices).max(1) } else { slices };
                    let config = config.with_slices(slices);
                    let what = format!("{config}, {shape:?} with tokens, {weights:?}, {activations:?}");
                    cases.push(case(what, config, unaligned, &made));
                }
            }
        }
    }
}

fn cases_with_steps<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        for (i, of_configs) in (0..).zip(WITH_STEPS) {
            let GemvCase { rows, cols, tokens, slices, weights, activations, .. } = of_configs;
            for (number, steps) in STEPS.iter().enumerate() {
                let make = move || {
                    let product = Product::<T>::new(format, (rows, cols, tokens), weights, activations, i);
                    Arc::new(product.with_steps(number))
                };
                let made: Lazy<T> = Arc::new(LazyLock::new(Box::new(make)));
                let configs = GemmConfig::for_operands(format, T::DTYPE);
                let takes = |config: &GemmConfig| match config.mainloop {
                    Mainloop::GemvRagged => true,
                    mainloop => mainloop.is_gemv() && cols > 0,
                };
                for config in configs.filter(takes) {
                    let slices = if config.mainloop == Mainloop::GemvRagged { 1 } else { slices };
                    let config = config.with_slices(slices);
                    let what = format!(
                        "{config}, {rows}x{cols}, {tokens} tokens, {weights:?}, {activations:?}, {steps:?}"
                    );
                    cases.push(case(what, config, false, &made));
                }
            }
        }
    }
}

/// Adds every case of these kernels.
pub(crate) fn weights_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
    cases_with_steps::<f16>(cases);
    cases_with_steps::<bf16>(cases);
}
