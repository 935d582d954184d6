//! Changes a kernel that packs activations itself: barriers, fences and stores left out. The cases
//! must detect every change.

use super::changes::{Changes, every_change_is_noticed};
use super::gemm::gemm_cases;

/// The kernel.
const KERNEL: &str = "nvfp4_gemm_bf16_wgmma_128x24";
/// Cases: more tokens than a token tile and fewer, with columns that end within a pack; more
/// K-iterations than stages.
const CASES: [&str; 2] = ["rows: 140, cols: 376, tokens: 55", "rows: 20, cols: 1152, tokens: 5"];

/// Adds the changes of the kernel.
fn change(changes: &mut Changes<'_>) {
    let stores = changes.find("st.shared.v4");
    // The barriers between the loads of packing warps and their stores.
    let after_loads =
        |line: &usize| stores.iter().filter(|store| (*line..line + 25).contains(*store)).count() == 4;
    let barriers: Vec<_> = changes.find("bar.warp.sync").into_iter().filter(after_loads).collect();
    assert_eq!(barriers.len(), 3, "one for each eight tokens");
    let fences = changes.find("fence.proxy.async.shared");
    for lines in [&stores, &barriers, &fences] {
        changes.leave_out(lines);
    }
}

#[test]
fn changes_to_the_loader_of_activations_are_noticed() {
    let mut cases = Vec::new();
    gemm_cases(&mut cases);
    every_change_is_noticed("sm_90a", KERNEL, (&cases, &CASES), change, 10);
}
