//! Splitting f32 activations for products of experts, and merging the partial sums into pairs.

use std::mem::offset_of;

use half::bf16;
use microscale_executor::Argument;
use microscale_kernels_abi::epilogue::{MergeGrid, PARTS, SplitGrid};
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::{ApplyGlobal, Epilogue, GlobalSlot};

use super::case::{Prepared, argument};
use super::cases::Case;
use super::experts::{Counts, Routed, UNTOUCHED, plan, route, sorted};

/// Sorted pairs, with a plan of their parts.
///
/// The plan is empty if it is requested for other pairs.
struct Planned {
    case: Prepared,
    routed: Routed,
    plan: Argument,
    /// The expert of each pair, and the pairs with an expert, sorted by expert.
    chosen: Vec<u32>,
    order: Vec<usize>,
}

/// Sorts and plans pairs. The plan's token tiles have at most `tile_rows` parts.
fn planned(counts: Counts, tile_rows: u32, top_k: [usize; 2]) -> Planned {
    planned_of(PARTS, counts, tile_rows, top_k)
}

/// Sorts and plans pairs, with `parts` rows for each.
fn planned_of(parts: u32, counts: Counts, tile_rows: u32, top_k: [usize; 2]) -> Planned {
    let mut case = Prepared::new();
    let (pairs, experts) = (counts.pairs(), counts.of_experts.len());
    let chosen = counts.chosen(pairs as u64);
    let [of_lists, asked] = top_k;
    let routed = route(&mut case, &chosen, experts, of_lists);
    let of = Sorted { pairs: pairs as u32, top_k: asked as u32 };
    let grid = PlanGrid::new(experts as u64, of, parts, tile_rows).expect("a small launch");
    let none = of_lists != asked;
    let plan = plan(&mut case, &routed, if none { Counts::NONE } else { counts }, grid).into();
    let order = if none { Vec::new() } else { sorted(&chosen, experts) };
    Planned { case, routed, plan, chosen, order }
}

/// Splits activations of tokens (with `gathered`) or of sorted rows.
fn splitting(counts: Counts, cols: usize, tile_rows: u32, top_k: [usize; 2], gathered: bool) -> Prepared {
    let Planned { mut case, routed, plan, chosen, order } = planned(counts, tile_rows, top_k);
    let pairs = chosen.len();
    let mut random = fastrand::Rng::with_seed(cols as u64);
    // Tokens only. Several pairs share a token, so an address after the last token would be a
    // fault.
    let rows = if gathered { pairs.div_ceil(top_k[0]) } else { pairs };
    let x: Vec<f32> = (0..rows * cols).map(|_| random.f32() * 8.0 - 4.0).collect();
    let there = case.memory.allocate_from_aligned("activations", bytemuck::cast_slice(&x), 16);
    let untouched = vec![UNTOUCHED; pairs * PARTS as usize * cols * 2];
    let out = case.memory.allocate_from_aligned("parts", &untouched, 16);
    let from: Argument = if gathered { routed.tokens.into() } else { 0u64.into() };
    let grid = SplitGrid::new(pairs as u64, cols as u64, true);
    case.step("split_f32", grid.count, vec![there.into(), out.into(), plan, from, argument(&grid)]);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(out).map_err(|error| error.to_string())?;
        let row_bytes = PARTS as usize * cols * 2;
        let (rows, left) = bytes.split_at(order.len() * row_bytes);
        for (place, (row, pair)) in rows.chunks(row_bytes).zip(&order).enumerate() {
            let parts: Vec<bf16> = bytemuck::pod_collect_to_vec(row);
            let source = if gathered { pair / top_k[0] } else { place };
            for col in 0..cols {
                let sum: f64 = (0..PARTS as usize).map(|i| parts[i * cols + col].to_f64()).sum();
                let right = f64::from(x[source * cols + col]);
                if sum != right {
                    return Err(format!("{right} became {sum}, sorted row {place}, column {col}"));
                }
            }
        }
        let touched = left.iter().any(|byte| *byte != UNTOUCHED);
        if touched { Err("parts of a pair of no expert".into()) } else { Ok(()) }
    }));
    case
}

