//! Cases of products of experts' 4-bit weights and FP8 activations.

use std::sync::Arc;

use half::{bf16, f16};
use microscale::formats::{E4m3, fp4_dot, fp8_dot};
use microscale::{Activation, Format, QuantizedTensor};
use microscale_executor::Argument;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::fp8::PACK_FP8;
use microscale_kernels_abi::gemm::params::{GemmParams, PackParams};
use microscale_kernels_abi::gemm::stage::ScalePieces;
use microscale_test_support::operands::{Scales, row_of, sum_in_fp8, tensor};
use microscale_test_support::oracle::Exact;

use super::case::{MOST_SHARED, Prepared, argument};
use super::cases::Case;
use super::experts::{Counts, Rows, UNTOUCHED, plan, route, sorted};
use super::fp8::near;
use super::gemm::{Multiplication, add_cases};
use super::steps::Fused;
use super::weights::shape;

/// A product of experts' rows that is executed.
#[derive(Clone, Copy, Debug)]
struct ExpertsCase {
    /// Rows and columns of each expert's weights.
    rows: usize,
    cols: usize,
    counts: Counts,
    /// Thread blocks that the GPU has room for.
    thread_blocks: u32,
    scales: Scales,
    /// Activations have a scale per pack of columns.
    per_pack: bool,
    order: Rows,
}

/// Experts without rows, with one, with more than a token tile has; pairs of no expert; more work
/// tiles than thread blocks and fewer; whole K and split K; blocks that are left out.
const CASES: [ExpertsCase; 5] = [
    ExpertsCase {
        rows: 40,
        cols: 128,
        counts: Counts { of_experts: &[2, 0, 9, 1], of_none: 2 },
        thread_blocks: 2,
        scales: Scales::Common,
        per_pack: false,
        order: Rows::Gathered,
    },
    ExpertsCase {
        rows: 300,
        cols: 256,
        counts: Counts { of_experts: &[0, 1, 0, 17, 0], of_none: 0 },
        thread_blocks: 5,
        scales: Scales::Common,
        per_pack: true,
        order: Rows::Scattered,
    },
    ExpertsCase {
        rows: 20,
        cols: 640,
        counts: Counts { of_experts: &[5, 34], of_none: 1 },
        thread_blocks: 3,
        scales: Scales::Common,
        per_pack: true,
        order: Rows::Paired,
    },
    ExpertsCase {
        rows: 24,
        cols: 192,
        counts: Counts { of_experts: &[70, 3, 150], of_none: 0 },
        thread_blocks: 2,
        scales: Scales::Common,
        per_pack: false,
        order: Rows::Scattered,
    },
    ExpertsCase {
        rows: 12,
        cols: 192,
        counts: Counts { of_experts: &[3, 4], of_none: 1 },
        thread_blocks: 2,
        scales: Scales::Any,
        per_pack: true,
        order: Rows::Paired,
    },
];

/// Operands of a product. Activations have a row per pair.
struct Operands {
    experts: Vec<QuantizedTensor>,
    x: Vec<E4m3>,
    /// Scales of activations, `each` per row.
    scales: Vec<f32>,
    each: usize,
}

impl Operands {
    fn draw(format: Format, case: ExpertsCase, seed: u64) -> Self {
        let ExpertsCase { rows, cols, counts, scales, per_pack, .. } = case;
        // All global scales have the same kind.
        let draw = |expert: u64| tensor(format, rows, cols, scales, seed + 3 * expert);
        let experts = (0..counts.of_experts.len() as u64).map(draw);
        let experts = experts.map(|drawn| if scales == Scales::Common { near(&drawn) } else { drawn });
        let mut random = fastrand::Rng::with_seed(seed);
        let mut code = || loop {
            let code = E4m3::from_bits(random.u8(..));
            if !code.is_nan() {
                return code;
            }
        };
        let x = (0..counts.pairs() * cols).map(|_| code()).collect();
        let each = if per_pack { cols.div_ceil(PACK_COLUMNS as usize) } else { 1 };
        let scales = (0..counts.pairs() * each).map(|_| random.f32() * 0.01).collect();
        Self { experts: experts.collect(), x, scales, each }
    }

