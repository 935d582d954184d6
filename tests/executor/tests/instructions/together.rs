//! Tests warp-wide and block-wide instructions and control flow, and the coverage of these tests.

use std::collections::BTreeSet;

use microscale_executor::{Buffer, Launch, Memory, Module};
use microscale_kernels_abi::{Ptx, TARGETS};

use super::copies::COPIES;
use super::probe::opcodes;
use super::{convert, double, float, groups, integer, packed};

/// Runs a kernel of `warps` warps and returns its output.
///
/// `%out` holds the address of the output, `%place` the lane's position there, and `%number` its
/// number.
fn run(text: &str, out: &[u8], warps: u32) -> Vec<u8> {
    let module = format!(
        ".version 8.8 .target sm_100f .address_size 64
        .visible .entry test(.param .u64 output) {{
            .reg .b64 %out; .reg .b64 %place; .reg .b32 %number; .reg .b32 %a; .reg .b32 %b; .reg .b32 %c; .reg .pred %p; .reg .b64 %la;
            ld.param.u64 %out, [output]; mov.u32 %number, %tid.x;
            mul.wide.u32 %place, %number, 4; add.s64 %place, %out, %place;
            {text}
            ret;
        }}"
    );
    let module = Module::parse(&module).unwrap();
    let mut memory = Memory::new();
    let buffer: Buffer = memory.allocate_from("out", out);
    module.kernel("test").unwrap().run(&mut memory, &Launch::new(1, warps * 32), &[buffer.into()]).unwrap();
    memory.bytes(buffer).unwrap()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

#[test]
fn two_longs_are_stored_at_once() {
    let text = ".reg .b64 %lb; mul.wide.u32 %la, %number, 16; add.s64 %place, %out, %la; not.b64 %lb, %la;
        st.global.v2.b64 [%place], {%la, %lb};";
    let longs = |lane: u64| [16 * lane, !(16 * lane)];
    let expected: Vec<u8> = (0..32).flat_map(longs).flat_map(u64::to_le_bytes).collect();
    assert_eq!(run(text, &[0; 512], 1), expected);
}

#[test]
fn shuffles() {
    for distance in [1, 2, 4, 8, 16, 31] {
        let text = format!(
            "mul.lo.s32 %a, %number, 1000; shfl.sync.bfly.b32 %b, %a, {distance}, 31, -1; st.global.b32 [%place], %b;"
        );
        let expected: Vec<u32> = (0..64).map(|i| (i ^ distance) * 1000).collect();
        assert_eq!(words(&run(&text, &[0; 256], 2)), expected);
    }
    // Each lane names another one. Five bits of the number count, and the source is in the lane's
    // own warp.
    let text = "mul.lo.s32 %a, %number, 1000; mul.lo.s32 %c, %number, 7; shfl.sync.idx.b32 %b, %a, %c, 31, -1; st.global.b32 [%place], %b;";
    let expected: Vec<u32> = (0..64).map(|i| (i / 32 * 32 + i * 7 % 32) * 1000).collect();
    assert_eq!(words(&run(text, &[0; 256], 2)), expected);
}

/// A shift down by lanes: lanes past the end read their own value.
#[test]
fn shuffles_down() {
    for distance in [1, 2, 4, 8, 16, 31] {
        let text = format!(
            "mul.lo.s32 %a, %number, 1000; shfl.sync.down.b32 %b, %a, {distance}, 31, -1; st.global.b32 [%place], %b;"
        );
        let source = |i: u32| if i % 32 + distance < 32 { i + distance } else { i };
        let expected: Vec<u32> = (0..64).map(|i| source(i) * 1000).collect();
        assert_eq!(words(&run(&text, &[0; 256], 2)), expected);
    }
}

/// One lane's predicate is true in the first warp, all but one in the second, all in the third.
#[test]
fn votes() {
    let text = |mode: &str| {
        format!(
            "setp.eq.u32 %p, %number, 5; setp.gt.or.u32 %p, %number, 32, %p; vote.sync.{mode}.pred %p, %p, -1;
            selp.b32 %a, 1, 0, %p; st.global.b32 [%place], %a;"
        )
    };
    for (mode, expected) in [("any", [1, 1, 1]), ("all", [0, 0, 1]), ("uni", [0, 0, 1])] {
        let found = words(&run(&text(mode), &[0; 384], 3));
        assert_eq!(found, expected.map(|flag| [flag; 32]).concat(), "{mode}");
    }
}

#[test]
fn ballots() {
    let text = "and.b32 %a, %number, 3; setp.eq.b32 %p, %a, 1; vote.sync.ballot.b32 %b, %p, -1; st.global.b32 [%place], %b;";
    assert_eq!(words(&run(text, &[0; 256], 2)), [0x2222_2222; 64]);
}

#[test]
fn counters() {
    let sum = run("cvt.u64.u32 %la, %number; red.global.add.u64 [%out], %la;", &[1, 0, 0, 0, 0, 0, 0, 0], 2);
    assert_eq!(u64::from_le_bytes(sum.try_into().unwrap()), 1 + 63 * 64 / 2);
    let text = "cvt.u64.u32 %la, %number; mul.lo.s64 %la, %la, %la; red.global.max.u64 [%out], %la;";
    assert_eq!(u64::from_le_bytes(run(text, &[9; 8], 1).try_into().unwrap()), u64::from_le_bytes([9; 8]));
    assert_eq!(u64::from_le_bytes(run(text, &[0; 8], 2).try_into().unwrap()), 63 * 63);
    let text = "red.global.max.u32 [%out], %number; ld.relaxed.gpu.global.u32 %a, [%out]; setp.ge.u32 %p, %a, %number; @%p bra $ok; trap; $ok:";
    assert_eq!(words(&run(text, &[0; 4], 2)), [63]);
}

#[test]
fn branches() {
    let text = "and.b32 %a, %number, 3; mov.b32 %b, 5;
        $targets: .branchtargets $L0, $L1, $L2, $L3;
        brx.idx %a, $targets;
        $L0: mov.b32 %b, 10; bra.uni $end;
        $L1: mov.b32 %b, 11; bra $end;
        $L2: setp.gt.u32 %p, %number, 15; @%p bra $end; mov.b32 %b, 12; bra.uni $end;
        $L3: exit;
        $end: st.global.b32 [%place], %b;";
    let expected: Vec<u32> = (0..32).map(|i| [10, 11, if i > 15 { 5 } else { 12 }, 0][i % 4]).collect();
    assert_eq!(words(&run(text, &[0; 128], 1)), expected);
}

#[test]
fn loads_and_stores() {
    let bytes: Vec<u8> = (0..=255).collect();
    let text = ".reg .b64 %g; .reg .b64 %lb; .reg .b16 %h; .reg .b16 %i; .reg .b32 %d;
        cvta.to.global.u64 %g, %out; cvta.global.u64 %g, %g;
        setp.ne.b32 %p, %number, 0; @%p bra $end;
        ld.global.b8 %h, [%g+3]; st.global.b8 [%g+200], %h;
        ld.global.b16 %h, [%g+4]; st.global.b16 [%g+202], %h;
        ld.global.b64 %la, [%g+8]; st.global.b64 [%g+208], %la;
        ld.global.v2.b8 {%h, %i}, [%g+16]; st.global.b8 [%g+220], %i;
        ld.global.nc.v4.b32 {%a, %b, %c, %d}, [%g+32]; st.global.cs.v4.b32 [%g+224], {%d, %c, %b, %a};
        st.global.v2.b32 [%g+184], {%c, %a};
        ld.global.v2.b64 {%la, %lb}, [%g+16]; st.global.b64 [%g+192], %lb;
        ld.global.s32 %la, [%g+252]; st.global.b64 [%g+240], %la;
        $end:";
    let mut expected = bytes.clone();
    expected[200] = 3;
    expected[202..204].copy_from_slice(&[4, 5]);
    expected[208..216].copy_from_slice(&[8, 9, 10, 11, 12, 13, 14, 15]);
    expected[220] = 17;
    expected[224..240].copy_from_slice(&[44, 45, 46, 47, 40, 41, 42, 43, 36, 37, 38, 39, 32, 33, 34, 35]);
    expected[184..192].copy_from_slice(&[40, 41, 42, 43, 32, 33, 34, 35]);
    expected[192..200].copy_from_slice(&[24, 25, 26, 27, 28, 29, 30, 31]);
    expected[240..248].copy_from_slice(&[252, 253, 254, 255, 255, 255, 255, 255]);
    assert_eq!(run(text, &bytes, 1), expected);
}

/// Vectors and scalars through the constant cache, with all hints about caching.
const HINTED: [&str; 15] = [
    "ld.global.cg.v4.b32",
    "ld.global.nc.u8",
    "ld.global.nc.u16",
    "ld.global.nc.v2.b32",
    "ld.global.nc.v2.b64",
    "ld.global.v4.b32",
    "ld.global.nc.L1::no_allocate.v4.b32",
    "ld.global.nc.L1::no_allocate.L2::128B.v4.b32",
    "ld.global.nc.L1::no_allocate.L2::256B.v4.b32",
    "ld.global.nc.L1::evict_first.v2.b32",
    "ld.global.nc.L1::evict_last.v4.b32",
    "ld.global.nc.L2::128B.v2.b64",
    "ld.global.nc.L2::256B.b32",
    "ld.global.L1::no_allocate.v4.b32",
    "ld.global.L1::evict_last.b64",
];

#[test]
fn hints_change_nothing() {
    let given: Vec<u8> = (0..64).map(|i| 255 - i * 3).collect();
    for opcode in HINTED {
        let last: Vec<&str> = opcode.rsplit('.').take(2).collect();
        let (names, ty, bytes) = match last[..] {
            ["b32", "v4"] => ("{%a, %b, %c, %d}", "v4.b32", 16),
            ["b32", "v2"] => ("{%a, %b}", "v2.b32", 8),
            ["b64", "v2"] => ("{%la, %lb}", "v2.b64", 16),
            ["b64", _] => ("%la", "b64", 8),
            // Zero-extended.
            ["u8", _] => ("%a", "b32", 1),
            ["u16", _] => ("%a", "b32", 2),
            _ => ("%a", "b32", 4),
        };
        let text = format!(
            ".reg .b64 %lb; .reg .b32 %d; setp.ne.b32 %p, %number, 0; @%p exit;
            {opcode} {names}, [%out+16]; st.global.{ty} [%out+48], {names};"
        );
        let mut expected = given.clone();
        expected[48..52].fill(0);
        expected.copy_within(16..16 + bytes, 48);
        assert_eq!(run(&text, &given, 1), expected, "{opcode}");
    }
}

/// Mirrors the bytes of all threads through shared memory, with every kind of access.
#[test]
fn exchanges() {
    for barrier in ["bar.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned"] {
        for (ty, register, bytes, vector) in [
            ("b8", "h", 1, 1),
            ("b16", "h", 2, 1),
            ("b32", "a", 4, 1),
            ("b64", "la", 8, 1),
            ("v2.b32", "a", 4, 2),
            ("v4.b32", "a", 4, 4),
            ("v2.b64", "la", 8, 2),
        ] {
            let size = bytes * vector;
            let names: Vec<String> = (0..vector).map(|i| format!("%{register}{i}")).collect();
            let registers = if vector == 1 { names[0].clone() } else { format!("{{{}}}", names.join(", ")) };
            let text = format!(
                ".shared .align 16 .b8 buffer[1024]; .reg .b16 %h<1>; .reg .b32 %a<4>; .reg .b64 %la<2>; .reg .b64 %from; .reg .b64 %to;
                mul.wide.u32 %la, %number, {size}; mov.b64 %to, buffer; add.s64 %to, %to, %la; add.s64 %place, %out, %la;
                sub.s32 %a, 63, %number; mul.wide.u32 %la, %a, {size}; mov.b64 %from, buffer; add.s64 %from, %from, %la;
                ld.global.{ty} {registers}, [%place]; st.shared.{ty} [%to], {registers};
                {barrier} 0;
                ld.shared.{ty} {registers}, [%from]; st.global.{ty} [%place], {registers};"
            );
            let given: Vec<u8> = (0..64 * size).map(|i| (i * 37 + i / 256) as u8).collect();
            let expected: Vec<u8> = given.chunks(size).rev().flatten().copied().collect();
            assert_eq!(run(&text, &given, 2), expected, "{barrier} {ty}");
        }
    }
}

/// Instructions that other tests cover, or that every test here uses.
const ELSEWHERE: &[&str] = &[
    // In `two_longs_are_stored_at_once`.
    "st.global.v2.b64",
    // In `blocks`.
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
    // In the crate's own tests, `run::tests::clusters`. The test `executor` covers loads of four
    // words.
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
    "mbarrier.arrive.shared::cluster.b64",
    "barrier.cluster.arrive.release.aligned",
    "barrier.cluster.wait.acquire.aligned",
    "ld.shared::cluster.b32",
    "ld.shared::cluster.v4.b32",
    "mapa.shared::cluster.u32",
    // In the crate's own tests, `run::tests::tensor_copies`.
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
    "cvta.param.u64",
    // In `hints_change_nothing` and `exchanges`.
    "st.global.v4.b32",
    "shfl.sync.bfly.b32",
    "shfl.sync.idx.b32",
    "shfl.sync.down.b32",
    "vote.sync.any.pred",
    "vote.sync.all.pred",
    "vote.sync.uni.pred",
    "vote.sync.ballot.b32",
    "red.global.add.u64",
    "red.global.max.u64",
    "red.global.max.u32",
    "ld.relaxed.gpu.global.u32",
    "brx.idx",
    "bar.sync",
    "barrier.sync.aligned",
    "barrier.cta.sync.aligned",
    "ld.shared.b8",
    "ld.shared.b16",
    "ld.shared.b32",
    "ld.shared.b64",
    "ld.shared.v2.b32",
    "ld.shared.v4.b32",
    "ld.shared.v2.b64",
    "st.shared.b8",
    "st.shared.b16",
    "st.shared.b32",
    "st.shared.b64",
    "st.shared.v2.b32",
    "st.shared.v4.b32",
    "st.shared.v2.b64",
    "bra",
    "bra.uni",
    "ret",
    "exit",
    "ld.param.b32",
    "ld.param.b64",
    "ld.global.b8",
    "ld.global.b16",
    "ld.global.b32",
    "ld.global.b64",
    "ld.global.s32",
    "ld.global.v2.b8",
    "ld.global.v2.b64",
    "ld.global.nc.v4.b32",
    "st.global.b8",
    "st.global.b16",
    "st.global.b32",
    "st.global.b64",
    "st.global.v2.b32",
    "st.global.cs.v4.b32",
    "cvta.global.u64",
    "cvta.to.global.u64",
    "mov.u32",
    // `approximate_reciprocals_are_within_a_unit`, and on a GPU in `microscale-tests`.
    "rcp.approx.ftz.f32",
    "trap",
    // In `copies`.
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "bar.warp.sync",
    "cvta.shared.u64",
    "cvta.to.shared.u64",
    "ld.shared.u8",
    "ld.shared.u16",
    "ld.shared.u32",
    "st.shared.u32",
    // In `matrix`.
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    // In `groups`.
    "wgmma.fence.sync.aligned",
    "wgmma.commit_group.sync.aligned",
    "wgmma.wait_group.sync.aligned",
    "fence.proxy.async.shared::cta",
    // In `mbarriers`.
    "mbarrier.init.shared.b64",
    "mbarrier.arrive.shared.b64",
    "mbarrier.arrive.expect_tx.shared.b64",
    "mbarrier.try_wait.parity.shared.b64",
    "cp.async.mbarrier.arrive.noinc.shared.b64",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "fence.mbarrier_init.release.cluster",
    // In `blocks`.
    "bar.cta.sync",
    "barrier.cta.sync",
    "atom.global.add.u32",
    "atom.relaxed.gpu.global.add.u32",
    "atom.acq_rel.gpu.global.add.u32",
    "ld.acquire.gpu.global.u32",
    "st.release.gpu.global.u32",
    "fence.acq_rel.gpu",
    "membar.gl",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    // In `tensor`.
    "elect.sync",
    "mbarrier.init.shared::cta.b64",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
    "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
    "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32",
    "tcgen05.dealloc.cta_group::2.sync.aligned.b32",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    "tcgen05.cp.cta_group::1.32x128b.warpx4",
    "tcgen05.cp.cta_group::2.32x128b.warpx4",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
    "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32",
    "tcgen05.mma.cta_group::2.kind::mxf4.block_scale.block32",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32",
    "tcgen05.ld.sync.aligned.32x32b.x8.b32",
    "tcgen05.ld.sync.aligned.16x128b.x4.b32",
    "tcgen05.ld.sync.aligned.16x256b.x4.b32",
    "tcgen05.wait::ld.sync.aligned",
    // In `scaled`.
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
];

#[test]
fn no_instruction_of_the_library_is_untested() {
    let mut tested: BTreeSet<&str> = ELSEWHERE.iter().copied().chain(HINTED).collect();
    tested.extend(COPIES.map(|(opcode, _)| opcode));
    let products = groups::opcodes();
    tested.extend(products.iter().map(String::as_str));
    for checks in [float::checks(), double::checks(), packed::checks(), convert::checks(), integer::checks()]
    {
        tested.append(&mut opcodes(&checks));
    }
    let mut used = BTreeSet::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../host/ptx");
    for target in &TARGETS {
        let ptx = Ptx::read_all(folder.as_ref(), target).unwrap();
        let module = Module::parse(&ptx.to_string()).unwrap();
        for kernel in module.kernels() {
            used.extend(module.kernel(kernel).unwrap().instructions().into_iter().map(str::to_owned));
        }
    }
    let untested: Vec<_> = used.iter().filter(|opcode| !tested.contains(opcode.as_str())).collect();
    assert!(untested.is_empty(), "without a test: {untested:?}");
    assert!(used.len() > 100, "only {} instructions", used.len());
}
