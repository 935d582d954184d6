//! Tests asynchronous copies: their bytes, their completion, and the ban on earlier accesses.

use microscale_executor::{Access, Fault, FaultKind, Launch, Memory, Module, Schedule, Space};

const SCHEDULES: [Schedule; 5] = [
    Schedule::LowestFirst,
    Schedule::HighestFirst,
    Schedule::Random(1),
    Schedule::Random(2),
    Schedule::Random(3),
];

/// Size of shared memory in bytes.
const SHARED: usize = 4096;

/// Runs a kernel of `threads` threads.
///
/// `%in` and `%out` hold the addresses of its input and output, and `%shared` the 32-bit address of
/// shared memory. `%from`, `%place` and `%to` hold the addresses of the thread's own 16 bytes in
/// them.
fn under(schedule: Schedule, text: &str, threads: u32, given: &[u8]) -> Result<Vec<u8>, Fault> {
    let module = format!(
        ".version 8.8 .target sm_100f .address_size 64
        .visible .entry test(.param .u64 input, .param .u64 output) {{
            .shared .align 16 .b8 bytes[{SHARED}];
            .reg .b64 %in, %out, %from, %place, %wide, %l<4>; .reg .b32 %number, %shared, %to, %r<8>, %v<4>;
            .reg .b16 %h<2>; .reg .pred %p, %first, %second;
            ld.param.u64 %in, [input]; ld.param.u64 %out, [output]; mov.u32 %shared, bytes; mov.u32 %number, %tid.x;
            mul.wide.u32 %wide, %number, 16; add.s64 %from, %in, %wide; add.s64 %place, %out, %wide;
            cvt.u32.u64 %to, %wide; add.s32 %to, %to, %shared;
            setp.eq.u32 %first, %number, 0; setp.eq.u32 %second, %number, 1;
            {text}
            ret;
        }}"
    );
    let module = Module::parse(&module).unwrap_or_else(|error| panic!("{text}: {error}"));
    let kernel = module.kernel("test").unwrap_or_else(|error| panic!("{text}: {error}"));
    let mut memory = Memory::new();
    let input = memory.allocate_from("in", given);
    let output = memory.allocate_from("out", &vec![0; threads as usize * 16]);
    kernel.run(&mut memory, &Launch::new(1, threads).schedule(schedule), &[input.into(), output.into()])?;
    Ok(memory.bytes(output).unwrap())
}

/// Returns the output of a kernel, which must be equal under every schedule.
#[track_caller]
fn stored(text: &str, threads: u32, given: &[u8]) -> Vec<u8> {
    let found = SCHEDULES.map(|schedule| {
        under(schedule, text, threads, given).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"))
    });
    assert!(found.iter().all(|other| *other == found[0]), "{text}: {found:?}");
    found[0].clone()
}

/// Returns the kernel's fault under every schedule.
#[track_caller]
fn faults(text: &str, threads: u32) -> [Fault; SCHEDULES.len()] {
    SCHEDULES.map(|schedule| under(schedule, text, threads, &bytes(512)).expect_err(text))
}

#[track_caller]
fn all_in_flight(text: &str, threads: u32) {
    for fault in faults(text, threads) {
        let space = |access: &Access| access.space == Space::Shared;
        assert!(matches!(&*fault.kind, FaultKind::InFlight(access) if space(access)), "{text}: {fault}");
    }
}

#[track_caller]
fn all_race(text: &str, threads: u32) {
    for fault in faults(text, threads) {
        assert!(matches!(&*fault.kind, FaultKind::Race { .. }), "{text}: {fault}");
    }
}

/// Returns bytes such that any 16 consecutive ones differ.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 37 + i / 256 + 1) as u8).collect()
}

/// Every opcode of a copy, and the sizes that it may copy.
pub(super) const COPIES: [(&str, &[usize]); 5] = [
    ("cp.async.ca.shared.global", &[4, 8, 16]),
    ("cp.async.cg.shared.global", &[16]),
    ("cp.async.ca.shared.global.L2::64B", &[4, 8, 16]),
    ("cp.async.ca.shared.global.L2::128B", &[4]),
    ("cp.async.cg.shared.global.L2::256B", &[16]),
];