    /// Returns the sum of a row of activations and a row of an expert's weights by the definition,
    /// or with the magnitudes of all operands.
    fn sum(&self, by_block: bool, expert: usize, x_row: usize, row: usize, magnitudes: bool) -> f32 {
        let weights = &self.experts[expert];
        let (format, cols) = (weights.format(), weights.cols());
        let (codes, scales) = row_of(weights, row);
        let [of_weights, of_x] = if magnitudes { [0x77, 0x7F] } else { [0xFF; 2] };
        let codes: Vec<_> = codes.iter().map(|code| code & of_weights).collect();
        let x = &self.x[x_row * cols..][..cols];
        let x: Vec<_> = x.iter().map(|code| E4m3::from_bits(code.to_bits() & of_x)).collect();
        let of_x = match &self.scales[x_row * self.each..][..self.each] {
            [scale] => fp8_dot::Scales::Token(*scale),
            scales => fp8_dot::Scales::Packs(scales),
        };
        sum_in_fp8(by_block, fp8_dot::Weights { format, codes: &codes, scales }, &x, of_x)
    }
}

/// Sorts pairs, plans, packs activations and multiplies. `T` is the dtype of results.
fn multiplying<T: Exact + Activation>(
    operands: &Arc<Operands>,
    config: GemmConfig,
    of: ExpertsCase,
) -> Prepared {
    let ExpertsCase { cols, counts, thread_blocks, order, .. } = of;
    let Operands { experts, x, scales, each } = &**operands;
    let mut case = Prepared::new();
    let pairs = counts.pairs();
    let chosen = counts.chosen(pairs as u64);
    let of_sorted = sorted(&chosen, experts.len());
    let routed = route(&mut case, &chosen, experts.len(), 1);
    let null = Argument::from(0u64);
    let (from, to) = match order {
        Rows::Gathered => (routed.tokens.into(), null),
        Rows::Scattered => (null, routed.pairs.into()),
        Rows::Paired => (routed.pairs.into(), routed.pairs.into()),
    };
    let weights = shape(&experts[0]);
    let stage = config.stage(ScalePieces::MOST);
    let shared = stage.shared_bytes(stage.count(MOST_SHARED).min(3));
    let sizes = Sorted { pairs: pairs as u32, top_k: 1 };
    let mut grid = PlanGrid::new(experts.len() as u64, sizes, 1, config.tile_n).expect("a small launch");
    grid.row_tiles = weights.rows.div_ceil(u64::from(config.tile_m)) as u32;
    grid.k_iterations = weights.cols.div_ceil(u64::from(stage.packs * PACK_COLUMNS)) as u32;
    grid.at_once = thread_blocks;
    let plan = plan(&mut case, &routed, counts, grid);

    let tokens = u64::from(grid.most_tiles) * u64::from(config.tile_n);
    let aligned = cols.is_multiple_of(8);
    let pack = PackParams::new(config, weights.cols, tokens, aligned).expect("a small launch");
    let codes: Vec<u8> = x.iter().map(|code| code.to_bits()).collect();
    let x = case.memory.allocate_from_aligned("x", &codes, 8);
    let x_scales = case.memory.allocate_from_aligned("scales of x", bytemuck::cast_slice(scales), 4);
    let packed = case.memory.allocate_aligned("packed", pack.bytes() as usize, 16);
    let arguments = vec![
        x.into(),
        x_scales.into(),
        packed.into(),
        plan.into(),
        from.clone(),
        argument(&pack),
        (*each as u32).into(),
        // No bases of rows.
        0u64.into(),
        0u64.into(),
    ];
    case.step(PACK_FP8.kernel().name, u64::from(pack.thread_blocks), arguments);

    let mut gemm = GemmParams::new(config, weights, tokens, thread_blocks, shared).expect("a small launch");
    gemm.pack_scales = u32::from(*each > 1);
    let all = |of: fn(&QuantizedTensor) -> &[u8]| experts.iter().flat_map(of).copied().collect::<Vec<_>>();
    let codes = case.memory.allocate_from_aligned("codes", &all(QuantizedTensor::codes), 16);
    let scales = case.memory.allocate_from_aligned("scales", &all(QuantizedTensor::scales), 16);
    let (slots, apply) = case.global_scales(&experts.iter().collect::<Vec<_>>());
    let out_bytes = pairs * experts[0].rows() * size_of::<T>();
    let out = case.memory.allocate_from_aligned("out", &vec![UNTOUCHED; out_bytes], 2);
    let ([bias, residual], steps) = Fused::none();
    Multiplication {
        config,
        gemm: &gemm,
        thread_blocks,
        codes: (codes, experts.len()),
        weights: [scales.into(), slots],
        apply,
        activations: Argument::from(0u64),
        packed: packed.into(),
        out,
        routed: [plan.into(), from, to],
        epilogue: ([bias, residual], steps),
    }
    .launch(&mut case);
    let operands = Arc::clone(operands);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let summed = (config.multiplies_blocks(), grid.k_iterations);
        check::<T>(&operands, &bytes, of, &chosen, &of_sorted, summed)
    }));
    case
}

