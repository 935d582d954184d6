//! Tests races between threads, warps and blocks, and the barriers that order accesses.

use super::{Run, SCHEDULES, fault, module};
use crate::{Fault, FaultKind, Launch};

/// Runs the same body in many threads and blocks, which share `in`.
fn run(body: &str, blocks: u32, threads: u32) -> Vec<Result<(), Fault>> {
    let run = |schedule| {
        let module = module(".shared .align 4 .b8 buffer[256];", body);
        let launch = Launch::new(blocks, threads).schedule(schedule);
        Run::of(&module, &launch, &(0..32).collect::<Vec<_>>()).result.map(|_| ())
    };
    SCHEDULES.into_iter().map(run).collect()
}

fn races(body: &str, blocks: u32, threads: u32) -> bool {
    let results = run(body, blocks, threads);
    let is_race = |result: &Result<(), Fault>| match result {
        Ok(()) => false,
        Err(fault) if matches!(*fault.kind, FaultKind::Race { .. }) => true,
        Err(fault) => panic!("{fault}"),
    };
    assert!(results.iter().all(|result| is_race(result) == is_race(&results[0])), "{results:?}");
    is_race(&results[0])
}

#[test]
fn writes_of_two_threads_race_even_with_the_same_value() {
    assert!(races("st.global.b32 [%in], 1;", 1, 2));
    assert!(races("st.global.b32 [%in], 1;", 2, 1));
    assert!(!races("st.global.b32 [%in], 1;", 1, 1));
    assert!(!races("ld.global.b32 %r1, [%in];", 2, 64));
    // Adjacent bytes do not race.
    assert!(!races("cvt.u64.u32 %d1, %lane; add.s64 %d1, %d1, %in; st.global.b8 [%d1], %lane;", 1, 64));
}

#[test]
fn a_race_names_both_accesses() {
    let body = "setp.eq.b32 %p1, %lane, 0; @%p1 st.global.b32 [%in], 1;\n ld.global.b16 %h1, [%in+2];";
    let found = fault(body, 64);
    let FaultKind::Race { access, block: 0, thread, line, instruction } = &*found.kind else {
        panic!("{found}")
    };
    let pair = [(*line, instruction.as_str()), (found.line, found.instruction.as_str())];
    assert!(pair.contains(&(12, "@%p1 st.global.b32 [%in], 1")), "{found}");
    assert!(pair.contains(&(13, "ld.global.b16 %h1, [%in+2]")), "{found}");
    assert!(found.thread != *thread && (found.thread == 0 || *thread == 0));
    assert_eq!(access.buffer.as_deref(), Some("in"));
    assert!(found.to_string().contains("race with thread"));
}

#[test]
fn barriers_order_only_their_block() {
    let body = "setp.eq.b32 %p1, %lane, 40; @%p1 st.shared.b32 [buffer], 1; BARRIER ld.shared.b32 %r1, [buffer]; BARRIER
        setp.eq.b32 %p1, %lane, 3; @%p1 st.shared.b32 [buffer], 2;";
    assert!(!races(&body.replace("BARRIER", "bar.sync 0;"), 2, 64));
    let second = body.replacen("BARRIER", "bar.sync 0;", 1);
    assert!(races(&second.replace("BARRIER", ""), 1, 64));
    assert!(races(&second.replace("BARRIER", "bar.warp.sync -1;"), 1, 64));
    let global = body.replace("shared", "global").replace("buffer", "%in").replace("BARRIER", "bar.sync 0;");
    assert!(!races(&global, 1, 64));
    assert!(races(&global, 2, 64));
}

#[test]
fn barriers_of_a_warp_order_its_lanes_and_shuffles_do_not() {
    let body = "setp.eq.b32 %p1, %lane, 3; @%p1 st.global.b32 [%in], 1; SYNC
        setp.eq.b32 %p1, %lane, 4; @%p1 st.global.b32 [%in], 2;";
    assert!(!races(&body.replace("SYNC", "bar.warp.sync -1;"), 1, 32));
    assert!(!races(&body.replace("SYNC", "bar.warp.sync 0x1f;"), 1, 5));
    assert!(races(&body.replace("SYNC", "shfl.sync.idx.b32 %r1, %lane, 0, 31, -1;"), 1, 32));
    assert!(races(&body.replace("SYNC", ""), 1, 32));
    // The detector reports too much here: in reality, a barrier of some lanes orders those lanes.
    let some = "setp.lt.u32 %p2, %lane, 8; @%p2 bar.warp.sync 0xff;";
    assert!(races(&body.replace("SYNC", some), 1, 32));
}

#[test]
fn volatile_accesses_race_only_with_plain_accesses() {
    assert!(!races("st.volatile.shared.b32 [buffer], %lane; ld.volatile.shared.b32 %r1, [buffer];", 2, 64));
    assert!(races("st.shared.b32 [buffer], %lane; ld.volatile.shared.b32 %r1, [buffer];", 1, 2));
}

#[test]
fn atomics_race_only_with_plain_accesses() {
    assert!(!races("red.global.add.u32 [%in], 1; atom.global.max.u32 %r1, [%in], 1;", 3, 64));
    assert!(!races("red.global.add.u32 [%in], 1; ld.relaxed.gpu.global.u32 %r1, [%in];", 3, 64));
    assert!(races("red.global.add.u32 [%in], 1; ld.global.u32 %r1, [%in];", 1, 2));
    assert!(races("red.global.add.u32 [%in], 1; ld.global.u32 %r1, [%in];", 2, 1));
    assert!(!races("red.global.add.u32 [%in], 1; ld.global.u32 %r1, [%in];", 1, 1));
    assert!(races("st.global.b32 [%in], 1; ld.relaxed.gpu.global.u32 %r1, [%in];", 1, 2));
}

#[test]
fn the_detector_can_be_turned_off() {
    let body = "st.global.b32 [%in], 1; st.global.b32 [%out], 1;";
    Run::new(body, &Launch::new(1, 32).races(false)).result.unwrap();
}
