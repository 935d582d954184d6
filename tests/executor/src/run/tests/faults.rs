//! Provokes every kind of fault and error.

use super::{Run, fault, module, refused};
use crate::{Access, Error, FaultKind, Launch, Memory, Space};

#[test]
fn accesses_out_of_bounds_name_the_buffer_and_the_thread() {
    let found = fault("st.global.b32 [%out+4], %lane;", 32);
    let FaultKind::OutOfBounds(access) = &*found.kind else { panic!("{found}") };
    assert_eq!((found.thread, found.block, found.line, &*found.kernel), (31, 0, 12, "k"));
    assert_eq!(found.instruction, "st.global.b32 [%out+4], %lane");
    let Access { space: Space::Global, bytes: 4, buffer: Some(name), offset: 128, len: 128, .. } = access
    else {
        panic!("{access:?}")
    };
    assert_eq!(name, "out");
    let found = fault("ld.global.b32 %r1, [%in+-4];", 1);
    assert!(matches!(&*found.kind, FaultKind::OutOfBounds(access) if access.offset == -4), "{found}");
    let found = fault("mov.b64 %d1, 16; ld.global.b32 %r1, [%d1];", 1);
    assert!(matches!(&*found.kind, FaultKind::OutOfBounds(access) if access.buffer.is_none()), "{found}");
    let found = fault("st.shared.b32 [%lane], %lane;", 1);
    assert!(matches!(&*found.kind, FaultKind::OutOfBounds(access) if access.space == Space::Shared));
    // Only the last bytes are out of bounds.
    let found = fault("ld.global.v2.b32 {%r1, %r2}, [%in+124];", 1);
    assert!(matches!(&*found.kind, FaultKind::OutOfBounds(_)), "{found}");
}

#[test]
fn accesses_must_be_aligned_to_their_size() {
    let found = fault("ld.global.v2.b32 {%r1, %r2}, [%in+4];", 1);
    assert!(matches!(&*found.kind, FaultKind::Misaligned(access) if access.offset == 4 && access.bytes == 8));
    let found = fault("ld.global.b16 %h1, [%in+1];", 1);
    assert!(matches!(&*found.kind, FaultKind::Misaligned(_)), "{found}");
    let found = fault("mov.u64 %d1, 2; red.shared.add.u32 [%d1], 1;", 1);
    assert!(matches!(&*found.kind, FaultKind::OutOfBounds(_)), "{found}");
    let mut memory = Memory::new();
    for alignment in [1, 2, 4, 256, 1024] {
        let address = memory.allocate_aligned("b", 10, alignment).address();
        assert_eq!(address % (2 * alignment), alignment);
    }
}

#[test]
fn reads_of_unwritten_memory_are_faults() {
    let found = fault("st.global.b8 [%out], %lane; ld.global.b32 %r1, [%out];", 3);
    assert!(matches!(&*found.kind, FaultKind::Uninitialised(access) if access.offset % 4 == 1), "{found}");
    let found = fault("red.global.add.u32 [%out], 1;", 1);
    assert!(matches!(&*found.kind, FaultKind::Uninitialised(_)), "{found}");

    let run = Run::new("setp.eq.b32 %p1, %lane, 1; @%p1 st.global.b32 [%out], %lane;", &Launch::new(1, 3));
    run.result.unwrap();
    let error = run.memory.bytes(run.out).unwrap_err();
    assert_eq!(error, Error::NeverWritten { buffer: "out".into(), offset: 0, bytes: 8 });
    assert_eq!(run.memory.bytes_or(run.out, 9), [9, 9, 9, 9, 1, 0, 0, 0, 9, 9, 9, 9]);
    assert_eq!(run.memory.written(run.out).iter().filter(|&&written| written).count(), 4);
}

