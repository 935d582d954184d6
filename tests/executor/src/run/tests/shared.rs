//! Tests shared memory and block barriers.

use super::{Run, SCHEDULES, module};
use crate::{Access, Fault, FaultKind, Launch, Module, Schedule, Space};

/// Stores a thread's number, and loads the number of its mirror thread.
const EXCHANGE: &str =
    "mov.u64 %d1, buffer; mul.wide.u32 %d2, %lane, 4; add.s64 %d2, %d1, %d2; st.shared.b32 [%d2], %lane;
    bar.sync 0;
    mov.u32 %r4, %ntid.x; sub.s32 %r4, %r4, %lane; mul.wide.u32 %d3, %r4, 4; add.s64 %d3, %d1, %d3;
    ld.shared.b32 %r2, [%d3+-4];
    st.global.b32 [%out], %r2;";

const BUFFER: &str = ".extern .shared .align 16 .b8 buffer[];";

fn exchange(body: &str, schedule: Schedule) -> Run {
    Run::of(&module(BUFFER, body), &Launch::new(1, 100).shared(400).schedule(schedule), &[])
}

/// Returns the fault of one thread with shared variables and 16 bytes of dynamic shared memory.
fn faulty(head: &str, body: &str) -> Fault {
    Run::of(&module(head, body), &Launch::new(1, 1).shared(16), &[]).fault()
}

#[test]
fn barriers_join_the_warps_of_a_block() {
    let reversed: Vec<u32> = (0..100).rev().collect();
    for schedule in SCHEDULES {
        for barrier in ["bar.sync", "bar.cta.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned"] {
            let body = EXCHANGE.replace("bar.sync", barrier);
            assert_eq!(exchange(&body, schedule).words(), reversed, "{barrier}");
        }
        let found = exchange(&EXCHANGE.replace("bar.sync 0;", ""), schedule).fault();
        assert!(matches!(*found.kind, FaultKind::Race { .. } | FaultKind::Uninitialised(_)), "{found}");
        let apart = "setp.lt.u32 %p1, %lane, 32; @%p1 bra $a; bar.sync 1; bra $b; $a: bar.sync 0; $b:";
        let found = exchange(&EXCHANGE.replace("bar.sync 0;", apart), schedule).fault();
        assert!(matches!(&*found.kind, FaultKind::Deadlock(_)), "{found}");
        let divergent = "and.b32 %r8, %lane, 1; setp.eq.b32 %p1, %r8, 0; @%p1 bra $a; barrier.sync 0; bra $b;
            $a: barrier.sync 0; $b:";
        assert_eq!(exchange(&EXCHANGE.replace("bar.sync 0;", divergent), schedule).words(), reversed);
        let aligned = divergent.replace("barrier", "bar");
        let found = exchange(&EXCHANGE.replace("bar.sync 0;", &aligned), schedule).fault();
        assert!(matches!(&*found.kind, FaultKind::Deadlock(_)), "{found}");
    }
}

#[test]
fn barriers_do_not_wait_for_threads_that_exited() {
    // The last warp is idle. Of it only lanes 64 to 67 reach the barrier.
    let early = "mov.u32 %r1, 7; st.global.b32 [%out], %r1; setp.ge.u32 %p1, %lane, 68; @%p1 exit;
        setp.ge.u32 %p1, %lane, 64; @%p1 bra $wait;";
    let body = EXCHANGE.replace("%ntid.x", "64").replace("bar.sync 0;", "$wait: bar.sync 0; @%p1 exit;");
    let expected: Vec<u32> = (0..64).rev().chain([7; 36]).collect();
    for schedule in SCHEDULES {
        assert_eq!(exchange(&format!("{early} {body}"), schedule).words(), expected);
        // A word that a warp stored before it exited must not be read.
        let body =
            EXCHANGE.replace("bar.sync 0;", "setp.ge.u32 %p1, %lane, 64; @%p1 exit; bar.sync 0; bar.sync 0;");
        let found = exchange(&body, schedule).fault();
        assert!(matches!(&*found.kind, FaultKind::Race { thread: 64.., .. }), "{found}");
        // It may be read if there was a barrier in between.
        let body = body.replace("setp.ge", "bar.sync 0; setp.ge");
        assert_eq!(
            exchange(&format!("st.global.b32 [%out], %lane; {body}"), schedule).words()[..2],
            [99, 98]
        );
    }
}