/// Returns a load of `size` bytes and a store to the output.
fn through(size: usize, from: &str) -> String {
    let (ty, registers) = match size {
        4 => ("u32", "%v0"),
        8 => ("v2.b32", "{%v0, %v1}"),
        _ => ("v4.b32", "{%v0, %v1, %v2, %v3}"),
    };
    format!("ld.shared.{ty} {registers}, [{from}]; st.global.{ty} [%place], {registers};")
}

#[test]
fn every_form_copies_and_fills_with_zeros() {
    let given = bytes(512);
    for (opcode, sizes) in COPIES {
        for &size in sizes {
            let check = |operands: &str, read: usize, back: &str| {
                let text = format!("{opcode} {operands}; cp.async.wait_all; {}", through(size, back));
                let expected: Vec<u8> = (0..512).map(|i| if i % 16 < read { given[i] } else { 0 }).collect();
                assert_eq!(stored(&text, 32, &given), expected, "{text}");
            };
            check(&format!("[%to], [%from], {size}"), size, "%to");
            // A 64-bit address, and offsets.
            let wide = format!("[%l0+16], [%from], {size}");
            let text = format!(
                "cvt.u64.u32 %l0, %to; {opcode} {wide}; cp.async.wait_all; {}",
                through(size, "%to+16")
            );
            let expected: Vec<u8> = (0..512).map(|i| if i % 16 < size { given[i] } else { 0 }).collect();
            assert_eq!(stored(&text, 32, &given), expected, "{text}");
            for read in 0..=size {
                check(&format!("[%to+32], [%from], {size}, {read}"), read, "%to+32");
            }
        }
    }
    // Each lane's own register holds the number of bytes to read.
    let text =
        "and.b32 %r0, %number, 15; cp.async.cg.shared.global [%to], [%from], 16, %r0; cp.async.wait_all;";
    let expected: Vec<u8> = (0..512).map(|i| if i % 16 < i / 16 % 16 { given[i] } else { 0 }).collect();
    assert_eq!(stored(&format!("{text} {}", through(16, "%to")), 32, &given), expected);
    // Only lanes whose guard is true copy or load.
    let text = "@%first cp.async.cg.shared.global [%to], [%from], 16; @%first cp.async.wait_all;
        @%first ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%to]; @%first st.global.v4.b32 [%place], {%v0, %v1, %v2, %v3};";
    let expected: Vec<u8> = (0..512).map(|i| if i < 16 { given[i] } else { 0 }).collect();
    assert_eq!(stored(text, 32, &given), expected);
}

/// Three groups of one copy each, then a copy without a group.
///
/// Each case waits, then reads one of the four.
#[test]
fn waits_count_groups() {
    let given = bytes(64);
    let copy =
        |slot: usize| format!("cp.async.ca.shared.global [%shared+{}], [%in+{}], 4; ", slot * 16, slot * 16);
    let begin = format!(
        "{} cp.async.commit_group; {} cp.async.commit_group; {} cp.async.commit_group; {}",
        copy(0),
        copy(1),
        copy(2),
        copy(3)
    );
    let text = |wait: &str, slot: usize| {
        format!("{begin} {wait}; {} cp.async.wait_all;", through(4, &format!("%shared+{}", slot * 16)))
    };
    let waits = [
        ("cp.async.wait_group 0", 3),
        ("cp.async.wait_group 1", 2),
        ("cp.async.wait_group 2", 1),
        ("cp.async.wait_group 3", 0),
        ("cp.async.wait_group 4294967295", 0),
        ("cp.async.wait_all", 4),
        // Empty groups count.
        ("cp.async.commit_group; cp.async.wait_group 1", 3),
        ("cp.async.commit_group; cp.async.wait_group 0", 4),
        ("cp.async.commit_group; cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 3", 3),
        // Waits do not add up.
        ("cp.async.wait_group 2; cp.async.wait_group 2", 1),
    ];
    for (wait, over) in waits {
        for slot in 0..4 {
            let text = text(wait, slot);
            if slot < over {
                assert_eq!(stored(&text, 1, &given)[..4], given[slot * 16..][..4], "{text}");
            } else {
                all_in_flight(&text, 1);
            }
        }
    }
    // Each lane counts its own groups. For the second lane, the copy is in the last group.
    let text = format!(
        "cp.async.ca.shared.global [%to], [%from], 4; cp.async.commit_group; @%first cp.async.commit_group;
        cp.async.wait_group 1; LANE {} cp.async.wait_all;",
        through(4, "%to").replace("ld.", "@%p ld.").replace("st.", "@%p st.")
    );
    assert_eq!(stored(&text.replace("LANE", "setp.lt.u32 %p, %number, 1;"), 2, &given)[..4], given[..4]);
    all_in_flight(&text.replace("LANE", "setp.lt.u32 %p, %number, 2;"), 2);
}

