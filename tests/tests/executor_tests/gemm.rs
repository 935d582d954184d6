//! Cases of products of weights and activations of any number of tokens.

use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::{Activation, Format, Words};
use microscale_kernels_abi::Divider;
use microscale_kernels_abi::epilogue::{MergeGrid, PARTS, SplitGrid};
use microscale_kernels_abi::gemm::{COUNTERS, Edition, ScalePieces, TokenTile};
use microscale_kernels_abi::gemm_grids::{ArrangeGrid, GemmGrid, left_bytes};
use microscale_test_support::operands::Scales;
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations as X, Bound, ExactProducts};

use super::case::{MOST_SHARED, Prepared, argument, no_experts};
use super::cases::Case;
use super::quantizing::word;
use super::steps::{Fused, STEPS};
use super::weights::Weights::{self, Beyond, Cancelling, Edges, Far, Of, Zeros};
use super::weights::{LEAST, Product, shape};

/// Rows, columns, tokens, resident thread blocks, stages, and kinds of weights and activations.
///
/// The cases cover one and several work tiles, whole and split ones, two and many thread blocks,
/// partial tiles in all dimensions, fewer and more k-iterations than stages, and more work tiles
/// than the queue has slots.
const CASES: [(usize, usize, usize, u32, u32, Weights, X); 21] = [
    (1, 64, 1, 1, 2, Of(Scales::Common), X::Common),
    (16, 128, 16, 4, 3, Of(Scales::Common), X::Numbers),
    (300, 128, 17, 3, 2, Of(Scales::Common), X::Common),
    (20, 1152, 5, 2, 3, Edges, X::Common),
    (17, 2304, 7, 3, 8, Beyond, X::Common),
    (70, 640, 40, 5, 4, Zeros, X::Numbers),
    (520, 256, 16, 1, 2, Of(Scales::Common), X::Common),
    (600, 512, 33, 2, 3, Beyond, X::Common),
    (5, 1020, 3, 4, 2, Of(Scales::Any), X::Any),
    (33, 380, 65, 2, 3, Of(Scales::Numbers), X::Common),
    (40, 1088, 9, 7, 5, Of(Scales::Common), X::Tiny),
    (6, 1024, 6, 2, 3, Cancelling, X::Common),
    (260, 704, 130, 3, 4, Of(Scales::Common), X::Common),
    (250, 2880, 2, 2, 6, Zeros, X::Common),
    (140, 256, 270, 3, 3, Of(Scales::Common), X::Common),
    (20, 640, 100, 2, 6, Of(Scales::Common), X::Common),
    (130, 384, 160, 3, 4, Of(Scales::Common), X::Numbers),
    (10, 700, 180, 1, 3, Zeros, X::Common),
    (40, 256, 20, 2, 3, Far, X::Common),
    (40, 256, 20, 2, 3, Far, X::Common),
    (3, 64, 290, 1, 2, Of(Scales::Common), X::Common),
];

/// Returns the name of an edition in kernel names.
fn edition_word(edition: Edition) -> &'static str {
    match edition {
        Edition::Mma => "mma",
        Edition::Wgmma => "wgmma",
    }
}