#[test]
fn accesses_of_every_width() {
    let head = ".shared .align 16 .b8 buffer[64];";
    let body = "mov.b32 %r1, 0x80ff0201; mov.b32 %r2, 0x44332211; st.shared.v2.b32 [buffer+8], {%r1, %r2};
        ld.shared.b64 %d1, [buffer+8]; shr.u64 %d1, %d1, 28; cvt.u32.u64 %r3, %d1;
        ld.shared.s8 %r4, [buffer+11]; ld.shared.u8 %r5, [buffer+11]; ld.shared.s16 %r6, [buffer+10]; ld.shared.u16 %r7, [buffer+10];
        mov.u32 %r8, buffer; st.shared.v4.f32 [%r8+16], {%r3, %r4, %r5, %r6}; st.shared.b16 [%r8+34], %r7; st.shared.u16 [%r8+32], 9;
        cvta.shared.u64 %d2, buffer; cvta.to.shared.u64 %d3, %d2; mov.u64 %d4, buffer; sub.s64 %d3, %d3, %d4;
        add.s64 %d3, %d3, %d4; ld.volatile.shared.u32 %r9, [%d3+32]; st.volatile.shared.f64 [%d3+40], %d1; ld.shared.f64 %d1, [buffer+40];
        cvt.u32.u64 %r10, %d1; ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%d3+16]; ld.shared.v2.u16 {%h1, %h2}, [%d3+32];
        mov.b32 %r15, {%h2, %h1};
        st.global.v4.b32 [%out], {%r11, %r12, %r13, %r14}; st.global.v2.b32 [%out+16], {%r9, %r10}; st.global.b32 [%out+24], %r15;
        st.global.b32 [%out+28], 0; exit;";
    let launch = Launch::new(1, 8);
    let body = format!("setp.ne.b32 %p1, %lane, 0; @%p1 exit; {body}");
    let words = Run::of(&module(head, &body), &launch, &[]).words();
    assert_eq!(words[..4], [0x4332_2118, 0xffff_ff80, 0x80, 0xffff_80ff]);
    assert_eq!(words[4..], [0x80ff_0009, 0x4332_2118, 0x0009_80ff, 0]);
}

#[test]
fn variables_do_not_overlap_and_get_no_extra_alignment() {
    let head = ".shared .b32 other; .extern .shared .align 16 .b8 dynamic[];";
    let body = ".shared .align 8 .b8 own[12]; mov.u32 %r1, other; mov.u32 %r2, own; mov.u32 %r3, dynamic;
        and.b32 %r1, %r1, 7; and.b32 %r2, %r2, 15; and.b32 %r3, %r3, 31;
        shl.b32 %r2, %r2, 8; shl.b32 %r3, %r3, 16; or.b32 %r1, %r1, %r2; or.b32 %r1, %r1, %r3; st.global.b32 [%out], %r1;";
    let words = Run::of(&module(head, body), &Launch::new(1, 1), &[]).words();
    assert_eq!(words, [16 << 16 | 8 << 8 | 4]);

    let outside = |body: &str, name: &str, at: i64, size: usize| {
        let found = faulty(head, &format!(".shared .align 8 .b8 own[12]; {body}"));
        let FaultKind::OutOfBounds(access) = &*found.kind else { panic!("{found}") };
        let Access { space: Space::Shared, buffer: Some(buffer), offset, len, .. } = access else {
            panic!("{found}")
        };
        assert_eq!((buffer.as_str(), *offset, *len), (name, at, size));
    };
    outside("st.shared.b64 [own+8], %d0;", "own", 8, 12);
    outside("st.shared.b32 [dynamic+16], %lane;", "dynamic", 16, 16);
    outside("st.shared.b8 [other+-1], %lane;", "other", -1, 4);
    outside("mov.u32 %r1, 0; st.shared.b8 [%r1], %lane;", "other", -260, 4);
    let found = faulty(head, "st.shared.v2.b64 [dynamic+8], {%d0, %d0};");
    assert!(matches!(&*found.kind, FaultKind::OutOfBounds(_)), "{found}");
    let found = faulty(head, "st.shared.v2.b16 [dynamic+2], {1, 2};");
    assert!(
        matches!(&*found.kind, FaultKind::Misaligned(access) if access.space == Space::Shared),
        "{found}"
    );
    let found = faulty(".extern .shared .align 4 .b8 dynamic[];", "st.shared.b64 [dynamic], %d0;");
    assert!(matches!(&*found.kind, FaultKind::Misaligned(_)), "{found}");
}

