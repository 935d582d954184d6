//! Cases of products of weights and activations.

use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::formats::nvfp4::Direction;
use microscale::{Activation, Format, GlobalScale, QuantizedTensor, Words, gemv_weights};
use microscale_executor::Argument;
use microscale_kernels_abi::weights::{Pipelined, PipelinedGrid, WeightsGrid, WeightsShape};
use microscale_test_support::operands::{Scales, changed, scale_of_one, tensor};
use microscale_test_support::oracle::{self, Exact, dot};
use microscale_test_support::order::{Order, cancelling};
use microscale_test_support::weights::{
    Activations, Bound, ExactProducts, activations, is_unusual, segments, usual_scales,
};

use super::case::{Prepared, argument, no_experts};
use super::cases::Case;
use super::quantizing::word;
use super::steps::{Fused, STEPS};
use super::weights_sizes::{M1, M8, M16_AND_M32, RAGGED, UNPIPELINED, WITH_STEPS};

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

    /// Makes a launch without expected results.
    ///
    /// Buffers have exactly the required alignment. Codes are aligned to 16 bytes, or 8 for ragged
    /// kernels. Scales are aligned to 4 bytes, to a chunk's scales for unpipelined kernels, or to a
    /// byte for ragged ones.
    fn launch(&self, variant: &str, grid: Argument, elements: u64, odd: bool) -> Launched {
        let Self { weights, x, .. } = self;
        let mut case = Prepared::new();
        let [codes, scales] = match variant {
            "ragged" => [8, 1],
            _ if variant.starts_with('m') => [16, 4],
            _ => [16, 32 / weights.format().block() as u64],
        };
        let codes = case.memory.allocate_from_aligned("codes", weights.codes(), codes);
        let scales = case.memory.allocate_from_aligned("scales", weights.scales(), scales);
        let (slot, apply) = case.global_scale(weights);
        let x: Argument = if odd {
            case.values(x, true)
        } else {
            case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(x), 16).into()
        };
        let [bytes, each] = self.result_bytes();
        let out = case.memory.allocate_aligned("out", bytes, each as u64);
        let [plan, from, to] = no_experts();
        let ([bias, residual], steps) = Fused::arguments(self.fused.as_ref(), &mut case);
        let routed = [plan, from, to, bias, residual, grid, apply, steps];
        let arguments = [vec![codes.into(), scales.into(), slot, x, out.into()], routed.into()].concat();
        case.step(weights_kernel::<T>(weights.format(), variant), elements, arguments);
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

/// Returns the name of a kernel.
pub(super) fn weights_kernel<T: Activation>(format: Format, variant: &str) -> String {
    format!("{}_gemv_weights_{}_{variant}", word(format), T::DTYPE.word())
}

pub(super) fn shape(weights: &QuantizedTensor) -> WeightsShape {
    let [rows, cols, blocks] = [weights.rows(), weights.cols(), weights.blocks_per_row()].map(|n| n as u64);
    WeightsShape { rows, cols, blocks }
}

fn grid(weights: &QuantizedTensor, tokens: usize, tiles: u32, slices: u32) -> WeightsGrid {
    WeightsGrid::new(shape(weights), tokens as u64, tiles, slices).expect("a small launch")
}

/// How tensor cores multiply weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Unpipelined, up to eight tokens at a time.
    Unpipelined,
    /// Pipelined, one token at a time.
    M1,
    /// Pipelined, up to eight tokens at a time.
    M8,
    /// Pipelined, up to 16 tokens at a time.
    M16,
    /// Pipelined, up to 32 tokens at a time.
    M32,
}

