//! Tests mbarriers, the copies that they count, and the fences that both need.
//!
//! The tests cover the copied bytes, their completion, and the ban on earlier accesses.

use microscale_executor::FaultKind;

use super::kernel::{Kernel, SCHEDULES, wait, words};

/// Makes a kernel of 64 threads with one output word each.
fn kernel<'a>(text: &'a str, given: &'a [u8]) -> Kernel<'a> {
    Kernel { text, blocks: 1, threads: 64, shared: 4096, given, output: 256, races: true, cluster: 1 }
}

/// Returns bytes such that any 16 consecutive ones differ.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 37 + i / 256 + 1) as u8).collect()
}

#[track_caller]
fn faults(text: &str, expected: fn(&FaultKind) -> bool) {
    kernel(text, &bytes(4096)).faults(expected);
}

fn misuse(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::Mbarrier(..))
}

fn early(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::Race { .. } | FaultKind::InFlight(_) | FaultKind::Uninitialised(_))
}

fn deadlock(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::Deadlock(_))
}

/// Stores `%r0` at the thread's position in the output.
const STORE: &str = "mul.wide.u32 %l0, %number, 4; add.s64 %l0, %out, %l0; st.global.b32 [%l0], %r0;";

/// Returns code for thread 0 that initializes an mbarrier with `count` arrivals.
fn made(count: &str) -> String {
    format!(
        "@%first mbarrier.init.shared.b64 [%full], {count}; @%first fence.mbarrier_init.release.cluster; bar.sync 0;"
    )
}

/// Returns code whose first warp stores and whose second warp loads.
fn handed(arrive: &str, wait: &str) -> String {
    format!(
        "{} mov.b32 %r0, 0; shl.b32 %r1, %number, 2; and.b32 %r1, %r1, 127; add.s32 %r1, %r1, %shared;
        setp.ge.u32 %p, %number, 32; @%p bra $load;
        mad.lo.u32 %r2, %number, 7, 3; st.shared.b32 [%r1], %r2; {arrive} bra.uni $end;
        $load: {wait} ld.shared.b32 %r0, [%r1]; $end: {STORE}",
        made("32")
    )
}

#[test]
fn waiting_threads_see_writes_from_before_the_arrivals() {
    let arrive = "mbarrier.arrive.shared.b64 _, [%full];";
    let wait0 = wait("%full", "0", "a");
    let found = words(&kernel(&handed(arrive, &wait0), &[0]).stored());
    let expected: Vec<u32> = (0..64).map(|i| if i < 32 { 0 } else { (i - 32) * 7 + 3 }).collect();
    assert_eq!(found, expected);
    faults(&handed(arrive, ""), early);
    faults(&handed(&arrive.replace("mbarrier", "@!%first mbarrier"), &wait0), deadlock);
    faults(&handed(&format!("mov.b32 %r3, 1; {arrive}"), &wait("%full", "1", "a")), |kind| {
        early(kind) || deadlock(kind)
    });
    // A thread that stores after it arrived.
    let late = format!("{arrive} @%first st.shared.b32 [%r1], 9;");
    faults(&handed(&late, &wait0), early);
    // A single try is not a wait.
    let once = "mbarrier.try_wait.parity.shared.b64 %q, [%full], 0;";
    for schedule in SCHEDULES {
        let tried = kernel(&handed(arrive, once), &[0]).under(schedule);
        assert!(tried.as_ref().map_or_else(|fault| early(&fault.kind), |found| words(found) == expected));
    }
    // One lane's arrival covers the warp's writes only after a barrier of the warp.
    let one = "@%first mbarrier.arrive.shared.b64 _, [%full];";
    let of_one = |arrive: &str| handed(arrive, &wait0).replace("[%full], 32", "[%full], 1");
    assert_eq!(words(&kernel(&of_one(&format!("bar.warp.sync -1; {one}")), &[0]).stored()), expected);
    faults(&of_one(one), early);
}