#[test]
fn constant_loads_of_written_memory_are_faults() {
    let body = "st.global.b32 [%out], %lane; ld.global.nc.b32 %r1, [%out];";
    assert!(matches!(&*fault(body, 1).kind, FaultKind::NotConstant(_)));
    let body = "ld.global.nc.b32 %r1, [%in]; st.global.b32 [%in], %lane;";
    assert!(matches!(&*fault(body, 1).kind, FaultKind::NotConstant(_)));
    // Allowed in another launch.
    let module = module("", "ld.global.nc.b32 %r1, [%in]; add.s32 %r1, %r1, 1; st.global.b32 [%out], %r1;");
    let kernel = module.kernel("k").unwrap();
    let mut memory = Memory::new();
    let (a, b) = (memory.allocate("a", 4), memory.allocate_from("b", &[1, 0, 0, 0]));
    kernel.run(&mut memory, &Launch::new(1, 1), &[a.into(), b.into()]).unwrap();
    kernel.run(&mut memory, &Launch::new(1, 1), &[b.into(), a.into()]).unwrap();
    assert_eq!(memory.bytes(b).unwrap(), [3, 0, 0, 0]);
}

#[test]
fn reads_of_unwritten_registers_are_faults() {
    let found = fault("setp.lt.u32 %p1, %lane, 7; @%p1 mov.u32 %r1, 1; add.s32 %r2, %r1, 1;", 32);
    assert!(matches!(&*found.kind, FaultKind::UnwrittenRegister(name) if name == "%r1"), "{found}");
    assert_eq!(found.thread, 7);
    let found = fault("@%p1 bra $end; $end:", 1);
    assert!(matches!(&*found.kind, FaultKind::UnwrittenRegister(name) if name == "%p1"), "{found}");
    let found = fault("addc.u32 %r1, %lane, 0;", 1);
    assert!(matches!(&*found.kind, FaultKind::UnwrittenRegister(name) if name == "CC.CF"), "{found}");
    // Reused registers of a scope forget the values of the previous scope.
    let error = refused("{ .reg .b32 x; mov.b32 x, 1; mov.b32 %r1, x; } { .reg .b32 x; mov.b32 %r1, x; }");
    assert!(
        matches!(&error, Error::Invalid { message, .. } if message.contains("before it is written")),
        "{error}"
    );
}

#[test]
fn traps_and_endless_loops_are_faults() {
    assert!(matches!(*fault("setp.eq.b32 %p1, %lane, 5; @%p1 trap;", 8).kind, FaultKind::Trap));
    let found = Run::new("$loop: bra $loop;", &Launch::new(1, 1).limit(1000)).fault();
    assert!(matches!(*found.kind, FaultKind::Hanging), "{found}");
}