impl Kind {
    /// Returns the supported numbers of tiles.
    fn tiles(self) -> &'static [u32] {
        match self {
            Self::M1 => &[1, 2, 4],
            Self::Unpipelined | Self::M8 => &[1, 2],
            Self::M16 => &[1],
            Self::M32 => &[2],
        }
    }

    /// Returns the pipelined kernel, or `None` if it is not pipelined.
    fn pipelined(self, tiles: u32) -> Option<Pipelined> {
        let tokens = match self {
            Self::Unpipelined => return None,
            Self::M1 => 1,
            Self::M8 => 8,
            Self::M16 => 16,
            Self::M32 => 32,
        };
        Some(Pipelined { tokens, tiles })
    }

    /// Returns the segments of a row that a warp has side by side.
    fn segments(self, tokens: usize) -> usize {
        match self {
            Self::M16 | Self::M32 => 1,
            _ => segments(tokens),
        }
    }

    /// Returns the suffix of a kernel's name.
    fn variant(self, tiles: u32) -> String {
        match self.pipelined(tiles) {
            Some(Pipelined { tokens, .. }) => format!("m{tokens}_tiles{tiles}"),
            None => format!("unpipelined_tiles{tiles}"),
        }
    }

    /// Launches a kernel.
    ///
    /// Thread blocks of pipelined kernels have more warp groups with more tiles per warp. The GPU
    /// has room for few thread blocks, so each warp group has several work tiles.
    fn launch<T: Exact + Activation>(self, product: &Product<T>, tiles: u32, slices: u32) -> Launched {
        let Some(kernel) = self.pipelined(tiles) else {
            let grid = grid(&product.weights, product.tokens, tiles, slices);
            return product.launch(&self.variant(tiles), argument(&grid), grid.thread_blocks(), false);
        };
        let (warps, at_once) = [(slices, 3), (2 * slices, 2), (4 * slices, 1)][tiles.ilog2() as usize];
        self.launch_pipelined(product, tiles, [slices, warps.min(kernel.warps())], at_once)
    }

    /// Launches a pipelined kernel on a GPU with room for `at_once` thread blocks.
    pub(crate) fn launch_pipelined<T: Exact + Activation>(
        self,
        product: &Product<T>,
        tiles: u32,
        warps: [u32; 2],
        at_once: u32,
    ) -> Launched {
        let kernel = self.pipelined(tiles).expect("a pipelined kernel");
        let (shape, tokens) = (shape(&product.weights), product.tokens as u64);
        let grid = PipelinedGrid::new(kernel, shape, tokens, warps, at_once).expect("a small launch");
        let mut launched = product.launch(&self.variant(tiles), argument(&grid), grid.thread_blocks(), false);
        launched.case.shaped(grid.threads_and_shared(kernel));
        launched
    }

    /// Expects results within the kernels' error bound.
    ///
    /// Rows that fall back to the reference for several tokens must have the reference's bits.
    fn prepare<T: Exact + Activation>(self, product: &Arc<Product<T>>, tiles: u32, slices: u32) -> Prepared {
        let Launched { mut case, out } = self.launch(product, tiles, slices);
        let slices = slices as usize;
        if product.ordered {
            let segments = self.segments(product.tokens);
            let order = if self == Self::M1 { Order::M1 { slices } } else { Order::M8 { segments, slices } };
            let results = order.results(&product.weights, &product.x, product.tokens);
            case.expect("results", out, bytemuck::cast_slice(&results).to_vec());
        }
        let product = Arc::clone(product);
        case.checks.push(Box::new(move |memory| {
            let Product { weights, tokens, exact, .. } = &*product;
            let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
            let parts = [self.segments(*tokens), slices];
            let bound = match self {
                Self::M1 => Bound::of_one_token::<T>(weights, slices, LEAST),
                _ => Bound::of_tensor_cores::<T>(weights.cols(), parts, LEAST),
            };
            if let Some(fused) = &product.fused {
                return fused.check(&bytes, exact, &bound);
            }
            let found: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
            if self == Self::M1 {
                return exact.check(&found, &bound).map(|_| ());
            }
            product.check(&found, &bound)
        }));
        case
    }
}

/// Launches a kernel for ragged rows, which uses no tensor cores, and expects the reference's bits.
fn ragged<T: Exact + Activation>(product: &Arc<Product<T>>, odd: bool) -> Prepared {
    let grid = grid(&product.weights, product.tokens, 1, 1);
    let Launched { mut case, out } =
        product.launch("ragged", argument(&grid), product.weights.rows() as u64, odd);
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

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        let of = |by: Kind| move |case| (by, case);
        let all = (0..).zip(UNPIPELINED).map(of(Kind::Unpipelined)).chain((0..).zip(M1).map(of(Kind::M1)));
        let all = all.chain((0..).zip(M8).map(of(Kind::M8)));
        let more = [Kind::M16, Kind::M32].into_iter().flat_map(|by| (0..).zip(M16_AND_M32).map(of(by)));
        for (by, (i, (rows, cols, tokens, slices, kind, x))) in all.chain(more) {
            // Whole words of scales.
            let half = by != Kind::Unpipelined && format == Format::Nvfp4 && cols % 256 != 0;
            let shape = (rows, if half { (cols / 64 + 1) * 64 } else { cols }, tokens);
            let made =
                Arc::new(LazyLock::new(move || Arc::new(Product::<T>::new(format, shape, kind, x, i))));
            for &tiles in by.tiles() {
                // Two tiles use the opposite slice count, so that one tile and two tiles both occur
                // with every count.
                let slices = if tiles == 2 { (8 / slices).max(1) } else { slices };
                let what = format!("{shape:?} with tokens, {slices} slices, {kind:?}, {x:?}");
                let made = Arc::clone(&made);
                let kernel = weights_kernel::<T>(format, &by.variant(tiles));
                let case = Case::new(what, kernel, move || by.prepare(&made, tiles, slices));
                cases.push(Case { by_tensor_cores: true, ..case });
            }
        }
        for (i, (rows, cols, tokens, odd, kind, x)) in (0..).zip(RAGGED) {
            let made =
                LazyLock::new(move || Arc::new(Product::<T>::new(format, (rows, cols, tokens), kind, x, i)));
            let what = format!("{rows}x{cols}, {tokens} tokens, {kind:?}, {x:?}");
            cases.push(Case::new(what, weights_kernel::<T>(format, "ragged"), move || ragged(&made, odd)));
        }
    }
}

fn cases_with_steps<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        for (i, (rows, cols, tokens, slices, kind, x)) in (0..).zip(WITH_STEPS) {
            for (number, steps) in STEPS.iter().enumerate() {
                let made = Arc::new(LazyLock::new(move || {
                    let product = Product::<T>::new(format, (rows, cols, tokens), kind, x, i);
                    Arc::new(product.with_steps(number))
                }));
                let what = format!("{rows}x{cols}, {tokens} tokens, {kind:?}, {x:?}, {steps:?}");
                for by in [Kind::Unpipelined, Kind::M1, Kind::M8, Kind::M16, Kind::M32] {
                    for &tiles in by.tiles() {
                        let made = Arc::clone(&made);
                        let kernel = weights_kernel::<T>(format, &by.variant(tiles));
                        let make = move || by.prepare(&made, tiles, slices);
                        let what = format!("{what}, {slices} slices");
                        cases.push(Case { by_tensor_cores: true, ..Case::new(what, kernel, make) });
                    }
                }
                let kernel = weights_kernel::<T>(format, "ragged");
                cases.push(Case::new(what, kernel, move || ragged(&made, false)));
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