/// Merges partial sums with a bias per expert and a residual.
///
/// With `scattered`, results are stored by pair.
fn merging(counts: Counts, rows: usize, tile_rows: u32, top_k: [usize; 2], scattered: bool) -> Prepared {
    let Planned { mut case, routed, plan, chosen, order } = planned(counts, tile_rows, top_k);
    let pairs = chosen.len();
    let mut random = fastrand::Rng::with_seed(rows as u64);
    // Few bits, so that nothing is rounded.
    let mut draw = |count: usize| -> Vec<f32> { (0..count).map(|_| random.i8(..).into()).collect() };
    let (sums, residual) = (draw(pairs * PARTS as usize * rows), draw(pairs * rows));
    let bias = draw(counts.of_experts.len() * rows);
    let mut there = |name: &'static str, values: &[f32]| -> Argument {
        case.memory.allocate_from_aligned(name, bytemuck::cast_slice(values), 4).into()
    };
    let operands = [there("sums", &sums), there("bias", &bias), there("residual", &residual)];
    let out = case.memory.allocate_from_aligned("out", &vec![UNTOUCHED; pairs * rows * 4], 4);
    let to: Argument = if scattered { routed.pairs.into() } else { 0u64.into() };
    let grid = MergeGrid::of_parts(rows as u64, rows as u64, pairs as u64);
    let epilogue = argument(&Epilogue { steps: Epilogue::BIAS | Epilogue::RESIDUAL, ..Epilogue::NONE });
    let [sums_there, bias_there, residual_there] = operands;
    let none = || Argument::from(0u64);
    let lists = [plan, none(), to, none(), none()];
    let operands = [sums_there, out.into(), bias_there, residual_there].into_iter().chain(lists);
    let arguments = operands.chain([argument(&grid), epilogue]).collect();
    case.step("merge_f32", grid.count, arguments);
    let mut expected = vec![UNTOUCHED; pairs * rows * 4];
    for (sorted, pair) in order.into_iter().enumerate() {
        let (place, expert) = (if scattered { pair } else { sorted }, chosen[pair] as usize);
        for row in 0..rows {
            let of_parts = (0..PARTS as usize).map(|i| sums[(sorted * PARTS as usize + i) * rows + row]);
            let right = of_parts.sum::<f32>() + bias[expert * rows + row] + residual[place * rows + row];
            expected[(place * rows + row) * 4..][..4].copy_from_slice(&right.to_ne_bytes());
        }
    }
    case.expect("results", out, expected);
    case
}

