//! Changes the kernels of pairs of thread blocks (`tcgen05`) on purpose: scales of another k-step,
//! another thread block's half, arrivals at one thread block only, missing fences and waits. The
//! cases must detect every change.

use super::changes::{Changes, every_change_is_noticed};
use super::fp4::fp4_cases;

/// The kernels: one per format. Others have other numbers.
const KERNELS: [&str; 2] = ["nvfp4_gemm_bf16_tcgen05_256x128_c2", "mxfp4_gemm_bf16_tcgen05_256x128_c2"];
/// Cases: rows in both thread blocks, tokens in both halves, more K-iterations than stages, more
/// work tiles than accumulators.
const CASES: [&str; 3] = [
    "rows: 260, cols: 704, tokens: 130",
    "rows: 70, cols: 640, tokens: 40",
    "rows: 520, cols: 256, tokens: 8",
];

/// Instructions that a kernel needs, each wherever a case executes it.
const NEEDED: [&str; 8] = [
    "fence.proxy.async",
    "fence.mbarrier_init",
    "tcgen05.cp",
    "tcgen05.mma",
    "tcgen05.commit",
    "tcgen05.dealloc",
    "mbarrier.arrive.",
    "cp.async.bulk",
];

/// Adds the changes of a kernel.
fn change(changes: &mut Changes<'_>) {
    let lines = changes.lines();
    let none = |line: usize| (line, String::new());
    for text in NEEDED {
        changes.leave_out(&changes.find(text));
    }
    // The first and the last of these fences are next to barriers, which order allocations, too.
    let fences = changes.find("tcgen05.fence::after_thread_sync");
    changes.leave_out(&fences[1..fences.len() - 1]);
    // Other waits and fences of the same warp may follow.
    for text in ["tcgen05.wait::ld", "tcgen05.fence::before_thread_sync"] {
        changes.add("all left out", &changes.find(text).into_iter().map(none).collect::<Vec<_>>());
    }
    // The cluster's barriers at the start and at the end.
    let waits = changes.find("barrier.cluster.wait");
    for (arrive, &wait) in changes.find("barrier.cluster.arrive").into_iter().zip(&waits) {
        changes.add("no barrier", &[none(arrive), none(wait)]);
    }
    // Each thread block takes itself for the first one.
    for line in changes.find("%cluster_ctarank") {
        changes.add("the first rank", &[(line, lines[line].replace("%cluster_ctarank", "0"))]);
    }
    // Commits and copies reach the first thread block only.
    for line in changes.find("mov.b16").into_iter().filter(|&line| lines[line].ends_with(",3;")) {
        changes.add("one thread block", &[(line, lines[line].replace(",3;", ",1;"))]);
    }
    // The products have the scales of the next k-step: of rows, or of tokens.
    let scales = |line: usize| -> Vec<&str> { lines[line].split(['[', ']']).collect() };
    for pair in changes.find("tcgen05.mma").windows(2) {
        for place in [3, 5] {
            let [this, next] = [scales(pair[0])[place], scales(pair[1])[place]];
            if this != next {
                let changed = lines[pair[0]].replace(&format!("[{this}]"), &format!("[{next}]"));
                changes.add("scales of another k-step", &[(pair[0], changed)]);
            }
        }
    }
    // Boxes of other columns, of other rows and of another matrix.
    for line in changes.find("cp.async.bulk.tensor") {
        let corner = lines[line].split(['{', '}']).nth(1).expect("coordinates");
        let [x, y, z] = corner.split(',').collect::<Vec<_>>()[..] else { panic!("three coordinates") };
        for other in [[y, y, z], [x, x, z], [x, y, x]] {
            changes.add("another box", &[(line, lines[line].replace(corner, &other.join(",")))]);
        }
    }
    // Waits that do not wait. At the end, all of them wait for the last commits.
    let ready = |line: usize| {
        let register = lines[line].split("selp.b32 ").nth(1).and_then(|rest| rest.split(',').next());
        (line, format!("mov.b32 {},1;", register.expect("a result")))
    };
    let end = changes.find("griddepcontrol.launch_dependents")[0];
    let (before, last): (Vec<_>, Vec<_>) =
        changes.find("mbarrier.try_wait").into_iter().partition(|&line| line < end);
    before.into_iter().for_each(|line| changes.add("no wait", &[ready(line)]));
    changes.add("no wait at the end", &last.into_iter().map(ready).collect::<Vec<_>>());
}

#[test]
fn changes_to_pairs_of_thread_blocks_are_noticed() {
    let mut cases = Vec::new();
    fp4_cases(&mut cases);
    for kernel in KERNELS {
        every_change_is_noticed("sm_100f", kernel, (&cases, &CASES), change, 36);
    }
}
