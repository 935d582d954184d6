//! Tests clusters of blocks.

use super::{Run, SCHEDULES, module};
use crate::{Fault, FaultKind, Launch, Schedule};

/// Every thread stores a number, and the first block loads the second block's numbers.
const TAKE: &str =
    "mov.u64 %d1, buffer; mul.wide.u32 %d2, %lane, 4; add.s64 %d1, %d1, %d2; cvt.u32.u64 %r1, %d1;
    mov.u32 %r2, %cluster_ctarank; mul.lo.s32 %r3, %r2, 1000; add.s32 %r3, %r3, %lane; st.shared.b32 [%r1], %r3;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    setp.ne.u32 %p1, %r2, 0; @%p1 bra $end;
    mapa.shared::cluster.u32 %r4, %r1, 1; ld.shared::cluster.b32 %r5, [%r4]; st.global.b32 [%out], %r5;
    $end: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";

fn take(body: &str, schedule: Schedule) -> Run {
    let launch = Launch::new(2, 128).cluster(2).shared(512).schedule(schedule);
    Run::of(&module(".extern .shared .align 16 .b8 buffer[];", body), &launch, &[])
}

/// Returns the fault of the body with `that` replaced by `this`.
fn fault(that: &str, this: &str, schedule: Schedule) -> Fault {
    assert!(TAKE.contains(that));
    take(&TAKE.replace(that, this), schedule).fault()
}

#[test]
fn blocks_of_a_cluster_read_each_others_shared_memory() {
    for schedule in SCHEDULES {
        assert_eq!(take(TAKE, schedule).words(), (1000..1128).collect::<Vec<u32>>(), "{schedule:?}");
    }
}

#[test]
fn a_missing_cluster_barrier_is_a_race() {
    let first = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n    setp";
    for schedule in SCHEDULES {
        let found = fault(first, "setp", schedule);
        let early = matches!(*found.kind, FaultKind::Race { .. } | FaultKind::Uninitialised(_))
            || matches!(*found.kind, FaultKind::NoSuchBlock { rank: 1 });
        assert!(early, "{found}");
        let wait = "barrier.cluster.wait.acquire.aligned;\n    setp";
        let found = fault(wait, "setp", schedule);
        assert!(matches!(*found.kind, FaultKind::NotUniform(_) | FaultKind::Race { .. }) || early, "{found}");
    }
    // The second block ends while the first one reads.
    let last = "$end: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";
    let found = fault(last, "$end:", Schedule::HighestFirst);
    assert!(matches!(*found.kind, FaultKind::NoSuchBlock { rank: 1 }), "{found}");
}

#[test]
fn only_cluster_accesses_reach_other_blocks() {
    for schedule in SCHEDULES {
        let found = fault("ld.shared::cluster.b32", "ld.shared.b32", schedule);
        assert!(matches!(*found.kind, FaultKind::OutOfBounds(_)), "{found}");
        let found = fault("%r4, %r1, 1", "%r4, %r1, 2", schedule);
        assert!(matches!(*found.kind, FaultKind::NoSuchBlock { rank: 2 }), "{found}");
        // Rank 0 is the block's own memory.
        let own = take(&TAKE.replace("%r4, %r1, 1", "%r4, %r1, 0"), schedule).words();
        assert_eq!(own, (0..128).collect::<Vec<u32>>());
    }
}

#[test]
fn grids_of_partial_clusters_are_refused() {
    for launch in
        [Launch::new(3, 128).cluster(2), Launch::new(2, 64).cluster(2), Launch::new(2, 128).cluster(0)]
    {
        let found = Run::of(&module("", ""), &launch, &[]).fault();
        assert!(matches!(*found.kind, FaultKind::Launch(_)), "{found}");
    }
}

/// Each block copies 16 bytes of `in` to both blocks. Then the second block stores all 32 bytes.
const MULTICAST: &str =
    "mov.u64 %d1, buffer; cvt.u32.u64 %r1, %d1; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %lane, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1; @%p1 fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 32;
    mul.wide.u32 %d2, %r2, 16; add.s64 %d2, %in, %d2; mul.lo.s32 %r3, %r2, 16; add.s32 %r3, %r1, %r3;
    mov.b16 %h1, 3;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3+16], [%d2], 16, [%r1], %h1;
    $wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra $wait;
    min.u32 %r4, %lane, 7; mul.lo.s32 %r4, %r4, 4; add.s32 %r4, %r1, %r4; ld.shared.b32 %r5, [%r4+16];
    setp.eq.u32 %p3, %r2, 1; @%p3 st.global.b32 [%out], %r5;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";

fn multicast(body: &str, schedule: Schedule) -> Run {
    let launch = Launch::new(2, 128).cluster(2).shared(512).schedule(schedule);
    let input: Vec<u32> = (70..102).collect();
    Run::of(&module(".extern .shared .align 16 .b8 buffer[];", body), &launch, &input)
}

#[test]
fn a_multicast_copy_writes_to_each_block_of_its_mask() {
    let expected: Vec<u32> = (0..128).map(|lane| 70 + lane.min(7)).collect();
    for schedule in SCHEDULES {
        assert_eq!(multicast(MULTICAST, schedule).words(), expected, "{schedule:?}");
        // A block that the mask leaves out never has all its bytes.
        let found = multicast(&MULTICAST.replace("%h1, 3", "%h1, 1"), schedule).fault();
        assert!(matches!(*found.kind, FaultKind::Deadlock(..)), "{found}");
        let found = multicast(&MULTICAST.replace("%h1, 3", "%h1, 7"), schedule).fault();
        assert!(matches!(*found.kind, FaultKind::NoSuchBlock { rank: 2 }), "{found}");
    }
}

#[test]
fn blocks_arrive_at_each_others_mbarriers() {
    // In place of its copy, each block arrives at the mbarrier of both.
    let arrive = "mbarrier.arrive.shared::cluster.b64 _, [%r6];";
    let body = format!(
        "mov.u64 %d1, buffer; cvt.u32.u64 %r1, %d1; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p1, %lane, 0;
        @%p1 mbarrier.init.shared.b64 [%r1], 2; @%p1 st.shared.b32 [%r1+16], %r2;
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        mapa.shared::cluster.u32 %r6, %r1, 0; @%p1 {arrive}
        mapa.shared::cluster.u32 %r6, %r1, 1; @%p1 {arrive}
        $wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra $wait;
        ld.shared.b32 %r5, [%r1+16]; setp.eq.u32 %p3, %r2, 1; @%p3 st.global.b32 [%out], %r5;
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    );
    for schedule in SCHEDULES {
        assert_eq!(multicast(&body, schedule).words(), vec![1; 128], "{schedule:?}");
        // Without the cluster in its address, an instruction reaches its own block only.
        let found = multicast(&body.replace("arrive.shared::cluster", "arrive.shared"), schedule).fault();
        assert!(!matches!(*found.kind, FaultKind::Race { .. }), "{found}");
    }
}
