//! Cases of products of experts' weights and tokens.

use std::mem::offset_of;
use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::{Activation, Format};
use microscale_executor::{Argument, Buffer};
use microscale_kernels_abi::experts::{ExpertTile, Plan, PlanGrid, RouteGrid, Sorted};
use microscale_kernels_abi::gemm::gemv::{GemvParams, PlainParams, TokenTiles};
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams};
use microscale_kernels_abi::gemm::stage::ScalePieces;
use microscale_kernels_abi::gemm::{PACK_COLUMNS, TILE_COLUMNS, WeightsShape};
use microscale_kernels_abi::{Divider, GemmConfig, Mainloop};
use microscale_test_support::operands::Scales;
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations as X, Bound};

use super::case::{MOST_SHARED, Prepared, argument};
use super::cases::Case;
use super::gemm::{Multiplication, pack_activations};
use super::steps::Fused;
use super::weights::Weights::{self, Beyond, Of};
use super::weights::{LEAST, Product, adds_one_token, gemv_bound, kernel_of, shape};

/// Fills bytes that kernels must not write.
pub(super) const UNTOUCHED: u8 = 0x5a;

/// Pairs of a token and an expert: the number per expert, and the number without an expert.
///
/// They come in a mixed order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) of_experts: &'static [usize],
    pub(super) of_none: usize,
}

impl Counts {
    /// No pairs.
    pub(super) const NONE: Self = Self { of_experts: &[], of_none: 0 };

    pub(super) fn pairs(&self) -> usize {
        self.of_experts.iter().sum::<usize>() + self.of_none
    }

    /// Returns the expert of each pair, or an index past the last expert if it has none.
    pub(super) fn chosen(&self, seed: u64) -> Vec<u32> {
        let with_none = self.of_experts.iter().chain([&self.of_none]);
        let of = |(expert, count): (u32, &usize)| std::iter::repeat_n(expert, *count);
        let mut chosen: Vec<_> = (0..).zip(with_none).flat_map(of).collect();
        let mut random = fastrand::Rng::with_seed(seed);
        random.shuffle(&mut chosen);
        for expert in chosen.iter_mut().filter(|expert| **expert as usize == self.of_experts.len()) {
            *expert = [*expert, u32::MAX][random.usize(..2)];
        }
        chosen
    }
}

/// Returns the pairs sorted by expert, stably.
pub(super) fn sorted(chosen: &[u32], experts: usize) -> Vec<usize> {
    let of = |expert| (0..chosen.len()).filter(move |pair| chosen[*pair] == expert);
    (0..experts as u32).flat_map(of).collect()
}

/// Output buffers of sorting.
pub(super) struct Routed {
    ends: Buffer,
    pub(super) tokens: Buffer,
    pub(super) pairs: Buffer,
    sorted: Buffer,
}

fn bytes_of(numbers: &[u32]) -> Vec<u8> {
    bytemuck::cast_slice(numbers).to_vec()
}

/// Sorts pairs, and expects the right result.
pub(super) fn route(case: &mut Prepared, chosen: &[u32], experts: usize, top_k: usize) -> Routed {
    let right = sorted(chosen, experts);
    let count_up_to = |expert: u32| right.iter().filter(|pair| chosen[**pair] <= expert).count() as u32;
    let ends: Vec<_> = (0..experts as u32).map(count_up_to).collect();
    let mut list = |name, of_pair: fn(usize, usize) -> usize| {
        let mut expected =
            bytes_of(&right.iter().map(|pair| of_pair(*pair, top_k) as u32).collect::<Vec<_>>());
        expected.resize(4 * chosen.len(), UNTOUCHED);
        let buffer = case.memory.allocate_from_aligned(name, &vec![UNTOUCHED; 4 * chosen.len()], 4);
        case.expect(name, buffer, expected);
        buffer
    };
    let tokens = list("tokens", |pair, top_k| pair / top_k);
    let pairs = list("pairs", |pair, _| pair);
    let grid =
        RouteGrid { top_k: Divider::new(top_k as u64), pairs: chosen.len() as u32, experts: experts as u32 };
    let of_pairs = case.memory.allocate_from_aligned("chosen", &bytes_of(chosen), 4);
    let to = case.memory.allocate_aligned("ends", 4 * experts, 4);
    case.expect("ends", to, bytes_of(&ends));
    let sorted = case.memory.allocate_aligned("sorted", size_of::<Sorted>(), 4);
    case.expect("sorted", sorted, bytes_of(&[chosen.len() as u32, top_k as u32]));
    let arguments =
        vec![of_pairs.into(), to.into(), tokens.into(), pairs.into(), sorted.into(), argument(&grid)];
    case.step("route_to_experts", experts as u64, arguments);
    Routed { ends: to, tokens, pairs, sorted }
}