#[test]
fn readers_release_buffers_to_writers() {
    // The second warp reads, then the first one overwrites.
    let text = |arrive: &str| {
        format!(
            "{} shl.b32 %r1, %number, 2; and.b32 %r1, %r1, 127; add.s32 %r1, %r1, %shared; mov.b32 %r0, 0;
            setp.lt.u32 %p, %number, 32; @%p st.shared.b32 [%r1], %number; bar.sync 0; @%p bra $write;
            ld.shared.b32 %r0, [%r1]; {arrive} bra.uni $end;
            $write: {} st.shared.b32 [%r1], 9; $end: {STORE}",
            made("32"),
            wait("%full", "0", "a")
        )
    };
    let arrive = "mbarrier.arrive.shared.b64 _, [%full];";
    let expected: Vec<u32> = (0..64).map(|i: u32| i.saturating_sub(32)).collect();
    assert_eq!(words(&kernel(&text(arrive), &[0]).stored()), expected);
    let other = text(arrive).replace("[%full], 32", "[%full], 31");
    let other = other.replace("mbarrier.arrive", "setp.ne.u32 %q, %number, 50; @%q mbarrier.arrive");
    faults(&other, early);
}

#[test]
fn misused_mbarriers_are_faults() {
    let arrive = "mbarrier.arrive.shared.b64 _, [%full];";
    for text in [
        arrive.to_owned(),
        "@%first mbarrier.try_wait.parity.shared.b64 %q, [%full], 0;".to_owned(),
        "mbarrier.init.shared.b64 [%full], 0;".to_owned(),
        "mbarrier.init.shared.b64 [%full], 1048576;".to_owned(),
        format!("{} @%first mbarrier.init.shared.b64 [%full], 1;", made("1")),
        format!(
            "{} @%first mbarrier.init.shared.b64 [%full+8], 1; bar.sync 0; ld.shared.b32 %r0, [%full];",
            made("1")
        ),
        format!("{} @%first ld.shared.b32 %r0, [%full+4];", made("1")),
        format!("{} @%first st.shared.b8 [%full+7], 1;", made("1")),
        format!("{} @%first atom.shared.add.u32 %r0, [%full], 1;", made("1")),
        format!("{} @%first cp.async.ca.shared.global [%full], [%in], 8; cp.async.wait_all;", made("1")),
        format!("{} @%first mbarrier.try_wait.parity.shared.b64 %q, [%full], 2;", made("1")),
        format!("{} @%first mbarrier.arrive.expect_tx.shared.b64 _, [%full], 1048576;", made("1")),
        // The phase waits for bytes, and no further arrival is allowed.
        format!(
            "{} @%first mbarrier.arrive.expect_tx.shared.b64 _, [%full], 16; @%first {arrive}",
            made("1")
        ),
    ] {
        faults(&text, misuse);
    }
    faults("mbarrier.init.shared.b64 [%full+4], 1;", |kind| matches!(kind, FaultKind::Misaligned(_)));
    let unordered = "@%first mbarrier.init.shared.b64 [%full], 64; bar.warp.sync -1; mbarrier.arrive.shared.b64 _, [%full];";
    faults(unordered, |kind| matches!(kind, FaultKind::Race { .. } | FaultKind::Mbarrier(..)));
    // The last arrival never comes.
    faults(&format!("{} {}", made("65"), wait("%full", "0", "a")), deadlock);
    faults(&format!("{} {arrive} {}", made("65"), wait("%full", "0", "a")), deadlock);
}