#[test]
fn memory_of_a_copy_in_flight_must_not_be_accessed() {
    let copy = "st.shared.v4.b32 [%to], {1, 2, 3, 4}; cp.async.cg.shared.global [%to], [%from], 16; ";
    for access in [
        "ld.shared.u8 %r0, [%to];",
        "ld.shared.u16 %r0, [%to+14];",
        "ld.shared.u32 %r0, [%to+12];",
        "ld.volatile.shared.u32 %r0, [%to];",
        "st.shared.u32 [%to+4], %number;",
        "red.shared.add.u32 [%to], 1;",
        "cp.async.ca.shared.global [%to+8], [%from], 4;",
        "cp.async.ca.shared.global [%to+8], [%from], 4, 0;",
        "cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r0, [%to];",
        "bar.sync 0; ld.shared.u32 %r0, [%to];",
    ] {
        all_in_flight(&format!("{copy} {access} cp.async.wait_all;"), 32);
        // Afterwards all of them may.
        let after = format!("{copy} cp.async.wait_all; {access} cp.async.wait_all;");
        stored(&after, 32, &bytes(512));
    }
    // Other lanes may not access it either, whatever comes in between.
    let other = "@%first cp.async.cg.shared.global [%shared], [%in], 16; bar.warp.sync -1; ";
    for access in ["ld.shared.u32 %r0, [%shared]", "st.shared.u32 [%shared+8], 1"] {
        all_in_flight(&format!("{other} @%second {access}; cp.async.wait_all;"), 32);
    }
    all_in_flight(&format!("{other} @%second cp.async.wait_all; @%second ld.shared.u32 %r0, [%shared];"), 32);
    // Two lanes copy to the same bytes at the same time.
    all_in_flight("cp.async.ca.shared.global [%shared], [%from], 4; cp.async.wait_all;", 2);
    // The fault names the first byte.
    for fault in faults(&format!("{copy} ld.shared.u32 %r0, [%to+8]; cp.async.wait_all;"), 1) {
        let FaultKind::InFlight(access) = &*fault.kind else { panic!("{fault}") };
        let Access { buffer: Some(buffer), offset: 8, bytes: 4, len: SHARED, .. } = access else {
            panic!("{fault}")
        };
        assert_eq!(buffer, "bytes");
        assert!(fault.to_string().contains("in flight"), "{fault}");
    }
}

#[test]
fn other_threads_need_a_barrier_after_the_wait() {
    let given = bytes(512);
    let copy = "@%first cp.async.cg.shared.global [%shared], [%in], 16; BEFORE cp.async.wait_all; AFTER ";
    let text = |before: &str, after: &str| {
        format!("{} {}", copy.replace("BEFORE", before).replace("AFTER", after), through(16, "%shared"))
    };
    let first = given[..16].repeat(32);
    assert_eq!(stored(&text("", "bar.warp.sync -1;"), 32, &given), first);
    assert_eq!(stored(&text("", "mov.b32 %r0, -1; bar.warp.sync %r0;"), 32, &given), first);
    assert_eq!(stored(&text("", "bar.sync 0;"), 64, &given), given[..16].repeat(64));
    // All lanes of a partial warp.
    assert_eq!(stored(&text("", "bar.warp.sync 7;"), 3, &given), given[..16].repeat(3));
    let early = [
        ("", ""),
        ("bar.warp.sync -1;", ""),
        ("bar.sync 0;", ""),
        ("", "shfl.sync.idx.b32 %r0, %number, 0, 31, -1;"),
    ];
    for (before, after) in early {
        // Which of the two comes first depends on the schedule, unless something makes the lanes
        // converge.
        for fault in faults(&text(before, after), 32) {
            let expected = matches!(&*fault.kind, FaultKind::Race { .. } | FaultKind::InFlight(_));
            assert!(expected, "{fault}");
        }
    }
    let fault = under(Schedule::LowestFirst, &text("bar.warp.sync -1;", ""), 32, &given).unwrap_err();
    let FaultKind::Race { thread: 0, instruction, .. } = &*fault.kind else { panic!("{fault}") };
    assert_eq!(instruction, "cp.async.wait_all");
    // A warp's barrier does not order another warp.
    let text = text("", "bar.warp.sync -1; setp.ge.u32 %p, %number, 32; @!%p exit;");
    for fault in faults(&text, 64) {
        let early = matches!(
            &*fault.kind,
            FaultKind::Race { .. } | FaultKind::InFlight(_) | FaultKind::Uninitialised(_)
        );
        assert!(early, "{fault}");
    }
}

