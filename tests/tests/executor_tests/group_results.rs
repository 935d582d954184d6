//! Changes the kernels whose warp groups store results through shared memory: barriers, words and
//! stores left out. The cases must detect every change.

use super::changes::{Changes, every_change_is_noticed};
use super::gemm::gemm_cases;

/// The kernels: one per format. Only MXFP4 has scales out of range.
const KERNELS: [&str; 2] = ["nvfp4_gemm_bf16_wgmma_128x64", "mxfp4_gemm_bf16_wgmma_128x64"];
/// Cases: rows of results that are whole pieces and others, more tokens than the buffer has, work
/// tiles that are split and others. The second has scales out of range.
const CASES: [&str; 2] = ["rows: 260, cols: 704, tokens: 130", "rows: 600, cols: 512, tokens: 33"];

/// Adds the changes of a kernel.
fn change(changes: &mut Changes<'_>) {
    let lines = changes.lines();
    let of_groups: Vec<_> = changes.find("barrier.sync.aligned %r");
    changes.leave_out(&of_groups);
    for text in ["stmatrix", "st.shared.b32"] {
        changes.leave_out(&changes.find(text));
    }
    // Both sides agree on the swizzle, so a kernel without it would pass. A store to the next token
    // must not.
    for line in changes.find("stmatrix") {
        let moved = lines[line].replacen("],", "+128],", 1);
        changes.add("the next token", &[(line, moved)]);
    }
}

#[test]
fn changes_to_results_of_warp_groups_are_noticed() {
    let mut cases = Vec::new();
    gemm_cases(&mut cases);
    for kernel in KERNELS {
        every_change_is_noticed("sm_90a", kernel, (&cases, &CASES), change, 15);
    }
}