/// Arranges activations and multiplies, on a GPU with room for `at_once` thread blocks.
///
/// Buffers have exactly the required alignment and no more.
fn multiplying<T: Exact + Activation>(
    product: &Arc<Product<T>>,
    (edition, tile): (Edition, TokenTile),
    [at_once, stages, pairs]: [u32; 3],
) -> Prepared {
    let Product { weights, x, tokens, .. } = &**product;
    let mut case = Prepared::new();
    // Activations start in the middle of 16 bytes if the number of tokens is odd. Otherwise their
    // rows do.
    let odd = tokens % 2 == 1;
    let activations = if odd {
        case.values(x, true)
    } else {
        case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(x), 16).into()
    };
    let aligned = !odd && weights.cols().is_multiple_of(8);
    let arranged_grid =
        ArrangeGrid::new((edition, tile), weights.cols() as u64, *tokens as u64, aligned, at_once)
            .expect("a small launch");
    let arranged = case.memory.allocate_aligned("arranged", arranged_grid.bytes() as usize, 16);
    let [plan, from, to] = no_experts();
    let arguments =
        vec![activations.clone(), arranged.into(), plan.clone(), from.clone(), argument(&arranged_grid)];
    case.step(format!("arrange_{}", T::DTYPE.word()), u64::from(arranged_grid.thread_blocks), arguments);

    let stage = edition.stage(tile, *tokens as u32, ScalePieces::MOST);
    let shared = stage.shared_bytes(stages.min(stage.count(MOST_SHARED)));
    let grid = GemmGrid::new((edition, tile), shape(weights), *tokens as u64, at_once, shared);
    let grid = match pairs {
        0 => grid,
        _ => grid.and_then(|grid| grid.in_pairs((edition, tile), pairs)),
    };
    let grid = grid.expect("a small launch");
    let codes = case.memory.allocate_from_aligned("codes", weights.codes(), 16);
    let scales = case.memory.allocate_from_aligned("scales", weights.scales(), 16);
    let (slot, apply) = case.global_scale(weights);
    let [bytes, each] = product.result_bytes();
    let out = case.memory.allocate_aligned("out", bytes, each as u64);
    let ([bias, residual], steps) = Fused::arguments(product.fused.as_ref(), &mut case);
    let counters = case.memory.allocate_from_aligned("counters", &[0; 4 * COUNTERS as usize], 4);
    let left =
        case.memory.allocate_aligned("left", left_bytes(grid.schedule.thread_blocks, tile) as usize, 16);
    case.step(
        gemm_kernel::<T>(weights.format(), edition, tile) + if pairs == 0 { "" } else { "_paired" },
        u64::from(grid.schedule.thread_blocks),
        vec![
            codes.into(),
            scales.into(),
            slot,
            activations,
            arranged.into(),
            out.into(),
            counters.into(),
            left.into(),
            plan,
            from,
            to,
            bias,
            residual,
            argument(&grid),
            apply,
            steps,
        ],
    );
    case.shaped((edition.threads(tile), shared));
    case.in_clusters(1 + grid.schedule.paired);
    case.expect("counters", counters, vec![0; 4 * COUNTERS as usize]);
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

/// Returns the name of a kernel.
pub(super) fn gemm_kernel<T: Activation>(format: Format, edition: Edition, tile: TokenTile) -> String {
    let (format, dtype, edition) = (word(format), T::DTYPE.word(), edition_word(edition));
    format!("{format}_gemm_weights_{dtype}_{edition}_n{}", tile.tokens())
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        for (i, (rows, cols, tokens, at_once, stages, kind, x)) in (0..).zip(CASES) {
            let shape = (rows, cols, tokens);
            let made =
                Arc::new(LazyLock::new(move || Arc::new(Product::<T>::new(format, shape, kind, x, i))));
            let case = |kernel: String, edition: Edition, tile: TokenTile| {
                let what =
                    format!("{shape:?} with tokens, {at_once} at once, {stages} stages, {kind:?}, {x:?}");
                let made = Arc::clone(&made);
                let make = move || multiplying(&made, (edition, tile), [at_once, stages, 0]);
                Case { by_tensor_cores: true, ..Case::new(what, kernel, make) }
            };
            for edition in [Edition::Mma, Edition::Wgmma] {
                let tiles = TokenTile::ALL.into_iter().filter(|tile| edition.has(*tile));
                cases.extend(tiles.map(|tile| case(gemm_kernel::<T>(format, edition, tile), edition, tile)));
            }
            cases.push(case(format!("arrange_{}", T::DTYPE.word()), Edition::Mma, TokenTile::N16));
        }
    }
}

/// Cases of the GEMM in pairs of thread blocks.
///
/// Each has rows, columns, tokens, resident pairs, stages, and kinds of weights and activations.
///
/// The cases cover one pair per work tile and several, work tiles along rows and along tokens, and
/// tokens in both halves of a token tile, in one half, and in two token tiles.
const IN_PAIRS: [(usize, usize, usize, u32, u32, Weights, X); 6] = [
    (20, 512, 16, 1, 2, Of(Scales::Common), X::Common),
    (300, 1024, 33, 6, 3, Beyond, X::Numbers),
    (70, 2048, 64, 4, 2, Edges, X::Common),
    (36, 2048, 70, 6, 4, Zeros, X::Common),
    (6, 1024, 128, 4, 3, Cancelling, X::Common),
    (140, 960, 30, 5, 4, Of(Scales::Any), X::Any),
];

