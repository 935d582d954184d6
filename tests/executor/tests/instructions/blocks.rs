//! Partial barriers, ordering between blocks, matrix loads, and instructions without an effect.

use microscale_executor::FaultKind;

use super::kernel::{Kernel, words};

/// Makes a kernel of 128 threads with one output word each.
fn kernel<'a>(text: &'a str, given: &'a [u8]) -> Kernel<'a> {
    Kernel { text, blocks: 1, threads: 128, shared: 4096, given, output: 512, races: true, cluster: 1 }
}

const STORE: &str = "mul.wide.u32 %l0, %number, 4; add.s64 %l0, %out, %l0; st.global.b32 [%l0], %r0;";

fn race(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::Race { .. } | FaultKind::Uninitialised(_))
}

fn deadlock(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::Deadlock(_))
}

/// Each half of the threads exchanges words across a barrier.
fn halves(barrier: &str) -> String {
    format!(
        "shl.b32 %r1, %number, 2; add.s32 %r1, %r1, %shared; shr.u32 %r3, %number, 6; add.s32 %r3, %r3, 3;
        st.shared.b32 [%r1], %number; {barrier} xor.b32 %r1, %r1, 252; ld.shared.b32 %r0, [%r1]; {STORE}"
    )
}

#[test]
fn barriers_of_some_threads() {
    let expected: Vec<u32> = (0..128).map(|i| i ^ 63).collect();
    // The base of `bytes` is a multiple of 256.
    for barrier in [
        "bar.sync %r3, 64;",
        "barrier.sync.aligned %r3, 64;",
        "barrier.cta.sync %r3, 64;",
        "mov.b32 %r4, 64; bar.cta.sync %r3, %r4;",
        "bar.sync 1, 128;",
        "bar.sync 1, 128; bar.sync %r3, 64; bar.sync 1, 128; bar.sync 0;",
        "setp.lt.u32 %p, %number, 64; @%p bar.sync 1, 64; @!%p bar.sync 2, 64;",
    ] {
        assert_eq!(words(&kernel(&halves(barrier), &[0]).stored()), expected, "{barrier}");
    }
    let faults =
        |barrier: &str, expected: fn(&FaultKind) -> bool| kernel(&halves(barrier), &[0]).faults(expected);
    faults("bar.sync %r3, 32;", |kind| deadlock(kind) || race(kind));
    faults("bar.sync %r3, 96;", deadlock);
    faults("bar.sync %r3, 128;", deadlock);
    faults("shl.b32 %r4, %r3, 5; bar.sync 1, %r4;", deadlock);
    faults("bar.sync %number, 64;", |kind| matches!(kind, FaultKind::NotUniform(_)));
    faults("mov.b32 %r4, 40; bar.sync 1, %r4;", |kind| matches!(kind, FaultKind::NotUniform(_)));
    faults("mov.b32 %r4, 16; bar.sync %r4, 64;", |kind| matches!(kind, FaultKind::NotUniform(_)));
    // Barriers of other threads order nothing.
    faults("shr.u32 %r3, %number, 5; bar.sync %r3, 32;", race);
}

/// A barrier orders the threads that it is for, and no others.
#[test]
fn barriers_of_some_threads_order_only_those_threads() {
    let text = |second: &str| {
        format!(
            "mov.b32 %r0, 7; setp.lt.u32 %p, %number, 64; @!%p bra $other;
            @%first st.shared.b32 [%shared], 5; bar.sync 1, 64; ld.shared.b32 %r0, [%shared]; {second} bra.uni $end;
            $other: {second} ld.shared.b32 %r0, [%shared]; $end: {STORE}"
        )
    };
    assert_eq!(words(&kernel(&text("bar.sync 0;"), &[0]).stored()), [5; 128]);
    assert_eq!(words(&kernel(&text("bar.sync 2, 128;"), &[0]).stored()), [5; 128]);
    kernel(&text(""), &[0]).faults(race);
    kernel(&text("bar.sync 2, 64;"), &[0]).faults(|kind| race(kind) || deadlock(kind));
}

