//! Cases of products of experts' weights and tokens.

use std::mem::offset_of;
use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::{Activation, Format, Words};
use microscale_executor::{Argument, Buffer};
use microscale_kernels_abi::Divider;
use microscale_kernels_abi::experts::{ExpertTile, Plan, PlanGrid, RouteGrid, Sorted};
use microscale_kernels_abi::gemm::{COLUMNS, COUNTERS, Edition, ScalePieces, TokenTile};
use microscale_kernels_abi::gemm_grids::{ArrangeGrid, GemmGrid, left_bytes};
use microscale_kernels_abi::weights::{Pipelined, PipelinedGrid, TokenTiles, WeightsGrid};
use microscale_test_support::operands::Scales;
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations as X, Bound, segments};

use super::case::{MOST_SHARED, Prepared, argument};
use super::cases::Case;
use super::gemm::gemm_kernel;
use super::steps::Fused;
use super::weights::Weights::{self, Beyond, Of};
use super::weights::{LEAST, Product, shape, weights_kernel};

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
        let most = counts.of_experts.iter().map(rows_of).max().unwrap_or(0).min(1 << grid.tile_bits);
        if found[offset_of!(Plan, most_tokens)..][..4] != most.to_ne_bytes() {
            return Err(format!("the largest token tile has not {most} rows in the plan"));
        }
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&found[size_of::<Plan>()..]);
        let mut tiles = words.as_chunks::<{ size_of::<ExpertTile>() / 4 }>().0.iter();
        let (mut row, mut with_rows) = (0, 0u32);
        for (expert, count) in (0..).zip(counts.of_experts) {
            let end = row + rows_of(count);
            while row < end {
                let behind = end.min(row + (1 << grid.tile_bits));
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

/// A kernel, with the exponent of its token tiles.
#[derive(Clone, Copy, Debug)]
enum By {
    Pipelined { kernel: Pipelined, bits: u32 },
    Unpipelined { tiles: u32, bits: u32 },
    Ragged,
    Gemm { edition: Edition, tile: TokenTile },
}

impl By {
    fn bits(self) -> u32 {
        match self {
            Self::Pipelined { bits, .. } | Self::Unpipelined { bits, .. } => bits,
            Self::Ragged => 3,
            Self::Gemm { tile, .. } => tile.tokens().ilog2(),
        }
    }

    fn kernel<T: Activation>(self, format: Format) -> String {
        match self {
            Self::Pipelined { kernel: Pipelined { tokens, tiles }, .. } => {
                weights_kernel::<T>(format, &format!("m{tokens}_tiles{tiles}"))
            }
            Self::Unpipelined { tiles, .. } => {
                weights_kernel::<T>(format, &format!("unpipelined_tiles{tiles}"))
            }
            Self::Ragged => weights_kernel::<T>(format, "ragged"),
            Self::Gemm { edition, tile } => gemm_kernel::<T>(format, edition, tile),
        }
    }
}

/// Slices of K of the kernels that have them.
const SLICES: u32 = 2;

/// Each expert's weights with its activations. An expert without rows has one that no pair uses.
type Experts<T> = Vec<Product<T>>;

/// The order of activation rows and result rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rows {
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
    at_once: u32,
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
    let (shape, cols, format) = (shape(weights), weights.cols(), weights.format());
    // Sorted rows of activations, and the position of each.
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

    let of = Sorted { pairs: pairs as u32, top_k: 1 };
    let mut grid = PlanGrid::new(experts.len() as u64, of, 1, by.bits()).expect("a small launch");
    let count = u64::from(grid.most_tiles);
    let tiles = TokenTiles { count, bits: by.bits() };
    let front = vec![codes.into(), scales.into(), slots, x.clone()];
    if let By::Gemm { edition, tile } = by {
        let stage = edition.stage(tile, tile.tokens(), ScalePieces::MOST);
        let shared = stage.shared_bytes(stage.count(MOST_SHARED).min(3));
        grid.row_tiles = shape.rows.div_ceil(u64::from(tile.rows())) as u32;
        grid.k_iterations = shape.cols.div_ceil(u64::from(stage.images * COLUMNS)) as u32;
        grid.at_once = at_once;
        let plan = plan(&mut case, &routed, counts, grid);
        let tokens = count * u64::from(tile.tokens());
        let arrange = ArrangeGrid::new((edition, tile), shape.cols, tokens, cols.is_multiple_of(8), at_once);
        let arrange = arrange.expect("a small launch");
        let arranged = case.memory.allocate_aligned("arranged", arrange.bytes() as usize, 16);
        let arguments = vec![x, arranged.into(), plan.into(), Argument::clone(&from), argument(&arrange)];
        case.step(format!("arrange_{}", T::DTYPE.word()), u64::from(arrange.thread_blocks), arguments);
        let gemm = GemmGrid::new((edition, tile), shape, tokens, at_once, shared).expect("a small launch");
        let counters = case.memory.allocate_from_aligned("counters", &[0; 4 * COUNTERS as usize], 4);
        let left = case.memory.allocate_aligned("left", left_bytes(at_once, tile) as usize, 16);
        let behind = [arranged, out, counters, left, plan].map(Argument::from);
        let ([bias, residual], steps) = Fused::none();
        let last = vec![from, to, bias, residual, argument(&gemm), apply, steps];
        let arguments = [front, behind.into(), last].concat();
        case.step(by.kernel::<T>(format), u64::from(at_once), arguments);
        case.shaped((edition.threads(tile), shared));
        case.expect("counters", counters, vec![0; 4 * COUNTERS as usize]);
    } else {
        let plan = plan(&mut case, &routed, counts, grid);
        let rows = pairs as u64;
        let unpipelined = |tiles_of_warp, slices| {
            WeightsGrid::with(shape, rows, tiles, tiles_of_warp, slices).expect("a small launch")
        };
        let (grid, blocks, launch) = match by {
            By::Pipelined { kernel, .. } => {
                let grid = PipelinedGrid::with(kernel, shape, rows, tiles, [SLICES, 4], at_once);
                let grid = grid.expect("a small launch");
                (argument(&grid), grid.thread_blocks(), Some(grid.threads_and_shared(kernel)))
            }
            By::Unpipelined { tiles: of_warp, .. } => {
                let grid = unpipelined(of_warp, SLICES);
                (argument(&grid), grid.thread_blocks(), None)
            }
            _ => (argument(&unpipelined(1, 1)), shape.rows, None),
        };
        let ([bias, residual], steps) = Fused::none();
        let behind = vec![out.into(), plan.into(), from, to, bias, residual, grid, apply, steps];
        case.step(by.kernel::<T>(format), blocks, [front, behind].concat());
        if let Some(launch) = launch {
            case.shaped(launch);
        }
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

/// Checks results, given the position of each sorted row's results. Other bytes must be untouched.
fn check<T: Exact + Activation>(
    experts: &Experts<T>,
    counts: Counts,
    by: By,
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
        let parts = [segments(1 << by.bits()), SLICES as usize];
        let right = match by {
            By::Pipelined { kernel: Pipelined { tokens: 1, .. }, .. } => {
                exact.check(&found, &Bound::of_one_token::<T>(weights, SLICES as usize, LEAST)).map(|_| ())
            }
            By::Pipelined { .. } | By::Unpipelined { .. } => {
                expert.check(&found, &Bound::of_tensor_cores::<T>(weights.cols(), parts, LEAST))
            }
            By::Ragged if bytemuck::cast_slice::<T, u8>(&found) != bytemuck::cast_slice::<T, u8>(results) => {
                Err("not the definition's bits".into())
            }
            By::Ragged => Ok(()),
            By::Gemm { .. } => expert.check(&found, &Bound::of_gemm::<T>(weights.cols(), LEAST)),
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

/// Rows, columns, counts, resident thread blocks, and kinds of weights.
///
/// The cases cover experts without rows, with one row and with more than a token tile, pairs
/// without an expert, and more or fewer work tiles than thread blocks.
const CASES: [(usize, usize, Counts, u32, Weights); 4] = [
    (40, 256, Counts { of_experts: &[2, 0, 9, 1], of_none: 2 }, 2, Of(Scales::Common)),
    (300, 128, Counts { of_experts: &[0, 1, 0, 17, 0], of_none: 0 }, 5, Beyond),
    (20, 640, Counts { of_experts: &[5, 34], of_none: 1 }, 3, Of(Scales::Common)),
    (24, 384, Counts { of_experts: &[100, 3, 170], of_none: 0 }, 2, Of(Scales::Common)),
];

/// Returns all kernels.
fn kernels() -> Vec<By> {
    let mut all = vec![By::Ragged];
    for tiles in [1, 2, 4] {
        all.push(By::Pipelined { kernel: Pipelined { tokens: 1, tiles }, bits: 0 });
    }
    for (tiles, bits) in [(1, 1), (2, 3), (1, 2)] {
        all.push(By::Pipelined { kernel: Pipelined { tokens: 8, tiles }, bits });
        all.push(By::Unpipelined { tiles, bits });
    }
    all.push(By::Unpipelined { tiles: 2, bits: 0 });
    all.push(By::Pipelined { kernel: Pipelined { tokens: 16, tiles: 1 }, bits: 4 });
    all.push(By::Pipelined { kernel: Pipelined { tokens: 32, tiles: 2 }, bits: 5 });
    for edition in [Edition::Mma, Edition::Wgmma] {
        let tiles = TokenTile::ALL.into_iter().filter(|tile| edition.has(*tile));
        all.extend(tiles.map(|tile| By::Gemm { edition, tile }));
    }
    all
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        for (i, (rows, cols, counts, at_once, kind)) in (0..).zip(CASES) {
            let made = Arc::new(LazyLock::new(move || {
                // All global scales have the same kind.
                let of = |(expert, count): (u64, &usize)| {
                    Product::<T>::new(format, (rows, cols, (*count).max(1)), kind, X::Common, i + 3 * expert)
                };
                Arc::new((0..).zip(counts.of_experts).map(of).collect::<Experts<T>>())
            }));
            for (j, by) in kernels().into_iter().enumerate() {
                let rows = [Rows::Gathered, Rows::Scattered, Rows::Paired][(i as usize + j) % 3];
                let made = Arc::clone(&made);
                let make = move || multiplying(&made, counts, (by, rows), at_once);
                let case = Case::new(
                    format!("{by:?}, {rows:?}, {counts:?}, {kind:?}"),
                    by.kernel::<T>(format),
                    make,
                );
                cases.push(Case { by_tensor_cores: !matches!(by, By::Ragged), ..case });
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