#[test]
fn copies_count_as_writes_from_their_start() {
    let text =
        "@%first st.shared.u32 [%shared], 5; bar.warp.sync -1; @%first ld.shared.u32 %r0, [%shared]; SYNC
        @%second cp.async.ca.shared.global [%shared], [%in], 4; bar.warp.sync -1; cp.async.wait_all;";
    stored(&text.replace("SYNC", "bar.warp.sync -1;"), 32, &bytes(512));
    all_race(&text.replace("SYNC", ""), 32);
}

#[test]
fn sources_must_not_change_during_a_copy() {
    let text = "@%first cp.async.ca.shared.global [%shared], [%in], 4; BEFORE
        @%second st.global.b32 [%in], %number; AFTER @%first cp.async.wait_all; ";
    let use_it = format!("@%first {}", through(4, "%shared").replace("st.", "@%first st."));
    let text = |before: &str, after: &str| text.replace("BEFORE", before).replace("AFTER", after) + &use_it;
    let sync = "bar.warp.sync -1;";
    all_race(&text("", ""), 32);
    all_race(&text(sync, ""), 32);
    all_race(&text("", sync), 32);
    // Between barriers the write races with nothing. The copy reads before or after it.
    let given = bytes(512);
    let copied = |schedule| {
        let found = under(schedule, &text(sync, sync), 32, &given).unwrap();
        u32::from_le_bytes(found[..4].try_into().unwrap())
    };
    let (old, new) = (u32::from_le_bytes(given[..4].try_into().unwrap()), 1);
    assert_eq!([Schedule::LowestFirst, Schedule::HighestFirst].map(copied), [old, new]);
    let by_chance: Vec<u32> = (0..20).map(Schedule::Random).map(copied).collect();
    assert!(by_chance.contains(&old) && by_chance.contains(&new), "{by_chance:?}");
    // The copy is complete after the wait.
    let after =
        "@%first cp.async.ca.shared.global [%shared], [%in], 4; @%first cp.async.wait_all; bar.warp.sync -1;
        @%second st.global.b32 [%in], %number;";
    stored(after, 32, &given);
    all_race(&after.replace(sync, ""), 32);
}

#[test]
fn copies_must_be_aligned_to_their_size() {
    for size in [4, 8, 16] {
        for by in [1, 2, size / 2] {
            for (to, from, space) in [(by, 0, Space::Shared), (0, by, Space::Global)] {
                for read in [0, 1, size] {
                    let text = format!(
                        "cp.async.ca.shared.global [%to+{to}], [%from+{from}], {size}, {read}; cp.async.wait_all;"
                    );
                    for fault in faults(&text, 1) {
                        let FaultKind::Misaligned(access) = &*fault.kind else { panic!("{text}: {fault}") };
                        let found = (access.space, access.bytes, access.offset);
                        assert_eq!(found, (space, size, by as i64), "{fault}");
                    }
                }
            }
        }
    }
}

#[test]
fn copies_read_no_more_than_they_copy() {
    for (size, read) in [(4, "5"), (8, "9"), (16, "17"), (16, "-1"), (4, "16")] {
        let text = format!(
            "mov.b32 %r0, {read}; cp.async.ca.shared.global [%to], [%from], {size}, %r0; cp.async.wait_all;"
        );
        for fault in faults(&text, 1) {
            let FaultKind::CopySize { read: found, bytes } = *fault.kind else { panic!("{fault}") };
            assert_eq!((found, bytes), (read.parse::<i64>().unwrap() as u32 as usize, size));
        }
    }
}