/// Plans token tiles, and checks them.
///
/// They must hold each expert's rows in order, with the grid's number of rows per pair, and nothing
/// else.
pub(super) fn plan(case: &mut Prepared, routed: &Routed, counts: Counts, grid: PlanGrid) -> Buffer {
    let bytes = Plan::bytes(u64::from(grid.most_tiles)) as usize;
    let plan = case.memory.allocate_from_aligned("plan", &vec![UNTOUCHED; bytes], 16);
    case.step(
        "plan_experts",
        1,
        vec![routed.ends.into(), routed.sorted.into(), plan.into(), argument(&grid)],
    );
    case.checks.push(Box::new(move |memory| {
        let found = memory.bytes(plan).map_err(|error| error.to_string())?;
        let rows_of = |count: &usize| *count as u32 * grid.of_pair;
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&found[size_of::<Plan>()..]);
        let mut tiles = words.as_chunks::<{ size_of::<ExpertTile>() / 4 }>().0.iter();
        let (mut row, mut with_rows) = (0, 0u32);
        for (expert, count) in (0..).zip(counts.of_experts) {
            let end = row + rows_of(count);
            while row < end {
                let behind = end.min(row + grid.tile_rows.divisor);
                let right = [expert, row, behind, 0];
                if tiles.next() != Some(&right) {
                    return Err(format!("not in the plan: {right:?}"));
                }
                (row, with_rows) = (behind, with_rows + 1);
            }
        }
        if found[offset_of!(Plan, tiles)..][..4] != with_rows.to_ne_bytes() {
            return Err(format!("the plan does not say that {with_rows} tiles have rows"));
        }
        if tiles.all(|tile| *tile == [0; 4]) { Ok(()) } else { Err("more in the plan".into()) }
    }));
    plan
}

/// A configuration, with the base-2 logarithm of the tokens of its token tiles.
#[derive(Clone, Copy, Debug)]
struct By {
    config: GemmConfig,
    /// Rows per token tile, at most.
    tile_rows: u32,
}

/// Slices of K of the configurations that have them.
const SLICES: u32 = 2;

/// Each expert's weights with its activations. An expert without rows has one that no pair uses.
type Experts<T> = Vec<Product<T>>;

/// The order of activation rows and result rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rows {
    /// Activations by pair, results sorted.
    Gathered,
    /// Activations sorted, results by pair.
    Scattered,
    /// Both by pair.
    Paired,
}