/// Consecutive phases: all threads arrive and wait, many times.
#[test]
fn phases_follow_each_other() {
    let text = format!(
        "{} mov.b32 %r0, 0; shl.b32 %r1, %number, 2; add.s32 %r1, %r1, %shared; xor.b32 %r2, %number, 33; shl.b32 %r2, %r2, 2;
        add.s32 %r2, %r2, %shared; mov.b32 %r3, 0; mov.b32 %r5, %number;
        $loop: st.shared.b32 [%r1], %r5; mbarrier.arrive.shared.b64 _, [%full]; and.b32 %r4, %r3, 1; {}
        ld.shared.b32 %r5, [%r2]; add.s32 %r5, %r5, 1; xor.b32 %r6, %r3, 1; shl.b32 %r6, %r6, 8; and.b32 %r6, %r6, 256;
        add.s32 %r3, %r3, 1; xor.b32 %r1, %r1, 256; xor.b32 %r2, %r2, 256; setp.lt.u32 %p, %r3, 7; @%p bra $loop;
        mov.b32 %r0, %r5; {STORE}",
        made("64"),
        wait("%full", "%r4", "a")
    );
    let mut expected: Vec<u32> = (0..64).collect();
    for _ in 0..7 {
        expected = (0..64).map(|i: usize| expected[i ^ 33] + 1).collect();
    }
    assert_eq!(words(&kernel(&text, &[0]).stored()), expected);
    // Without the second buffer, faster threads overwrite words that others have not read.
    faults(&text.replace("xor.b32 %r1, %r1, 256; xor.b32 %r2, %r2, 256;", ""), early);
}

const BULK: &str = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";

/// Thread 0 copies 256 bytes in two parts. All threads wait and read their words.
fn bulk() -> String {
    format!(
        "{} @!%first bra $read;
        mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;
        {BULK} [%shared], [%in], 128, [%full]; {BULK} [%shared+128], [%in+128], 128, [%full];
        $read: {} shl.b32 %r1, %number, 2; add.s32 %r1, %r1, %shared; ld.shared.b32 %r0, [%r1]; {STORE}",
        made("1"),
        wait("%full", "0", "a")
    )
}

#[test]
fn bulk_copies_land_before_their_phase_is_complete() {
    let given = bytes(4096);
    assert_eq!(kernel(&bulk(), &given).stored(), given[..256]);
    let early_expect = bulk().replace("mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256;", "");
    let late = early_expect.replace("$read:", "mbarrier.arrive.expect_tx.shared.b64 _, [%full], 256; $read:");
    assert_eq!(kernel(&late, &given).stored(), given[..256]);
    // A register gives the number of bytes.
    let sized =
        bulk().replace("[%in], 128,", "[%in], %r9,").replace("@!%first", "mov.b32 %r9, 128; @!%first");
    assert_eq!(kernel(&sized, &given).stored(), given[..256]);
}

#[test]
fn memory_of_a_pending_bulk_copy_must_not_be_accessed() {
    let text = bulk();
    let change = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    };
    let unawaited = |kind: &FaultKind| early(kind) || matches!(kind, FaultKind::NeverAwaited(_));
    faults(&change(&wait("%full", "0", "a"), ""), unawaited);
    // Only one warp waits.
    let some = format!("setp.lt.u32 %p, %number, 32; @%p bra $here; {} $here:", wait("%full", "0", "a"));
    faults(&change(&wait("%full", "0", "a"), &some), early);
    faults(&change("bytes [%shared], [%in]", "bytes [%shared+8], [%in]"), |kind| {
        matches!(kind, FaultKind::Misaligned(_))
    });
    faults(&change("bytes [%shared], [%in]", "bytes [%shared], [%in+8]"), |kind| {
        matches!(kind, FaultKind::Misaligned(_))
    });
    faults(&change("[%in], 128", "[%in], 120"), |kind| matches!(kind, FaultKind::BulkSize(120)));
    faults(&change("[%in+128], 128", "[%in+4096], 128"), |kind| matches!(kind, FaultKind::OutOfBounds(_)));
    faults(&change("[%shared+128], [%in+128]", "[%shared+4000], [%in+128]"), |kind| {
        matches!(kind, FaultKind::OutOfBounds(_))
    });
    // More bytes are expected than come, or fewer.
    faults(&change("[%full], 256", "[%full], 272"), deadlock);
    faults(&change("[%full], 256", "[%full], 128"), |kind| early(kind) || misuse(kind));
    faults(&change("@%first fence.mbarrier_init.release.cluster;", ""), misuse);
    let fenced = change("fence.mbarrier_init.release.cluster", "fence.proxy.async.shared::cta");
    kernel(&fenced, &bytes(4096)).stored();
    faults(&change("[%full];", "[%empty];"), misuse);
    // The source changes during the copy, or was written by this launch.
    let written = change("@!%first bra $read;", "@%first st.global.b32 [%in], 1; @!%first bra $read;");
    faults(&written, |kind| matches!(kind, FaultKind::Unfenced { .. }));
    // Two copies to the same bytes.
    faults(&change("[%shared+128], [%in+128]", "[%shared+112], [%in+128]"), early);
}