#[test]
fn only_the_bytes_that_are_read_must_exist() {
    let copy = |from: &str, size: usize, read: usize| {
        format!(
            "cp.async.ca.shared.global [%shared], [{from}], {size}, {read}; cp.async.wait_all; {}",
            through(size, "%shared")
        )
    };
    // The buffer ends `left` bytes after a multiple of 16.
    for left in 1..16 {
        let given = bytes(32 + left);
        for read in 0..=16 {
            let text = copy("%in+32", 16, read);
            if read <= left {
                let expected: Vec<u8> = (0..16).map(|i| if i < read { given[32 + i] } else { 0 }).collect();
                assert_eq!(stored(&text, 1, &given), expected, "{text}");
                continue;
            }
            for schedule in SCHEDULES {
                let fault = under(schedule, &text, 1, &given).unwrap_err();
                let FaultKind::OutOfBounds(access) = &*fault.kind else { panic!("{fault}") };
                assert_eq!((access.space, access.offset, access.bytes), (Space::Global, 32, read));
            }
        }
    }
    // A copy that reads nothing may have any source address.
    assert_eq!(stored(&format!("mov.b64 %l0, 0; {}", copy("%l0", 16, 0)), 1, &[1]), [0; 16]);
    // The whole destination must exist.
    let text = format!("cp.async.cg.shared.global [%shared+{SHARED}], [%in], 16, 0; cp.async.wait_all;");
    for fault in faults(&text, 1) {
        let FaultKind::OutOfBounds(access) = &*fault.kind else { panic!("{fault}") };
        assert_eq!((access.space, access.offset, access.bytes), (Space::Shared, SHARED as i64, 16));
    }
}

#[test]
fn exiting_with_a_copy_in_flight_is_a_fault() {
    let copy = "@%second cp.async.ca.shared.global [%to], [%from], 8, READ;";
    for read in ["8", "3", "0"] {
        let copy = copy.replace("READ", read);
        for wait in [
            "",
            "cp.async.wait_group 0;",
            "cp.async.commit_group; cp.async.wait_group 1;",
            "@%first cp.async.wait_all;",
            "@%second exit; cp.async.wait_all;",
        ] {
            for fault in faults(&format!("{copy} {wait}"), 32) {
                let FaultKind::NeverAwaited(access) = &*fault.kind else { panic!("{fault}") };
                assert_eq!((access.space, access.offset, access.bytes), (Space::Shared, 16, 8));
                assert_eq!((fault.thread, fault.instruction.as_str()), (1, copy.trim_end_matches(';')));
            }
        }
        for wait in [
            "cp.async.wait_all;",
            "cp.async.commit_group; cp.async.wait_group 0;",
            "@%first exit; cp.async.wait_all;",
        ] {
            stored(&format!("{copy} {wait}"), 32, &bytes(512));
        }
    }
}

/// A ring of slots.
///
/// In each step a warp issues a copy of 512 bytes for two steps later and waits for this step's
/// copy. Every lane then sums its neighbour's bytes.
fn ring(slots: usize, pending: usize, sync: &str) -> String {
    let turn = |slot: &str| {
        format!(
            "add.s32 {slot}, {slot}, 512; setp.eq.u32 %p, {slot}, {}; @%p mov.b32 {slot}, 0;",
            slots * 512
        )
    };
    let fetch = format!(
        "setp.ge.u32 %p, %r1, STEPS; @%p bra $L; add.s32 %v0, %to, %r2; cp.async.cg.shared.global [%v0], [%from], 16;
        $L: cp.async.commit_group; add.s64 %from, %from, 512; add.s32 %r1, %r1, 1; {}",
        turn("%r2")
    );
    let neighbour = "xor.b32 %r4, %number, 1; shl.b32 %r4, %r4, 4; add.s32 %r4, %r4, %shared;";
    let step = format!(
        "{fetch} cp.async.wait_group {pending}; {sync}
        add.s32 %v0, %r4, %r3; ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%v0];
        add.s32 %r5, %r5, %v0; add.s32 %r5, %r5, %v3; {}",
        turn("%r3")
    );
    format!(
        "mov.b32 %r0, 0; mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r5, 0; {neighbour} {} {}
        $loop: {} add.s32 %r0, %r0, 1; setp.lt.u32 %p, %r0, STEPS; @%p bra $loop;
        cp.async.wait_all; st.global.b32 [%place], %r5;",
        fetch.replace("$L", "$a"),
        fetch.replace("$L", "$b"),
        step.replace("$L", "$c")
    )
    .replace("STEPS", "11")
}

