//! Changes the kernels for FP8 activations: products, waits, arrivals and copies left out. The cases
//! must detect every change.

use super::changes::{Changes, every_change_is_noticed};
use super::fp8::fp8_cases;

/// A kernel of each mainloop: consumer warps that decode, sums of blocks, decoder warps, and fast
/// accumulation.
const KERNELS: [&str; 4] = [
    "mxfp4_gemm_bf16_fp8_128x32",
    "mxfp4_gemm_bf16_fp8block_256x16",
    "mxfp4_gemm_bf16_fp8shared_128x256",
    "mxfp4_gemm_bf16_fp8fast_128x128",
];
/// Cases: several work tiles, split ones, and columns that end within a pack; more thread blocks than
/// work tiles; scales that are words, with more K-iterations than stages.
const CASES: [&str; 3] = [
    "rows: 260, cols: 704, tokens: 130",
    "rows: 70, cols: 640, tokens: 40",
    "rows: 12, cols: 1536, tokens: 19",
];

/// Adds the changes of a kernel.
fn change(changes: &mut Changes<'_>) {
    for text in ["wgmma.mma", "mbarrier.arrive", "cp.async.bulk", "fence.proxy"] {
        changes.leave_out(&changes.find(text));
    }
    let lines = changes.lines();
    // A wait on the line of its commit is there for speed: the wait for all products follows.
    for line in changes.find("wgmma.wait_group") {
        let (before, wait) = lines[line].split_at(lines[line].find("wgmma.wait_group").expect("found"));
        let (_, after) = wait.split_once(';').expect("a statement");
        if !before.contains("wgmma.commit") {
            changes.add("no wait", &[(line, format!("{before}{after}"))]);
        }
    }
    // Not the plan and the word at constant addresses, which these cases do not need.
    let stores = changes.find("st.shared");
    changes
        .leave_out(&stores.into_iter().filter(|&line| !lines[line].contains("[shared")).collect::<Vec<_>>());
}

#[test]
fn changes_to_kernels_for_fp8_activations_are_noticed() {
    let mut cases = Vec::new();
    fp8_cases(&mut cases);
    for kernel in KERNELS {
        every_change_is_noticed("sm_90a", kernel, (&cases, &CASES), change, 15);
    }
}