/// Sorts pairs, plans and multiplies, on a GPU with room for `at_once` thread blocks.
fn multiplying<T: Exact + Activation>(
    experts: &Arc<Experts<T>>,
    counts: Counts,
    (by, rows): (By, Rows),
    thread_blocks: u32,
) -> Prepared {
    let mut case = Prepared::new();
    let pairs = counts.pairs();
    let chosen = counts.chosen(pairs as u64);
    let order = sorted(&chosen, experts.len());
    let routed = route(&mut case, &chosen, experts.len(), 1);
    let null = Argument::from(0u64);
    let (from, to) = match rows {
        Rows::Gathered => (routed.tokens.into(), null),
        Rows::Scattered => (null, routed.pairs.into()),
        Rows::Paired => (routed.pairs.into(), routed.pairs.into()),
    };

    let weights = &experts[0].weights;
    let (shape, cols) = (shape(weights), weights.cols());
    // Sorted rows of activations, and where each lies.
    let place = |sorted: usize| if rows == Rows::Scattered { sorted } else { order[sorted] };
    let mut x = vec![T::default(); pairs * cols];
    let of_experts = experts.iter().zip(counts.of_experts);
    let sorted_rows = of_experts.flat_map(|(expert, count)| expert.x.chunks(cols).take(*count));
    for (sorted, row) in sorted_rows.enumerate() {
        x[place(sorted) * cols..][..cols].copy_from_slice(row);
    }
    let x: Argument = case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(&x), 16).into();
    let all = |of: fn(&Product<T>) -> &[u8]| experts.iter().flat_map(of).copied().collect::<Vec<_>>();
    let codes = case.memory.allocate_from_aligned("codes", &all(|expert| expert.weights.codes()), 16);
    let scales = case.memory.allocate_from_aligned("scales", &all(|expert| expert.weights.scales()), 16);
    let tensors: Vec<_> = experts.iter().map(|expert| &expert.weights).collect();
    let (slots, apply) = case.global_scales(&tensors);
    let out_bytes = pairs * weights.rows() * size_of::<T>();
    let out = case.memory.allocate_from_aligned("out", &vec![UNTOUCHED; out_bytes], 2);

    let By { config, tile_rows } = by;
    let of = Sorted { pairs: pairs as u32, top_k: 1 };
    let mut grid = PlanGrid::new(experts.len() as u64, of, 1, tile_rows).expect("a small launch");
    let tiles = TokenTiles { count: u64::from(grid.most_tiles), bits: tile_rows.ilog2() };
    let ([bias, residual], steps) = Fused::none();
    if config.mainloop.is_gemv() {
        let plan = plan(&mut case, &routed, counts, grid);
        let GemvLaunch { params, elements, shape } = gemv_launch(config, shape, pairs, tiles, thread_blocks);
        let operands = vec![codes.into(), scales.into(), slots, x];
        let rest = vec![out.into(), plan.into(), from, to, bias, residual, params, apply, steps];
        case.step(kernel_of(config), elements, [operands, rest].concat());
        shape.into_iter().for_each(|shape| case.shaped(shape));
    } else {
        let stage = config.stage(ScalePieces::MOST);
        let shared = stage.shared_bytes(stage.count(MOST_SHARED).min(3));
        grid.row_tiles = shape.rows.div_ceil(u64::from(config.tile_m)) as u32;
        grid.k_iterations = shape.cols.div_ceil(u64::from(stage.packs * PACK_COLUMNS)) as u32;
        grid.at_once = thread_blocks;
        let plan = plan(&mut case, &routed, counts, grid);
        let tokens = tiles.count * u64::from(config.tile_n);
        let pack = PackParams::new(config, shape.cols, tokens, cols.is_multiple_of(8));
        let of_rows = [plan.into(), from.clone()];
        let packed = pack_activations::<T>(&mut case, config, pack, x.clone(), of_rows);
        let gemm = GemmParams::new(config, shape, tokens, thread_blocks, shared).expect("a small launch");
        Multiplication {
            config,
            gemm: &gemm,
            thread_blocks,
            codes: (codes, experts.len()),
            weights: [scales.into(), slots],
            apply,
            activations: x,
            packed,
            out,
            routed: [plan.into(), from, to],
            epilogue: ([bias, residual], steps),
        }
        .launch(&mut case);
    }
    let experts = Arc::clone(experts);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        check(&experts, counts, by, &bytes, |sorted| match rows {
            Rows::Gathered => sorted,
            Rows::Scattered | Rows::Paired => order[sorted],
        })
    }));
    case
}

/// A launch of the GEMV.
struct GemvLaunch {
    params: Argument,
    elements: u64,
    /// Threads and bytes of shared memory, if they are not the kernel's own.
    shape: Option<(u32, u32)>,
}