#[test]
fn unknown_instructions_are_unsupported() {
    for body in [
        "frob.b32 %r1, %r2;",
        "div.f64 %d1, %d1, %d2;",
        "div.rz.f64 %d1, %d1, %d2;",
        "cvt.f32.f64 %r1, %d2;",
        "cvt.rn.f64.f32 %d1, %r2;",
        "add.f64 %d1, %d1, %d2;",
        "add.f32 %r1, %r1, %r2;",
        "mul.f16x2 %r1, %r1, %r2;",
        "add.sat.s32 %r1, %r1, %r2;",
        "mul.rn.sat.f32 %r1, %r1, %r2;",
        "cvt.rn.e2m1x2.f32 %h1, %r1, %r2;",
        "cvt.rna.tf32.f32 %r1, %r2;",
        "ld.volatile.global.b32 %r1, [%in];",
        "st.shared::cluster.b32 [%r2], %r1;",
        "barrier.cta.sync.aligned.all 0;",
        "barrier.cta.red.popc.aligned.u32 %r1, 0, %p1;",
        "ld.acquire.cta.global.b32 %r1, [%in];",
        "ld.acquire.gpu.shared.b32 %r1, [%r2];",
        "ld.release.gpu.global.b32 %r1, [%in];",
        "st.acquire.gpu.global.b32 [%in], %r1;",
        "ld.b32 %r1, [%in];",
        "ld.local.b32 %r1, [%in];",
        "ld.global.L3::b.b32 %r1, [%in];",
        "red.global.add.f32 [%in], %r1;",
        "atom.acquire.gpu.global.add.u32 %r1, [%in], 1;",
        "shfl.bfly.b32 %r1, %lane, 1, 31;",
        "bar.sync 16;",
        "bar.arrive 0, 64;",
        "call helper, (%r1);",
        "setp.lt.b32 %p1, %lane, 3;",
        "setp.num.u32 %p1, %lane, 3;",
        "div.approx.f32 %r1, %r1, %r2;",
        "div.s32 %r1, %r1, %r2;",
        "rem.u16 %h1, %h1, %h2;",
        "activemask.b32 %r1;",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1, %r2};",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1}, {%r1, %r2, %r3, %r4};",
        "cp.async.ca.shared.global [%r1], [%d1], 16, 16, %d2;",
        "cp.async.ca.shared.global [%r1], [%d1], 16, %p1;",
        "cp.async.ca.shared.global.L2::cache_hint [%r1], [%d1], 16, %d2;",
        "cp.async.ca.shared::cluster.global [%r1], [%d1], 16;",
        "cp.async.bulk.wait_group 0;",
        "cp.async.mbarrier.arrive.noinc.b64 [%d1];",
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 16;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%r1], [%d1], 16, [%r2], %h1, %d2;",
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2}], [%r3];",
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2, 3, 4}], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2}], [%r3];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2, 3}], [%r3], {%h1};",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2, 3, 4, 5}], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1, {1, 2}], [%r3], %h1;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::1 [%r1], [%d1, {1, 2}], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], [%d1, {1, 2}], [%r3], %d2;",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {1, 2}], [%r1];",
        "mbarrier.arrive.shared.b64 %d1, [%r1];",
        "mbarrier.arrive.noComplete.shared.b64 _, [%r1], 1;",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r2], 0;",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
        "mbarrier.test_wait.shared.b64 %p1, [%r1], %d1;",
        "fence.proxy.async;",
        "fence.proxy.async.global;",
        "fence.sc.gpu;",
        "fence.acq_rel.cta;",
        "membar.cta;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r1, %r2}, {%r3, %r4, %r5, %r6}, %d1, %p1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%r1}, {%r3, %r4, %r5, %r6}, %d1, %p1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7, %r8}, %d2, %d1, %p1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7, %r8}, {%r3, %r4, %r5, %r6}, %d1, %p1, -1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7, %r8}, {%r3, %r4, %r5, %r6}, %d1, %p1, 1, 1, 1;",
        "ldmatrix.sync.aligned.m8n8.x2.b16 {%r1, %r2}, [%r3];",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1, %r2, %r4}, [%r3];",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r1};",
        "dp4a.s32 %r1, %r2, %r3, %r4;",
        "dp2a.lo.s32.s32 %r1, %r2, %r3, %r4;",
    ] {
        let error = refused(body);
        assert!(matches!(error, Error::Unsupported { line: 12, .. }), "{error}");
    }
}