/// All blocks store a word, and the last block to arrive sums them.
fn last_block(before: &str, count: &str, after: &str) -> String {
    format!(
        "setp.gt.u32 %p, %number, 1; @%p exit; shl.b32 %r1, %block, 1; add.s32 %r1, %r1, %number; mul.wide.u32 %l1, %r1, 4;
        add.s64 %l1, %l1, %out; add.s32 %r2, %r1, 10; st.global.b32 [%l1+16], %r2; {before} bar.sync 0;
        @!%first bra $joined; {count} {after} st.shared.b32 [%shared], %r3;
        $joined: bar.sync 0; ld.shared.b32 %r3, [%shared]; mov.u32 %r4, %nctaid.x; sub.s32 %r4, %r4, 1;
        setp.ne.u32 %p, %r3, %r4; @%p exit; mov.b32 %r5, 0; mov.b32 %r0, 0;
        $sum: mul.wide.u32 %l2, %r5, 4; add.s64 %l2, %l2, %out; ld.global.b32 %r6, [%l2+16]; add.s32 %r0, %r0, %r6;
        add.s32 %r5, %r5, 1; setp.lt.u32 %p, %r5, 10; @%p bra $sum;
        mul.wide.u32 %l3, %number, 4; add.s64 %l3, %out, %l3; st.global.b32 [%l3+8], %r0;"
    )
}

fn of_blocks<'a>(text: &'a str) -> Kernel<'a> {
    Kernel { blocks: 5, threads: 64, output: 64, ..kernel(text, &[0]) }
}

#[test]
fn the_last_block_reads_the_writes_of_all_blocks() {
    let counts = ["atom.global.add.u32 %r3, [%out], 1;", "atom.relaxed.gpu.global.add.u32 %r3, [%out], 1;"];
    let ordered = "atom.acq_rel.gpu.global.add.u32 %r3, [%out], 1;";
    let fences = ["membar.gl;", "fence.acq_rel.gpu;"];
    let sum: u32 = (10..20).sum();
    let sums = |text: &str| assert_eq!(words(&of_blocks(text).stored())[2..4], [sum; 2], "{text}");
    let faults = |text: &str| of_blocks(text).faults(race);
    for fence in fences {
        for count in counts {
            sums(&last_block(fence, count, fence));
            faults(&last_block("", count, fence));
            faults(&last_block(fence, count, ""));
            faults(&last_block(&format!("@%first {fence}"), count, fence));
        }
        sums(&last_block(fence, ordered, ""));
    }
    sums(&last_block("", ordered, ""));
    faults(&last_block("", ordered, "").replace("bar.sync 0;\n        @!%first", "@!%first"));
    // Without an atomic operation, nothing shows that the other blocks are done.
    let plain =
        "ld.global.b32 %r3, [%out]; add.s32 %r3, %r3, 1; st.global.b32 [%out], %r3; sub.s32 %r3, %r3, 1;";
    faults(&last_block("membar.gl;", plain, "membar.gl;"));
}

#[test]
fn blocks_acquire_the_releases_of_others() {
    let sum: u32 = (10..20).sum();
    // Counting by loads and stores is correct only because blocks run one after the other here.
    let count =
        "ld.acquire.gpu.global.u32 %r3, [%out]; add.s32 %r4, %r3, 1; st.release.gpu.global.u32 [%out], %r4;";
    let text = last_block("", count, "");
    assert_eq!(words(&of_blocks(&text).stored())[2..4], [sum; 2]);
    for (from, to) in [("ld.acquire", "ld.relaxed"), ("st.release", "st.relaxed")] {
        of_blocks(&text.replace(from, to)).faults(race);
    }
    let fenced =
        text.replace("ld.acquire", "ld.relaxed").replace("%r4, %r3, 1;", "%r4, %r3, 1; fence.acq_rel.gpu;");
    assert_eq!(words(&of_blocks(&fenced).stored())[2..4], [sum; 2]);
    let atom =
        "atom.acq_rel.gpu.global.add.u32 %r3, [%out], 2; atom.acq_rel.gpu.global.add.u32 %r4, [%out], -1;";
    assert_eq!(words(&of_blocks(&last_block("", atom, "")).stored())[0], 5);
}

