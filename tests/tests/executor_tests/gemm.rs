//! Products of weights and activations of any number of tokens.

use std::sync::{Arc, LazyLock};

use half::{bf16, f16};
use microscale::{Activation, Format, Words};
use microscale_kernels_abi::gemm::{ArrangeGrid, COUNTERS, Edition, GemmGrid, TokenTile, left_bytes};
use microscale_test_support::operands::Scales;
use microscale_test_support::oracle::Exact;
use microscale_test_support::weights::{Activations as X, Bound};

use super::case::{Prepared, argument, no_experts};
use super::cases::Case;
use super::quantizing::word;
use super::weights::Weights::{self, Beyond, Cancelling, Edges, Of, Zeros};
use super::weights::{LEAST, Product, shape};

/// Rows, columns, tokens, thread blocks at once, stages: one work tile and several, whole ones and shared ones, by two thread
/// blocks and by many; rows, columns and tokens that end within a tile; fewer k-iterations than stages, and more.
const CASES: [(usize, usize, usize, u32, u32, Weights, X); 18] = [
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
];

/// Bytes of shared memory that a thread block has, at most.
pub(super) const MOST_SHARED: u32 = 227 << 10;

/// The word for an edition in kernels' names.
fn edition_word(edition: Edition) -> &'static str {
    match edition {
        Edition::Mma => "mma",
        Edition::Wgmma => "wgmma",
    }
}

/// Arranges activations and multiplies, on a GPU that has room for so many thread blocks at once. Buffers are aligned so far and
/// no further.
fn multiplying<T: Exact + Activation>(
    product: &Arc<Product<T>>,
    (edition, tile): (Edition, TokenTile),
    [at_once, stages]: [u32; 2],
) -> Prepared {
    let Product { weights, x, tokens, results, .. } = &**product;
    let mut case = Prepared::new();
    // Activations of an odd number of tokens start in the middle of 16 bytes, and so do rows of them otherwise.
    let odd = tokens % 2 == 1;
    let activations = if odd {
        case.values(x, true)
    } else {
        case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(x), 16).into()
    };
    let aligned = !odd && weights.cols().is_multiple_of(8);
    let arranged_grid = ArrangeGrid::new(edition, tile, weights.cols() as u64, *tokens as u64, aligned)
        .expect("a small launch");
    let arranged = case.memory.allocate_aligned("arranged", arranged_grid.bytes() as usize, 16);
    let elements = arranged_grid.thread_blocks() * u64::from(super::case::kernel("arrange_f16").elements);
    let [plan, from, to] = no_experts();
    let arguments =
        vec![activations.clone(), arranged.into(), plan.clone(), from.clone(), argument(&arranged_grid)];
    case.step(format!("arrange_{}", T::DTYPE.word()), elements, arguments);

    let stage = edition.stage(tile, *tokens as u32);
    let shared = stage.shared_bytes(stages.min(stage.count(MOST_SHARED)));
    let grid = GemmGrid::new((edition, tile), shape(weights), *tokens as u64, at_once, shared);
    let grid = grid.expect("a small launch");
    let codes = case.memory.allocate_from_aligned("codes", weights.codes(), 16);
    let scales = case.memory.allocate_from_aligned("scales", weights.scales(), 4);
    let (slot, apply) = case.global_scale(weights);
    let out = case.memory.allocate_aligned("out", size_of_val(&results[..]), 2);
    let counters = case.memory.allocate_from_aligned("counters", &[0; 4 * COUNTERS as usize], 4);
    let left =
        case.memory.allocate_aligned("left", left_bytes(grid.schedule.thread_blocks, tile) as usize, 16);
    case.step(
        gemm_kernel::<T>(weights.format(), edition, tile),
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
            argument(&grid),
            apply,
        ],
    );
    case.shaped((edition.threads(tile), shared));
    case.expect("counters", counters, vec![0; 4 * COUNTERS as usize]);
    let product = Arc::clone(product);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let found: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
        product.check(&found, &Bound::of_gemm::<T>(product.weights.cols(), LEAST))
    }));
    case
}

/// The name of a kernel.
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
                let make = move || multiplying(&made, (edition, tile), [at_once, stages]);
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

/// Every case of these kernels.
pub(crate) fn gemm_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
}