/// Multiplies the sums of pairs by factors of their tokens and experts, and adds a bias per expert.
///
/// With `gathered`, several pairs share a token, and results are stored by pair.
fn token_merging(counts: Counts, rows: usize, tile_rows: u32, top_k: [usize; 2], gathered: bool) -> Prepared {
    let Planned { mut case, routed, plan, chosen, order } = planned_of(1, counts, tile_rows, top_k);
    let (pairs, experts) = (chosen.len(), counts.of_experts.len());
    let mut random = fastrand::Rng::with_seed(rows as u64);
    // Few bits and powers of two, so that nothing is rounded.
    let sums: Vec<f32> = (0..pairs * rows).map(|_| random.i8(..).into()).collect();
    let bias: Vec<bf16> = (0..experts * rows).map(|_| bf16::from_f32(random.i8(..).into())).collect();
    let mut powers =
        |count: usize| -> Vec<f32> { (0..count).map(|_| 2f32.powi(random.i32(-3..4))).collect() };
    let scales = powers(if gathered { pairs.div_ceil(top_k[0]) } else { pairs });
    let globals = powers(experts);
    let mut slots = vec![0; experts * size_of::<GlobalSlot>()];
    for (slot, scale) in slots.chunks_mut(size_of::<GlobalSlot>()).zip(&globals) {
        slot[offset_of!(GlobalSlot, scale)..][..4].copy_from_slice(&scale.to_ne_bytes());
    }
    let mut there = |name: &'static str, bytes: &[u8]| -> Argument {
        case.memory.allocate_from_aligned(name, bytes, 8).into()
    };
    let sums_there = there("sums", bytemuck::cast_slice(&sums));
    let bias_there = there("bias", bytemuck::cast_slice(&bias));
    let scales_there = there("token scales", bytemuck::cast_slice(&scales));
    let slots_there = there("weight globals", &slots);
    let out = case.memory.allocate_from_aligned("out", &vec![UNTOUCHED; pairs * rows * 4], 4);
    let none = || Argument::from(0u64);
    let [from, to] = if gathered { [routed.tokens.into(), routed.pairs.into()] } else { [none(), none()] };
    let alpha = 0.5;
    let grid = MergeGrid::of_parts(rows as u64, rows as u64, pairs as u64);
    let grid = grid.of_tokens(alpha, ApplyGlobal::Multiplier);
    let steps = Epilogue::BIAS | Epilogue::F32_RESULTS;
    let epilogue = argument(&Epilogue { steps, ..Epilogue::NONE });
    let operands = [sums_there, out.into(), bias_there, none(), plan, from, to, scales_there, slots_there];
    let arguments = operands.into_iter().chain([argument(&grid), epilogue]).collect();
    case.step("merge_f32", grid.count, arguments);
    let mut expected = vec![UNTOUCHED; pairs * rows * 4];
    for (sorted, pair) in order.into_iter().enumerate() {
        let expert = chosen[pair] as usize;
        let (token, place) = if gathered { (pair / top_k[0], pair) } else { (sorted, sorted) };
        let factor = alpha * scales[token] * globals[expert];
        for row in 0..rows {
            let right = sums[sorted * rows + row] * factor + bias[expert * rows + row].to_f32();
            expected[(place * rows + row) * 4..][..4].copy_from_slice(&right.to_ne_bytes());
        }
    }
    case.expect("results", out, expected);
    case
}

/// Counts, the exponent of token tiles, and pairs per token (sorted, and requested from the plan).
///
/// In the last case the requested pairs differ from the sorted ones.
const CASES: [(Counts, u32, [usize; 2]); 5] = [
    (Counts { of_experts: &[2, 0, 9, 1], of_none: 2 }, 5, [2, 2]),
    (Counts { of_experts: &[0, 1, 0, 17, 0], of_none: 0 }, 16, [1, 1]),
    (Counts { of_experts: &[1; 40], of_none: 5 }, 1, [4, 4]),
    (Counts { of_experts: &[0, 0], of_none: 3 }, 8, [1, 1]),
    (Counts { of_experts: &[3, 4], of_none: 1 }, 24, [2, 1]),
];

/// Adds every case of these kernels with experts.
pub(crate) fn expert_parts_cases(cases: &mut Vec<Case>) {
    for (i, (counts, tile_rows, top_k)) in CASES.into_iter().enumerate() {
        for listed in [false, true] {
            let what = format!("{counts:?}, tiles of {tile_rows}, top_k {top_k:?}, listed: {listed}");
            // Multiples of four columns, and other numbers.
            let cols = [64, 20, 33, 4, 100][i];
            cases.push(Case::new(what.clone(), "split_f32".into(), move || {
                splitting(counts, cols, tile_rows, top_k, listed)
            }));
            let rows = [5, 70, 3, 16, 1][i];
            cases.push(Case::new(what.clone(), "merge_f32".into(), move || {
                merging(counts, rows, tile_rows, top_k, listed)
            }));
            cases.push(Case::new(format!("factors by token, {what}"), "merge_f32".into(), move || {
                token_merging(counts, rows, tile_rows, top_k, listed)
            }));
        }
    }
}