/// `ldmatrix` gives the rows of four 8 by 8 matrices to the lanes in the layout of A of `mma`.
#[test]
fn four_matrices_are_loaded() {
    let given: Vec<u8> = (0..4096).map(|i| (i * 37 + i / 256 + 1) as u8).collect();
    // Lane l holds the address of row 5·l modulo 32, in a matrix of 48 bytes per row.
    let text = "mul.wide.u32 %l0, %number, 32; add.s64 %l0, %in, %l0; shl.b32 %r1, %number, 5; add.s32 %r1, %r1, %shared;
        ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%l0]; st.shared.v4.b32 [%r1], {%r4, %r5, %r6, %r7};
        ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%l0+16]; st.shared.v4.b32 [%r1+16], {%r4, %r5, %r6, %r7};
        SYNC mul.lo.u32 %r2, %number, 5; and.b32 %r2, %r2, 31; mad.lo.u32 %r2, %r2, 48, %shared;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r8, %r9, %r10, %r11}, [%r2+16];
        mul.wide.u32 %l0, %number, 16; add.s64 %l0, %out, %l0; st.global.v4.b32 [%l0], {%r8, %r9, %r10, %r11};";
    let synced = text.replace("SYNC", "bar.sync 0;");
    let found = words(&Kernel { output: 2048, ..kernel(&synced, &given) }.stored());
    for thread in 0..128 {
        let (warp, lane) = (thread / 32, thread % 32);
        for i in 0..4 {
            let row = i * 8 + lane / 4;
            let address = (warp * 32 + row) * 5 % 32 * 48 + 16 + lane % 4 * 4;
            assert_eq!(found[thread * 4 + i].to_le_bytes(), given[address..][..4], "{thread}, {i}");
        }
    }
    let faults = |text: &str, threads: u32, expected: fn(&FaultKind) -> bool| {
        Kernel { threads, output: 2048, ..kernel(text, &given) }.faults(expected);
    };
    faults(&text.replace("SYNC", ""), 128, race);
    faults(&text.replace("SYNC", "bar.warp.sync -1;"), 128, race);
    faults(&synced.replace("[%r2+16]", "[%r2+8]"), 128, |kind| matches!(kind, FaultKind::Misaligned(_)));
    faults(&synced.replace("[%r2+16]", "[%r2+4080]"), 128, |kind| matches!(kind, FaultKind::OutOfBounds(_)));
    faults(&synced, 112, |kind| {
        matches!(kind, FaultKind::IncompleteWarp { .. } | FaultKind::Uninitialised(_))
    });
    // A load reads on behalf of the lanes that receive the numbers.
    let written = format!("{synced} @%first st.shared.b32 [%shared+16], 1;");
    faults(&written, 128, race);
}

/// Fewer matrices use the addresses of the first lanes only, and `.trans` exchanges rows and
/// columns.
#[test]
fn matrices_are_loaded_in_every_number_and_orientation() {
    let given: Vec<u8> = (0..2048).map(|i| (i * 37 + i / 256 + 1) as u8).collect();
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        let trans = if transposed { ".trans" } else { "" };
        let to = ["%r8", "%r9", "%r10", "%r11"][..count].join(", ");
        let text = format!(
            "mul.wide.u32 %l0, %number, 16; add.s64 %l0, %in, %l0; shl.b32 %r1, %number, 4; add.s32 %r1, %r1, %shared;
            ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%l0]; st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
            SYNC mov.b32 %r8, 0; mov.b32 %r9, 0; mov.b32 %r10, 0; mov.b32 %r11, 0;
            mov.u32 %r3, %laneid; setp.lt.u32 %p, %r3, {lanes};
            @%p mul.lo.u32 %r2, %number, 5; @%p and.b32 %r2, %r2, 127; @%p shl.b32 %r2, %r2, 4; @%p add.s32 %r2, %r2, %shared;
            ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{to}}}, [%r2];
            mul.wide.u32 %l0, %number, 16; add.s64 %l0, %out, %l0; st.global.v4.b32 [%l0], {{%r8, %r9, %r10, %r11}};",
            lanes = count * 8,
        );
        let of = |text: &str| words(&Kernel { output: 2048, ..kernel(text, &given) }.stored());
        let found = of(&text.replace("SYNC", "bar.sync 0;"));
        for thread in 0..128 {
            let (warp, lane) = (thread / 32, thread % 32);
            for i in 0..count {
                for half in 0..2 {
                    let (row, column) = (lane / 4, lane % 4 * 2 + half);
                    let (row, column) = if transposed { (column, row) } else { (row, column) };
                    let address = (warp * 32 + i * 8 + row) * 5 % 128 * 16 + column * 2;
                    let number = (found[thread * 4 + i] >> (16 * half)) as u16;
                    assert_eq!(number.to_le_bytes(), given[address..][..2], "{count}, {thread}, {i}");
                }
            }
            assert!(found[thread * 4 + count..][..4 - count].iter().all(|&rest| rest == 0));
        }
        let faults = |text: &str, expected: fn(&FaultKind) -> bool| {
            Kernel { output: 2048, ..kernel(text, &given) }.faults(expected);
        };
        faults(&text.replace("SYNC", ""), race);
        let fewer = text.replace("SYNC", "bar.sync 0;").replace(&format!("%r3, {};", count * 8), "%r3, 7;");
        faults(&fewer, |kind| matches!(kind, FaultKind::UnwrittenRegister(_)));
    }
}