/// Checks results. Rows of pairs without an expert must be untouched.
///
/// Without a split of K, results have the definition's bits, or the neighbouring ones under a
/// global scale. Otherwise parts are rounded when they are added.
fn check<T: Exact + Activation>(
    operands: &Operands,
    bytes: &[u8],
    of: ExpertsCase,
    chosen: &[u32],
    sorted: &[usize],
    (by_block, k_iterations): (bool, u32),
) -> Result<(), String> {
    let ExpertsCase { rows, cols, order, .. } = of;
    let mut untouched: Vec<_> = bytes.chunks(rows * size_of::<T>()).map(Some).collect();
    for (index, pair) in sorted.iter().enumerate() {
        let place = if order == Rows::Gathered { index } else { *pair };
        let x_row = if order == Rows::Scattered { index } else { *pair };
        let found: Vec<T> = bytemuck::pod_collect_to_vec(untouched[place].take().ok_or("written twice")?);
        let expert = chosen[*pair] as usize;
        let factor = f64::from(fp4_dot::factor(1.0, [None, operands.experts[expert].global_scale()]));
        for (row, found) in found.iter().enumerate() {
            let right = T::round_f64(f64::from(operands.sum(by_block, expert, x_row, row, false)) * factor);
            let scaled = factor != 1.0 && right.to_f64().is_finite();
            if found.bits().abs_diff(right.bits()) <= u32::from(scaled) {
                continue;
            }
            let magnitudes = f64::from(operands.sum(by_block, expert, x_row, row, true)) * factor;
            let of_parts = (4 + cols) as f64 * 2f64.powi(-24) * magnitudes;
            let allowed = of_parts + right.to_f64().abs() * 2f64.powi(-8);
            let near = (found.to_f64() - right.to_f64()).abs() <= allowed;
            if k_iterations == 1 || !near {
                return Err(format!("expert {expert}, pair {pair}, row {row}: {found:?} is not {right:?}"));
            }
        }
    }
    if untouched.into_iter().flatten().flatten().any(|byte| *byte != UNTOUCHED) {
        return Err("a result of a pair without an expert was written".into());
    }
    Ok(())
}

fn cases_of<T: Exact + Activation>(cases: &mut Vec<Case>) {
    for format in Format::MULTIPLIED {
        for (seed, case) in (0..).zip(CASES) {
            // Work tiles of experts' rows are not multiplied in clusters.
            let configs = GemmConfig::for_fp8(format, T::DTYPE)
                .filter(|config| config.cluster == 1 && !config.mainloop.accumulates_fast());
            let draw = move || Operands::draw(format, case, seed);
            add_cases(cases, configs, format!("{case:?}"), draw, move |operands, config| {
                multiplying::<T>(operands, config, case)
            });
        }
    }
}

/// Adds every case of these products.
pub(crate) fn fp8_experts_cases(cases: &mut Vec<Case>) {
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
}