#[test]
fn writes_before_a_bulk_copy_need_a_fence() {
    let text = bulk();
    let before = |stores: &str| text.replace("@!%first bra $read;", &format!("{stores} @!%first bra $read;"));
    let mine = "@%first st.shared.b32 [%shared], 1;";
    let unfenced = |kind: &FaultKind| matches!(kind, FaultKind::Unfenced { .. });
    faults(&before(mine), unfenced);
    let given = bytes(4096);
    let fence = "fence.proxy.async.shared::cta;";
    kernel(&before(&format!("{mine} {fence}")), &given).stored();
    let other = "setp.eq.u32 %p, %number, 40; @%p st.shared.b32 [%shared], 1;";
    faults(&before(&format!("{other} bar.sync 0;")), unfenced);
    faults(&before(&format!("{other} bar.sync 0; {fence}")), unfenced);
    faults(&before(&format!("{other} {fence}")), early);
    kernel(&before(&format!("{other} {fence} bar.sync 0;")), &given).stored();
    // Memory that was only read needs an order, but no fence.
    let read = format!("{other} {fence} bar.sync 0; ld.shared.b32 %r8, [%shared];");
    faults(&before(&read), early);
    kernel(&before(&format!("{read} bar.sync 0;")), &given).stored();
}

/// A ring of 128-byte stages.
///
/// One warp copies, and three warps sum. `full` counts the producer's arrival and the bytes,
/// `empty` one arrival per consumer thread.
fn ring(stages: u32) -> String {
    format!(
        "mov.b32 %r0, 0; mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0;
        $init: mad.lo.u32 %r1, %r0, 8, %full; @%first mbarrier.init.shared.b64 [%r1], 1;
        mad.lo.u32 %r1, %r0, 8, %empty; @%first mbarrier.init.shared.b64 [%r1], 96;
        add.s32 %r0, %r0, 1; setp.lt.u32 %p, %r0, {stages}; @%p bra $init;
        @%first fence.mbarrier_init.release.cluster; bar.sync 0;
        setp.lt.u32 %p, %number, 96; @%p bra $consume; setp.ne.u32 %p, %number, 96; @%p bra $end;
        $produce: mad.lo.u32 %r2, %r10, 8, %full; mad.lo.u32 %r3, %r10, 8, %empty; xor.b32 %r4, %r11, 1;
        {} mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128; mad.lo.u32 %r5, %r10, 128, %shared;
        {BULK} [%r5], [%in], 128, [%r2]; add.s64 %in, %in, 128; NEXT @%p bra $produce; bra.uni $end;
        $consume: mov.b32 %r0, 0;
        $more: mad.lo.u32 %r2, %r10, 8, %full; mad.lo.u32 %r3, %r10, 8, %empty;
        {} and.b32 %r6, %number, 31; shl.b32 %r6, %r6, 2; mad.lo.u32 %r5, %r10, 128, %r6; add.s32 %r5, %r5, %shared;
        ld.shared.b32 %r7, [%r5]; add.s32 %r0, %r0, %r7; mbarrier.arrive.shared.b64 _, [%r3]; NEXT @%p bra $more;
        {STORE} $end:",
        wait("%r3", "%r4", "p"),
        wait("%r2", "%r11", "c")
    )
    .replace(
        "NEXT",
        &format!(
            "add.s32 %r10, %r10, 1; setp.eq.u32 %q, %r10, {stages}; @%q mov.b32 %r10, 0; @%q xor.b32 %r11, %r11, 1;
            add.s32 %r12, %r12, 1; setp.lt.u32 %p, %r12, 11;"
        ),
    )
}