fn gemv_launch(
    config: GemmConfig,
    shape: WeightsShape,
    pairs: usize,
    tiles: TokenTiles,
    thread_blocks: u32,
) -> GemvLaunch {
    let pairs = pairs as u64;
    if config.mainloop == Mainloop::Gemv {
        let params = GemvParams::new(config, shape, pairs, tiles, 4, thread_blocks).expect("a small launch");
        let (elements, launch) = (params.thread_blocks(), params.threads_and_shared(config));
        return GemvLaunch { params: argument(&params), elements, shape: Some(launch) };
    }
    let params = PlainParams::new(config, shape, pairs, tiles).expect("a small launch");
    let ragged = config.mainloop == Mainloop::GemvRagged;
    let elements = if ragged { shape.rows } else { params.thread_blocks() };
    GemvLaunch { params: argument(&params), elements, shape: None }
}

/// Returns the defect of results, given the position of each sorted row's results. Bytes at other
/// positions must be untouched.
fn check<T: Exact + Activation>(
    experts: &Experts<T>,
    counts: Counts,
    By { config, tile_rows }: By,
    bytes: &[u8],
    place: impl Fn(usize) -> usize,
) -> Result<(), String> {
    let row_bytes = experts[0].weights.rows() * size_of::<T>();
    let mut written = vec![false; counts.pairs()];
    let mut sorted = 0;
    for (number, (expert, count)) in experts.iter().zip(counts.of_experts).enumerate() {
        let mut found = Vec::new();
        for _ in 0..*count {
            written[place(sorted)] = true;
            found.extend_from_slice(&bytes[place(sorted) * row_bytes..][..row_bytes]);
            sorted += 1;
        }
        if *count == 0 {
            continue;
        }
        let found: Vec<T> = bytemuck::pod_collect_to_vec(&found);
        let Product { weights, results, exact, .. } = expert;
        let right = match config.mainloop {
            Mainloop::Gemv if adds_one_token(config) => {
                exact.check(&found, &gemv_bound::<T>(config, weights, 1)).map(|_| ())
            }
            Mainloop::Gemv | Mainloop::GemvPlain => {
                expert.check(&found, &gemv_bound::<T>(config, weights, tile_rows as usize))
            }
            Mainloop::GemvRagged
                if bytemuck::cast_slice::<T, u8>(&found) != bytemuck::cast_slice::<T, u8>(results) =>
            {
                Err("not the definition's bits".into())
            }
            Mainloop::GemvRagged => Ok(()),
            _ => expert.check(&found, &Bound::of_gemm::<T>(weights.cols(), LEAST)),
        };
        right.map_err(|error| format!("expert {number}: {error}"))?;
    }
    let untouched = bytes.chunks(row_bytes).zip(&written).filter(|(_, written)| !**written);
    for (row, _) in untouched {
        if row.iter().any(|byte| *byte != UNTOUCHED) {
            return Err("a result that is nobody's".into());
        }
    }
    Ok(())
}

/// A product of experts' rows that is executed.
#[derive(Clone, Copy, Debug)]
struct ExpertsCase {
    /// Rows and columns of each expert's weights.
    rows: usize,
    cols: usize,
    counts: Counts,
    /// Thread blocks that the GPU has room for.
    thread_blocks: u32,
    weights: Weights,
}

/// Experts without rows, with one, with more than a token tile has; pairs of no expert; more work tiles than
/// thread blocks and fewer.
const CASES: [ExpertsCase; 4] = [
    ExpertsCase {
        rows: 40,
        cols: 256,
        counts: Counts { of_experts: &[2, 0, 9, 1], of_none: 2 },
        thread_blocks: 2,
        weights: Of(Scales::Common),
    },
    ExpertsCase {
        rows: 300,
        cols: 128,
        counts: Counts { of_experts: &[0, 1, 0, 17, 0], of_none: 0 },
        thread_blocks: 5,
        weights: Beyond,
    },
    ExpertsCase {
        rows: 20,
        cols: 640,
        counts: Counts { of_experts: &[5, 34], of_none: 1 },
        thread_blocks: 3,
        weights: Of(Scales::Common),
    },
    ExpertsCase {
        rows: 24,
        cols: 384,
        counts: Counts { of_experts: &[100, 3, 170], of_none: 0 },
        thread_blocks: 2,
        weights: Of(Scales::Common),
    },
];