/// As on a GPU, whose addresses the `gpu` tests compare.
#[test]
fn shared_memory_is_placed_where_the_caller_says() {
    let head = ".shared .align 8 .b8 fixed[12]; .extern .shared .align 16 .b8 dynamic[];";
    let body = "setp.ne.b32 %p1, %lane, 0; mov.u32 %r1, fixed; mov.u32 %r2, dynamic; mov.u32 %r3, 0;
        cvta.shared.u64 %d1, dynamic; cvta.to.shared.u64 %d2, %d1;
        @!%p1 st.shared.b32 [dynamic+12], 7; @!%p1 ld.shared.b32 %r3, [%d2+12];
        shr.u64 %d1, %d1, 8; cvt.u32.u64 %r4, %d1;
        shl.b32 %r2, %r2, 12; shl.b32 %r3, %r3, 28; or.b32 %r1, %r1, %r2; or.b32 %r1, %r1, %r3;
        @%p1 mov.u32 %r1, %r4; st.global.b32 [%out], %r1;";
    let words = |module: Module| Run::of(&module, &Launch::new(1, 2).shared(16), &[]).words();
    // 12 bytes at 0x400, then the next multiple of 16.
    let placed = module(head, body).with_shared_at(0x400, 0x7fab_cd00_0000);
    assert_eq!(words(placed), [7 << 28 | 0x410 << 12 | 0x400, 0xabcd_0004]);
    assert_ne!(words(module(head, body))[0] & 0xfff, 0x400);
}

#[test]
fn every_block_has_its_own_shared_memory() {
    let body = "mov.u32 %r1, %ctaid.x; setp.ne.b32 %p1, %r1, 0; @%p1 bra $read; st.shared.b32 [buffer], 1; $read: ld.shared.b32 %r2, [buffer];";
    for schedule in SCHEDULES {
        let found =
            Run::of(&module(BUFFER, body), &Launch::new(2, 1).shared(4).schedule(schedule), &[]).fault();
        assert!(matches!(&*found.kind, FaultKind::Uninitialised(access) if access.space == Space::Shared));
        assert_eq!(found.block, 1);
    }
}

#[test]
fn addresses_of_one_space_are_invalid_in_another() {
    for body in [
        "cvta.shared.u64 %d1, buffer; ld.global.b32 %r1, [%d1];",
        "cvta.shared.u64 %d1, buffer; ld.shared.b32 %r1, [%d1];",
        "cvta.to.shared.u64 %d1, %in; ld.shared.b32 %r1, [%d1];",
        "mov.u64 %d1, buffer; ld.global.b32 %r1, [%d1];",
        "ld.shared.b32 %r1, [%in];",
    ] {
        let found = faulty(BUFFER, body);
        assert!(matches!(&*found.kind, FaultKind::OutOfBounds(_)), "{body}: {found}");
    }
}
