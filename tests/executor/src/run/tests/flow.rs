//! Tests control flow and warp-wide instructions.

use super::{Run, fault, words};
use crate::{FaultKind, Launch};

/// Appends a store of a register by every thread.
fn stored(body: &str, register: &str) -> String {
    format!("{body} st.global.b32 [%out], {register};")
}

#[test]
fn divergent_lanes_reconverge() {
    let body = stored(
        "and.b32 %r1, %lane, 1; setp.eq.b32 %p1, %r1, 0;
        @%p1 bra $even;
        mul.lo.s32 %r2, %lane, 3; bra $end;
        $even: add.s32 %r2, %lane, 1000;
        $end: shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;",
        "%r3",
    );
    let expected = |lane: u32| if lane % 2 == 1 { lane - 1 + 1000 } else { (lane + 1) * 3 };
    assert_eq!(words(&body, 32), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn loop_counts_may_differ_per_lane() {
    let body = stored(
        "mov.u32 %r1, 0; mov.u32 %r2, 0;
        $loop: setp.ge.u32 %p1, %r1, %lane; @%p1 bra $end;
        add.s32 %r2, %r2, %r1; add.s32 %r1, %r1, 1; bra.uni $loop;
        $end: vote.sync.ballot.b32 %r3, %p1, 0xffffffff; add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, 1;",
        "%r2",
    );
    assert_eq!(words(&body, 32), (0..32u32).map(|n| (n * n - n) / 2).collect::<Vec<_>>());
}

#[test]
fn shuffles_in_divergent_code_join_the_lanes_of_their_masks() {
    let body = stored(
        "setp.lt.u32 %p1, %lane, 16; add.s32 %r1, %lane, 100;
        @%p1 bra $low;
        shfl.sync.idx.b32 %r2, %r1, 31, 31, 0xffff0000; bra $end;
        $low: shfl.sync.down.b32 %r2|%p2, %r1, 15, 31, 0x0000ffff;
        selp.b32 %r2, %r2, 5, %p2;
        $end:",
        "%r2",
    );
    // Lane 1 reads lane 16, which does not execute the shuffle.
    let fault_found = fault(&body, 32);
    assert!(matches!(*fault_found.kind, FaultKind::InactiveSource { lane } if lane >= 16), "{fault_found}");
    let body = body.replace("15, 31,", "15, 0x100f,");
    let expected = |lane: u32| match lane {
        0 => 115,
        1..16 => 5,
        _ => 131,
    };
    assert_eq!(words(&body, 32), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn shuffles_of_every_mode_follow_the_segments() {
    let of = |mode: &str, by: u32, clamp: u32| {
        let shuffle = format!("shfl.sync.{mode}.b32 %r2|%p1, %lane, {by}, {clamp}, -1;");
        words(&stored(&format!("{shuffle} selp.b32 %r3, 0, 100, %p1; add.s32 %r2, %r2, %r3;"), "%r2"), 32)
    };
    let expect = |f: &dyn Fn(u32) -> u32| (0..32).map(f).collect::<Vec<_>>();
    assert_eq!(of("up", 2, 0), expect(&|lane| if lane < 2 { lane + 100 } else { lane - 2 }));
    assert_eq!(of("up", 1, 0x1800), expect(&|lane| if lane % 8 == 0 { lane + 100 } else { lane - 1 }));
    assert_eq!(of("down", 3, 31), expect(&|lane| if lane > 28 { lane + 100 } else { lane + 3 }));
    assert_eq!(of("bfly", 9, 31), expect(&|lane| lane ^ 9));
    // The result of __shfl_xor_sync with width 8: lanes of a later segment may read an earlier one.
    assert_eq!(of("bfly", 8, 0x181f), expect(&|lane| if lane & 8 != 0 { lane ^ 8 } else { lane + 100 }));
    assert_eq!(of("idx", 33, 31), [1; 32]);
    assert_eq!(of("idx", 3, 0x181f), expect(&|lane| lane / 8 * 8 + 3));
}

#[test]
fn warps_do_not_wait_for_exited_lanes() {
    let body = stored(
        "mov.u32 %r1, 0; st.global.b32 [%out], %r1;
        setp.ge.u32 %p1, %lane, 20; @%p1 exit;
        setp.lt.u32 %p2, %lane, 10; vote.sync.all.pred %p3, %p2, -1; vote.sync.any.pred %p4, %p2, -1;
        vote.sync.uni.pred %p5, !%p3, -1; redux.sync.max.s32 %r1, %lane, -1;
        selp.b32 %r2, 1000, 0, %p4; add.s32 %r1, %r1, %r2; selp.b32 %r2, 100, 0, %p3; add.s32 %r1, %r1, %r2;
        selp.b32 %r2, 2000, 0, %p5; add.s32 %r1, %r1, %r2;",
        "%r1",
    );
    let expected: Vec<u32> = (0..32).map(|lane| if lane < 20 { 3019 } else { 0 }).collect();
    assert_eq!(words(&body, 32), expected);
}

#[test]
fn matrices_are_multiplied_by_all_lanes() {
    let mma = "mov.b32 %r1, 0x3c003c00; mov.b32 %r2, 0f40400000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r4, %r5, %r6, %r7}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r2, %r2, %r2, %r2};";
    assert_eq!(words(&stored(mma, "%r7"), 64), [19f32.to_bits(); 64]);
    // Divergent lanes reconverge at the instruction.
    let apart = "and.b32 %r9, %lane, 1; setp.eq.b32 %p1, %r9, 0; @%p1 bra $even; add.s32 %r9, %r9, 1; $even:";
    assert_eq!(words(&stored(&format!("{apart} {mma}"), "%r4"), 32), [19f32.to_bits(); 32]);

    let incomplete = |body: &str, threads: u32, lanes: u32| {
        let found = fault(body, threads);
        assert!(matches!(*found.kind, FaultKind::IncompleteWarp { missing } if missing == lanes), "{found}");
    };
    incomplete(mma, 20, 0xfff0_0000);
    incomplete(&format!("setp.eq.b32 %p1, %lane, 3; @%p1 exit; {mma}"), 32, 8);
    let guarded = mma.replace("mma.sync", "setp.ne.b32 %p1, %lane, 3; @%p1 mma.sync");
    incomplete(&guarded, 32, 8);
    let found = fault(
        &format!(
            "setp.eq.b32 %p1, %lane, 3; @%p1 bra $other; {mma} bra $end; $other: bar.warp.sync -1; $end:"
        ),
        32,
    );
    assert!(matches!(&*found.kind, FaultKind::Deadlock(_)), "{found}");
    let found = fault(
        &mma.replace("mov.b32 %r2, 0f40400000;", "setp.ne.b32 %p1, %lane, 3; @%p1 mov.b32 %r2, 0f40400000;"),
        32,
    );
    assert!(matches!(&*found.kind, FaultKind::UnwrittenRegister(name) if name == "%r2"), "{found}");
}

#[test]
fn lanes_that_cannot_converge_deadlock() {
    let body = "setp.eq.b32 %p1, %lane, 3; @%p1 bra $a; bar.warp.sync -1; bra $end;
        $a: shfl.sync.idx.b32 %r1, %lane, 3, 31, -1; $end:";
    let found = fault(body, 32);
    let FaultKind::Deadlock(message) = &*found.kind else { panic!("{found}") };
    assert!(message.contains("bar.warp.sync") && message.contains("shfl.sync"), "{message}");
    assert!(found.to_string().contains("line 13"), "{found}");
}

#[test]
fn masks_must_include_the_executing_lane() {
    let found = fault("shfl.sync.idx.b32 %r1, %lane, 0, 31, 0x7fffffff;", 32);
    assert!(matches!(*found.kind, FaultKind::NotAMember { mask: 0x7fff_ffff }), "{found}");
    assert_eq!(found.thread, 31);
}

#[test]
fn guarded_instructions_skip_lanes() {
    let body = stored(
        "mov.u32 %r1, 1; and.b32 %r2, %lane, 3; setp.eq.b32 %p1, %r2, 2;
        @%p1 mov.u32 %r1, 2; @!%p1 add.s32 %r1, %r1, 10;
        @%p1 shfl.sync.idx.b32 %r1, %lane, 2, 31, 0x44444444;",
        "%r1",
    );
    let expected: Vec<u32> = (0..32).map(|lane| if lane % 4 == 2 { 2 } else { 11 }).collect();
    assert_eq!(words(&body, 32), expected);
}

#[test]
fn jump_tables() {
    let body = stored(
        "and.b32 %r1, %lane, 3; mov.u32 %r2, 9;
        $table: .branchtargets $a, $b, $c, $a;
        brx.idx %r1, $table;
        $a: mov.u32 %r2, 1; bra $end;
        $b: mov.u32 %r2, 2;
        $c: add.s32 %r2, %r2, 1;
        $end: bar.warp.sync -1;",
        "%r2",
    );
    let expected = |lane: u32| [1, 3, 10, 1][lane as usize % 4];
    assert_eq!(words(&body, 32), (0..32).map(expected).collect::<Vec<_>>());
    let found = fault(&body.replace("and.b32 %r1, %lane, 3;", "mov.u32 %r1, %lane;"), 32);
    assert!(matches!(
        *found.kind,
        FaultKind::JumpTable { index: 4, entries: 4 } | FaultKind::JumpTable { .. }
    ));
}

#[test]
fn special_registers() {
    let body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %laneid;
        mov.u32 %r5, %tid.y; add.s32 %r1, %r1, %r5; shl.b32 %r1, %r1, 8; or.b32 %r1, %r1, %r2; shl.b32 %r1, %r1, 8;
        or.b32 %r1, %r1, %r3; shl.b32 %r1, %r1, 8; or.b32 %r1, %r1, %r4;
        mov.u32 %r6, %ctaid.x; setp.eq.b32 %p1, %r6, 2; @%p1 st.global.b32 [%out], %r1;";
    let words = Run::new(body, &Launch::new(5, 40)).words();
    assert_eq!(words, (0..40).map(|thread| 0x0205_2800 + thread % 32).collect::<Vec<u32>>());
}