/// The configurations for a format without clusters: the experts' schedule has none. Those for up to eight
/// tokens come with token tiles of fewer as well.
fn configs<T: Activation>(format: Format) -> Vec<By> {
    let all = GemmConfig::for_operands(format, T::DTYPE).filter(|config| config.cluster == 1);
    let with_tile_rows = |config: GemmConfig| {
        let tile_rows = match (config.mainloop, config.row_tiles(), config.tile_n) {
            (Mainloop::Gemv, 1, TILE_COLUMNS) => vec![2, 4],
            (Mainloop::GemvPlain, 1, _) => vec![2, 4],
            (Mainloop::GemvPlain, ..) => vec![1, 8],
            (Mainloop::GemvRagged, ..) => vec![8],
            _ => vec![config.tile_n],
        };
        let sliced = matches!(config.mainloop, Mainloop::Gemv | Mainloop::GemvPlain);
        let config = if sliced { config.with_slices(SLICES) } else { config };
        tile_rows.into_iter().map(move |tile_rows| By { config, tile_rows })
    };
    all.flat_map(with_tile_rows).collect()
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        for (i, case) in (0..).zip(CASES) {
            let ExpertsCase { rows, cols, counts, thread_blocks, weights } = case;
            let made = Arc::new(LazyLock::new(move || {
                // All global scales have the same kind.
                let of = |(expert, count): (u64, &usize)| {
                    let shape = (rows, cols, (*count).max(1));
                    Product::<T>::new(format, shape, weights, X::Common, i + 3 * expert)
                };
                Arc::new((0..).zip(counts.of_experts).map(of).collect::<Experts<T>>())
            }));
            for (j, by) in configs::<T>(format).into_iter().enumerate() {
                let rows = [Rows::Gathered, Rows::Scattered, Rows::Paired][(i as usize + j) % 3];
                let made = Arc::clone(&made);
                let make = move || multiplying(&made, counts, (by, rows), thread_blocks);
                let what = format!(
                    "{}, token tiles of {}, {rows:?}, {counts:?}, {weights:?}",
                    by.config, by.tile_rows
                );
                let case = Case::new(what, kernel_of(by.config).into(), make);
                let by_tensor_cores = by.config.mainloop != Mainloop::GemvRagged;
                let mainloop = Some(by.config.mainloop);
                cases.push(Case { by_tensor_cores, mainloop, ..case });
            }
        }
    }
}

/// Adds every case of experts.
pub(crate) fn experts_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
    for (i, (of_experts, of_none, top_k)) in
        (0..).zip([(&[3, 0, 1, 40, 2, 5][..], 3, 2), (&[70; 40], 0, 4), (&[0, 0, 1], 0, 1), (&[0], 2, 1)])
    {
        // A plan is made for given lists. Lists of other tokens give an empty plan.
        let plans = [None, Some((top_k, Counts { of_experts, of_none })), Some((top_k + 1, Counts::NONE))];
        for asked in plans {
            let make = move || {
                let mut case = Prepared::new();
                let counts = Counts { of_experts, of_none };
                let routed = route(&mut case, &counts.chosen(i), of_experts.len(), top_k);
                // A case's kernel is its last one.
                if let Some((top_k, planned)) = asked {
                    let of = Sorted { pairs: counts.pairs() as u32, top_k: top_k as u32 };
                    let grid = PlanGrid::new(of_experts.len() as u64, of, 1, i as u32 + 1);
                    plan(&mut case, &routed, planned, grid.expect("a small launch"));
                }
                case
            };
            let what = format!("{} experts, {of_none} of none, {asked:?}", of_experts.len());
            let kernel = if asked.is_some() { "plan_experts" } else { "route_to_experts" };
            cases.push(Case::new(what, kernel.into(), make));
        }
    }
}