#[test]
fn invalid_ptx_is_refused() {
    for body in [
        "add.s32 %r1, %r2;",
        "add.s32 %r1, %r2, %d1;",
        "add.s32 %r1, %r2, %undeclared;",
        "add.s32 %r1, %r2, 4294967296;",
        "add.s16 %h1, %h2, 70000;",
        "mul.rn.f32 %r1, %r2, 2;",
        "add.s32 %r1, %r2, 0f3F800000;",
        "add.s32 5, %r2, %r1;",
        "add.s32 %r32, %r2, %r1;",
        "bra $nowhere;",
        "mov.b32 {%r1, %h1}, %r2;",
        "mov.b32 %r1, {%h1, %h2, %h1};",
        "ld.global.b32 %h1, [%in];",
        "ld.global.v2.b32 %r1, [%in];",
        "ld.global.b32 %r1, [%r2];",
        "ld.param.b64 %d1, [nothing];",
        "ld.param.b64 %d1, [out+8];",
        "ld.param.b32 %r1, [out+2];",
        "ld.relaxed.global.b32 %r1, [%in];",
        "@%r1 bra $x; $x:",
        "$twice: $twice:",
        "{ .reg .b32 inner; } mov.b32 inner, 1;",
        "selp.b32 %r1, 1, 2, %r3;",
        "cp.async.cg.shared.global [%r1], [%d1], 4;",
        "cp.async.cg.shared.global [%r1], [%d1], 8;",
        "cp.async.ca.shared.global [%r1], [%d1], 12;",
        "cp.async.ca.shared.global [%r1], [%d1], %r2;",
        "cp.async.ca.shared.global [%r1], [%r2], 16;",
        "cp.async.ca.shared.global %r1, [%d1], 16;",
        "cp.async.ca.shared.global [%r1], [%d1], 16, %d2;",
        "cp.async.ca.shared.global [%r1], [%d1], 16, %h1;",
        "cp.async.commit_group 0;",
        "cp.async.wait_all 0;",
        "cp.async.wait_group;",
        "cp.async.wait_group %r1;",
        "cp.async.wait_group -1;",
        "mov.b32 %r1, 0d3FF0000000000000;",
        "add.rn.f64 %d1, %d2, 1;",
        "bar.sync 0, 40;",
        "bar.sync 0, 0;",
        "bar.sync 0, 32, 32;",
        "setmaxnreg.inc.sync.aligned.u32 28;",
        "setmaxnreg.dec.sync.aligned.u32 %r1;",
        "ld.acquire.global.b32 %r1, [%in];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2, 3}], [%r3];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2}], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%r2, {1, 2}], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {1, %d2}], [%r3];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {1, 2}];",
        "ld.global.b32 %r1, [%d1, {1, 2}];",
        "mov.b32 %r1, out;",
        "cvta.param.u64 %d1, %r1;",
        "mbarrier.init.shared.b64 [%r1];",
        "mbarrier.init.shared.b64 [%r1], %d1;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r1];",
        "mbarrier.try_wait.parity.shared.b64 %r1, [%r2], 0;",
        "wgmma.fence.sync.aligned 1;",
        "wgmma.wait_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned -1;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7}, {%r3, %r4, %r5, %r6}, %d1, %p1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7, %r7}, {%r3, %r4, %r5, %r6}, %d1, %p1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7, %r3}, {%r3, %r4, %r5, %r6}, %d1, %p1, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r7, %r8}, {%r3, %r4, %r5, %r6}, %r9, %p1, 1, 1, 0;",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1, %r2}, {%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, _}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1, %r2, %r3, %r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 %r1, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1, %r2, %r3, %r4};",
    ] {
        let error = refused(body);
        assert!(matches!(error, Error::Invalid { .. }), "{body}: {error}");
    }
    for body in ["add.s32 %r1 %r2;", "mov.b32 %r1, 0f3F;", "mov.b64 %r1, 0d3FF;", "}", ".local .b8 x[4];"] {
        let text =
            format!(".version 8.0 .target sm_90 .address_size 64 .entry k() {{ .reg .b32 %r<3>; {body} }}");
        let error = crate::Module::parse(&text).and_then(|module| module.kernel("k").cloned()).unwrap_err();
        assert!(matches!(error, Error::Syntax { line: 1, .. }), "{body}: {error}");
    }
    assert!(matches!(module("", "").kernel("other"), Err(Error::NoKernel(name)) if name == "other"));
}

#[test]
fn inner_scopes_shadow_outer_ones() {
    let body = "mov.b32 %r1, 1; { .reg .b32 %r1; mov.b32 %r1, 5; { .reg .b16 %r1; mov.b16 %r1, 7; } add.s32 %r2, %r1, 0; }
        add.s32 %r2, %r2, %r1; st.global.b32 [%out], %r2;";
    assert_eq!(super::words(body, 1), [6]);
}