#[test]
fn rings_of_slots() {
    let given = bytes(11 * 512);
    let word = |at: usize| u32::from_le_bytes(given[at..at + 4].try_into().unwrap());
    let sums: Vec<u32> = (0..32)
        .map(|lane: usize| (0..11).map(move |step| step * 512 + (lane ^ 1) * 16))
        .map(|places| places.fold(0, |sum: u32, at| sum.wrapping_add(word(at)).wrapping_add(word(at + 12))))
        .collect();
    let found = stored(&ring(4, 2, "bar.warp.sync -1;"), 32, &given);
    let found: Vec<u32> =
        found.chunks(16).map(|word| u32::from_le_bytes(word[..4].try_into().unwrap())).collect();
    assert_eq!(found, sums);
    let wrong = |text: &str, expected: fn(&FaultKind) -> bool| {
        for schedule in SCHEDULES {
            let fault = under(schedule, text, 32, &given).unwrap_err();
            assert!(expected(&fault.kind), "{fault}");
        }
    };
    // The refilled slot is the one that the neighbour read in the previous step.
    wrong(&ring(3, 2, "bar.warp.sync -1;"), |kind| matches!(kind, FaultKind::Race { .. }));
    // The refilled slot is still being filled.
    wrong(&ring(2, 2, "bar.warp.sync -1;"), |kind| {
        matches!(kind, FaultKind::InFlight(_) | FaultKind::Race { .. })
    });
    wrong(&ring(4, 3, "bar.warp.sync -1;"), |kind| matches!(kind, FaultKind::InFlight(_)));
    wrong(&ring(4, 2, ""), |kind| matches!(kind, FaultKind::InFlight(_) | FaultKind::Race { .. }));
}

#[test]
fn warp_barriers_wait_for_every_lane_of_their_mask() {
    let missing = "setp.eq.u32 %p, %number, 5; @%p bra $other; bar.warp.sync MASK; bra $end;
        $other: bar.sync 0; $end: bar.sync 0;";
    for mask in ["-1", "0xFFFFFFFF", "0x20"] {
        for fault in faults(&missing.replace("MASK", mask), 32) {
            match &*fault.kind {
                FaultKind::Deadlock(message) if mask != "0x20" => {
                    assert!(message.contains("bar.warp.sync"), "{fault}")
                }
                FaultKind::NotAMember { mask: 0x20 } if mask == "0x20" => {}
                _ => panic!("{fault}"),
            }
        }
    }
}

#[test]
fn shared_addresses_have_32_bits_in_every_space() {
    let text = "cvt.u64.u32 %l0, %to; cvta.shared.u64 %l1, %l0; cvta.to.shared.u64 %l2, %l1; cvt.u32.u64 %r0, %l2;
        st.shared.u32 [%to], %number; setp.ne.u64 %p, %l0, %l1; @!%p trap;
        ld.shared.u32 %r1, [%r0]; st.global.b32 [%place], %r1; ld.shared.u32 %r1, [%l2]; st.global.b32 [%place+4], %r1;
        sub.s32 %r2, %to, %r0; st.global.b32 [%place+8], %r2;
        ld.shared.u8 %r1, [%r0]; ld.shared.u16 %r2, [%r0]; mad.lo.u32 %r1, %r1, 1000, %r2;
        st.global.b32 [%place+12], %r1;";
    let expected: Vec<u8> = (0..32u32).flat_map(|i| [i, i, 0, i * 1001]).flat_map(u32::to_le_bytes).collect();
    assert_eq!(stored(text, 32, &[0]), expected);
}