fn cases_in_pairs<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        for (i, (rows, cols, tokens, pairs, stages, kind, x)) in (0..).zip(IN_PAIRS) {
            for number in [None, Some(i as usize % STEPS.len())] {
                let made = Arc::new(LazyLock::new(move || {
                    let product = Product::<T>::new(format, (rows, cols, tokens), kind, x, i);
                    Arc::new(match number {
                        None => product,
                        Some(number) => product.with_steps(number),
                    })
                }));
                let steps = number.map(|number| STEPS[number]);
                for tile in TokenTile::ALL.into_iter().filter(|tile| Edition::Wgmma.has_pairs(*tile)) {
                    let what =
                        format!("{rows}x{cols}, {tokens} tokens, {pairs} pairs, {kind:?}, {x:?}, {steps:?}");
                    let made = Arc::clone(&made);
                    let make = move || multiplying(&made, (Edition::Wgmma, tile), [2 * pairs, stages, pairs]);
                    let kernel = gemm_kernel::<T>(format, Edition::Wgmma, tile) + "_paired";
                    let case = Case::new(what, kernel, make);
                    cases.push(Case { by_tensor_cores: true, ..case });
                }
            }
        }
    }
}

/// Rows, columns, tokens, resident thread blocks and stages of products with an epilogue.
const WITH_STEPS: [(usize, usize, usize, u32, u32, Weights, X); 3] = [
    (38, 256, 21, 2, 2, Of(Scales::Common), X::Common),
    (290, 512, 70, 3, 3, Beyond, X::Common),
    (20, 384, 150, 2, 3, Of(Scales::Common), X::Numbers),
];

fn cases_with_steps<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        for (i, (rows, cols, tokens, at_once, stages, kind, x)) in (0..).zip(WITH_STEPS) {
            for (number, steps) in STEPS.iter().enumerate() {
                let made = Arc::new(LazyLock::new(move || {
                    let product = Product::<T>::new(format, (rows, cols, tokens), kind, x, i);
                    Arc::new(product.with_steps(number))
                }));
                for edition in [Edition::Mma, Edition::Wgmma] {
                    for tile in TokenTile::ALL.into_iter().filter(|tile| edition.has(*tile)) {
                        let what = format!("{rows}x{cols}, {tokens} tokens, {kind:?}, {x:?}, {steps:?}");
                        let made = Arc::clone(&made);
                        let make = move || multiplying(&made, (edition, tile), [at_once, stages, 0]);
                        let case = Case::new(what, gemm_kernel::<T>(format, edition, tile), make);
                        cases.push(Case { by_tensor_cores: true, ..case });
                    }
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
    let fused = Fused::of::<f32, f32>(number, rows, tokens);
    let ([bias, residual], steps) = Fused::arguments(Some(&fused), &mut case);
    let from = case.memory.allocate_from_aligned("sums", bytemuck::cast_slice(&sums), 4);
    let out = case.memory.allocate_aligned("out", fused.bytes[0], 4);
    let results = fused.bytes[0] / 4 / tokens;
    let grid = MergeGrid {
        rows: rows as u64,
        results: Divider::new(results as u64),
        count: (results * tokens) as u64,
    };
    let [plan, list, _] = no_experts();
    let arguments = vec![from.into(), out.into(), bias, residual, plan, list, argument(&grid), steps];
    case.step("merge_f32", grid.count, arguments);
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
    cases_in_pairs::<f16>(cases);
    cases_in_pairs::<bf16>(cases);
    cases_with_steps::<f16>(cases);
    cases_with_steps::<bf16>(cases);
    for (rows, cols, odd) in [(1, 4, false), (3, 260, false), (5, 63, false), (2, 512, true), (40, 100, true)]
    {
        let what = format!("{rows}x{cols}, odd: {odd}");
        cases.push(Case::new(what, "split_f32".into(), move || splitting(rows, cols, odd)));
    }
    for (number, steps) in STEPS.iter().enumerate() {
        for (rows, tokens) in [(2, 1), (300, 3)] {
            let what = format!("{rows} rows, {tokens} tokens, {steps:?}");
            cases.push(Case::new(what, "merge_f32".into(), move || merging(rows, tokens, number)));
        }
    }
}