#[test]
fn rings_of_stages() {
    let given = bytes(11 * 128);
    let column = |lane: usize| words(&given).into_iter().skip(lane).step_by(32).fold(0u32, u32::wrapping_add);
    let expected: Vec<u32> = (0..96).map(|i| column(i % 32)).collect();
    let run = |text: &str| Kernel { threads: 128, output: 384, ..kernel(text, &given) }.stored();
    for stages in 1..=4 {
        assert_eq!(words(&run(&ring(stages))), expected);
    }
    let wrong = |from: &str, to: &str, expected: fn(&FaultKind) -> bool| {
        let text = ring(3);
        assert!(text.contains(from), "{from}");
        Kernel { threads: 128, output: 384, ..kernel(&text.replace(from, to), &given) }.faults(expected);
    };
    let either = |kind: &FaultKind| early(kind) || misuse(kind) || deadlock(kind);
    wrong(&wait("%r3", "%r4", "p"), "", either);
    wrong(&wait("%r2", "%r11", "c"), "", either);
    // The wait covers too few consumers, or too many.
    wrong("[%r1], 96", "[%r1], 95", either);
    wrong("[%r1], 96", "[%r1], 97", deadlock);
    // Arrives before the load.
    wrong(
        "ld.shared.b32 %r7, [%r5];",
        "mbarrier.arrive.shared.b64 _, [%r3]; ld.shared.b32 %r7, [%r5];",
        either,
    );
    wrong("xor.b32 %r4, %r11, 1;", "mov.b32 %r4, %r11;", deadlock);
}

#[test]
fn mbarriers_await_copies_of_threads() {
    let arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%full];";
    let text = |before: &str, after: &str, wait: &str| {
        format!(
            "{} shl.b32 %r1, %number, 3; add.s32 %r2, %r1, %shared; cvt.u64.u32 %l1, %r1; add.s64 %l1, %in, %l1;
            cp.async.ca.shared.global [%r2], [%l1], 4; {before} cp.async.ca.shared.global [%r2+4], [%l1+4], 4; {after}
            {wait} xor.b32 %r2, %r2, 264; ld.shared.b32 %r0, [%r2]; ld.shared.b32 %r3, [%r2+4]; xor.b32 %r0, %r0, %r3; {STORE}",
            made("64")
        )
    };
    let given = bytes(512);
    let wait = wait("%full", "0", "a");
    let all = words(&given);
    let expected: Vec<u32> = (0..64).map(|i: usize| all[(i ^ 33) * 2] ^ all[(i ^ 33) * 2 + 1]).collect();
    assert_eq!(words(&kernel(&text("", arrive, &wait), &given).stored()), expected);
    // Without `.noinc`, each arrival is expected when it is issued: thread 0 arrives once more.
    let counted = "cp.async.mbarrier.arrive.shared.b64 [%full]; bar.sync 0; @%first mbarrier.arrive.shared.b64 _, [%full];";
    let one = text("", counted, &wait).replace(&made("64"), &made("1"));
    assert_eq!(words(&kernel(&one, &given).stored()), expected);
    faults(&one.replace("@%first mbarrier.arrive.shared.b64 _, [%full];", ""), deadlock);
    // The arrival does not cover a copy issued after it.
    faults(&text(arrive, "", &wait), |kind| early(kind) || matches!(kind, FaultKind::NeverAwaited(_)));
    faults(&text("", arrive, ""), early);
    faults(&text("", &format!("@!%first {arrive}"), &wait), deadlock);
    // The arrival of copies does not release the thread's own stores.
    let store = "st.shared.b32 [%r2+2048], 5;";
    let stored = text("", &format!("{store} {arrive}"), &wait).replace("[%r2+4]; xor", "[%r2+2048]; xor");
    faults(&stored, early);
    // The thread may exit, but another thread must wait.
    let exits = "setp.lt.u32 %p, %number, 32; @%p exit;";
    let given = bytes(512);
    let text = text("", &format!("{arrive} {exits}"), &wait);
    let found = words(&kernel(&text, &given).stored());
    assert_eq!(found[32..], expected[32..]);
    faults(&text.replace(&wait, "exit;"), |kind| matches!(kind, FaultKind::NeverAwaited(_)));
}