/// `stmatrix` is the reverse of `ldmatrix`.
#[test]
fn matrices_are_stored_in_every_number_and_orientation() {
    let given: Vec<u8> = (0..2048).map(|i| (i * 37 + i / 256 + 1) as u8).collect();
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        let trans = if transposed { ".trans" } else { "" };
        let from = ["%r8", "%r9", "%r10", "%r11"][..count].join(", ");
        // Lane l holds the address of row 5·l modulo 128 in all warps together.
        let text = format!(
            "mul.wide.u32 %l0, %number, 16; add.s64 %l1, %in, %l0; shl.b32 %r1, %number, 4; add.s32 %r1, %r1, %shared;
            mov.b32 %r4, 0; st.shared.v4.b32 [%r1], {{%r4, %r4, %r4, %r4}}; bar.sync 0;
            ld.global.v4.b32 {{%r8, %r9, %r10, %r11}}, [%l1];
            mov.u32 %r3, %laneid; setp.lt.u32 %p, %r3, {lanes};
            @%p mul.lo.u32 %r2, %number, 5; @%p and.b32 %r2, %r2, 127; @%p shl.b32 %r2, %r2, 4; @%p add.s32 %r2, %r2, %shared;
            stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {{{from}}};
            SYNC ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r1]; add.s64 %l0, %out, %l0; st.global.v4.b32 [%l0], {{%r4, %r5, %r6, %r7}};",
            lanes = count * 8,
        );
        let found = Kernel { output: 2048, ..kernel(&text.replace("SYNC", "bar.sync 0;"), &given) }.stored();
        let mut expected = vec![0; 2048];
        for thread in 0..128 {
            let (warp, lane) = (thread / 32, thread % 32);
            for (i, half) in (0..count).flat_map(|i| [(i, 0), (i, 1)]) {
                let (row, column) = (lane / 4, lane % 4 * 2 + half);
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                let to = (warp * 32 + i * 8 + row) * 5 % 128 * 16 + column * 2;
                let from = thread * 16 + i * 4 + half * 2;
                expected[to..to + 2].copy_from_slice(&given[from..from + 2]);
            }
        }
        assert_eq!(found, expected, "{count}, {transposed}");
        let faults = |text: &str, expected: fn(&FaultKind) -> bool| {
            Kernel { output: 2048, ..kernel(text, &given) }.faults(expected);
        };
        faults(&text.replace("SYNC", ""), race);
        let synced = text.replace("SYNC", "bar.sync 0;");
        faults(&synced.replace("[%r2], {", "[%r2+8], {"), |kind| matches!(kind, FaultKind::Misaligned(_)));
        // Rows of two warps in one place.
        faults(&synced.replace("and.b32 %r2, %r2, 127", "and.b32 %r2, %r2, 31"), race);
    }
}

#[test]
fn some_instructions_change_nothing() {
    let text = format!(
        "griddepcontrol.wait; mov.b32 %r0, %number; setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.inc.sync.aligned.u32 232;
        griddepcontrol.launch_dependents; {STORE}"
    );
    assert_eq!(words(&kernel(&text, &[0]).stored()), (0..128).collect::<Vec<u32>>());
}
