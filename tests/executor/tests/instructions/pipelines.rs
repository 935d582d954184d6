//! Tests a complete pipeline: a producer warp, a consumer warp group, and mbarriers between them.
//!
//! The producer copies stages of B, and the consumers multiply. Each side signals full and empty
//! stages by mbarriers.

use half::bf16;
use microscale_executor::{Approximation, FaultKind};

use super::kernel::{Kernel, SCHEDULES, wait};
use super::matrix::nearest;

/// Number of steps of 16 products, number of stages, and bytes per stage (eight columns).
const STEPS: usize = 7;
const STAGES: usize = 3;
const BYTES: usize = 256;

/// Returns A of 64 rows and B of eight columns. Their small integers make every sum exact.
fn matrices() -> (Vec<[i8; 16 * STEPS]>, Vec<[i8; 16 * STEPS]>) {
    let mut rng = fastrand::Rng::with_seed(4);
    let mut rows = |count: usize| (0..count).map(|_| std::array::from_fn(|_| rng.i8(-8..9))).collect();
    (rows(64), rows(8))
}

/// Returns B by steps, each two matrices of eight columns by eight numbers, then the registers of
/// A.
///
/// A's registers are ordered by steps and threads.
fn given(a: &[[i8; 16 * STEPS]], b: &[[i8; 16 * STEPS]]) -> Vec<u8> {
    let code = |x: i8| bf16::from_f32(x.into()).to_le_bytes();
    let mut bytes = Vec::new();
    for at in 0..STEPS * 2 {
        bytes.extend(b.iter().flat_map(|column| &column[at * 8..][..8]).flat_map(|&x| code(x)));
    }
    for step in 0..STEPS {
        for thread in 0..128 {
            for i in 0..8 {
                let row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
                bytes.extend(code(a[row][step * 16 + thread % 4 * 2 + i % 2 + i / 4 * 8]));
            }
        }
    }
    bytes
}

/// Returns the kernel: 128 threads multiply, and thread 128 copies.
///
/// The registers of A alternate because the previous product still uses its own.
fn pipeline() -> String {
    let stage = |step: usize| step % STAGES * 8;
    let parity = |step: usize| (step / STAGES % 2).to_string();
    let init = |i: usize| {
        let at = i * 8;
        format!(
            "@%first mbarrier.init.shared.b64 [%full+{at}], 1; @%first mbarrier.init.shared.b64 [%empty+{at}], 1;\n"
        )
    };
    let copy = |step: usize| {
        let (at, free) = (stage(step), (step / STAGES + 1) % 2);
        format!(
            "{} mbarrier.arrive.expect_tx.shared.b64 _, [%full+{at}], {BYTES};
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%shared+{}], [%in+{}], {BYTES}, [%full+{at}];\n",
            wait(&format!("%empty+{at}"), &free.to_string(), &format!("empty{step}")),
            step % STAGES * BYTES,
            step * BYTES
        )
    };
    let multiply = |step: usize| {
        let [r, s, t, u] = std::array::from_fn(|i| format!("%r{}", 8 + step % 2 * 4 + i));
        let release = match step.checked_sub(1) {
            Some(before) => format!("@%first mbarrier.arrive.shared.b64 _, [%empty+{}];", stage(before)),
            None => String::new(),
        };
        format!(
            "ld.global.v4.b32 {{{r}, {s}, {t}, {u}}}, [%l1+{}]; setp.ne.b32 %p, {step}, 0; {}
            add.s64 %l3, %b, {}; wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%d0, %d1, %d2, %d3}}, {{{r}, {s}, {t}, {u}}}, %l3, %p, 1, 1, 0;
            wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; {release}\n",
            STEPS * BYTES + step * 2048,
            wait(&format!("%full+{}", stage(step)), &parity(step), &format!("full{step}")),
            (step % STAGES * BYTES) >> 4,
        )
    };
    format!(
        "{} @%first fence.mbarrier_init.release.cluster; bar.sync 0;
        setp.lt.u32 %p, %number, 128; @%p bra $multiply;
        setmaxnreg.dec.sync.aligned.u32 24; setp.ne.u32 %p, %number, 128; @%p bra $end;
        {} bra.uni $end;
        $multiply: mul.wide.u32 %l0, %number, 16; add.s64 %l1, %in, %l0; add.s64 %l2, %out, %l0;
        cvt.u64.u32 %b, %shared; shr.u64 %b, %b, 4; or.b64 %b, %b, {};
        {}
        wgmma.wait_group.sync.aligned 0; st.global.v4.f32 [%l2], {{%d0, %d1, %d2, %d3}}; $end:",
        (0..STAGES).map(init).collect::<String>(),
        (0..STEPS).map(copy).collect::<String>(),
        16u64 << 32 | 8 << 16,
        (0..STEPS).map(multiply).collect::<String>(),
    )
}

fn kernel<'a>(text: &'a str, given: &'a [u8]) -> Kernel<'a> {
    Kernel {
        text,
        blocks: 2,
        threads: 160,
        shared: STAGES * BYTES,
        given,
        output: 2048,
        races: true,
        cluster: 1,
    }
}

#[test]
fn stages_are_multiplied_and_freed() {
    let (a, b) = matrices();
    let (text, given) = (pipeline(), given(&a, &b));
    // Both blocks would write the same output.
    let text = text.replace("st.global.v4.f32", "setp.eq.u32 %p, %block, 0; @%p st.global.v4.f32");
    let approximations = [Approximation::Nearest, Approximation::Low, Approximation::High];
    for (schedule, approximation) in SCHEDULES.into_iter().zip(approximations.into_iter().cycle()) {
        let found = kernel(&text, &given).with(schedule, approximation);
        let found = found.unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
        // The race detector does not change results.
        let undetected = Kernel { races: false, ..kernel(&text, &given) }.under(schedule);
        assert_eq!(undetected.unwrap(), found);
        for (at, found) in found.as_chunks().0.iter().enumerate() {
            let (thread, i) = (at / 4, at % 4);
            let (row, column) = (thread / 32 * 16 + thread % 32 / 4 + i / 2 * 8, thread % 4 * 2 + i % 2);
            let factors = |step: usize| {
                std::array::from_fn(|k| {
                    (f64::from(a[row][step * 16 + k]), f64::from(b[column][step * 16 + k]))
                })
            };
            let sum = (0..STEPS).fold(0.0, |sum, step| nearest(factors(step), sum));
            assert_eq!(f32::from_le_bytes(*found), sum);
        }
    }
}

#[test]
fn broken_pipelines_are_detected() {
    let (a, b) = matrices();
    let given = given(&a, &b);
    let text = pipeline();
    let wrong = |from: &str, to: &str, expected: fn(&FaultKind) -> bool| {
        assert!(text.contains(from), "{from}");
        let text = text.replace(from, to);
        Kernel { blocks: 1, ..kernel(&text, &given) }.faults(expected);
    };
    let early = |kind: &FaultKind| matches!(kind, FaultKind::Race { .. } | FaultKind::InFlight(_));
    // A stage is released before the product that reads it has ended.
    let (await_one, free) =
        ("wgmma.wait_group.sync.aligned 1;", "@%first mbarrier.arrive.shared.b64 _, [%empty+0];");
    wrong(&format!("{await_one} {free}"), &format!("{free} {await_one}"), early);
    let pending = |kind: &FaultKind| matches!(kind, FaultKind::PendingRegister(_));
    wrong(await_one, "", pending);
    wrong(await_one, "wgmma.wait_group.sync.aligned 2;", pending);
    // A register of the previous product is overwritten.
    wrong("{%r12, %r13, %r14, %r15}", "{%r8, %r9, %r10, %r11}", pending);
    wrong("wgmma.fence.sync.aligned;", "", |kind| matches!(kind, FaultKind::UnfencedRegister(_)));
    wrong("wgmma.wait_group.sync.aligned 0;", "", pending);
    wrong(&wait("%full+8", "0", "full1"), "", |kind| {
        matches!(kind, FaultKind::Race { .. } | FaultKind::InFlight(_) | FaultKind::Uninitialised(_))
    });
    wrong(&wait("%empty+8", "0", "empty4"), "", |kind| {
        !matches!(kind, FaultKind::Hanging | FaultKind::OutOfBounds(_))
    });
    // A wait for a stage that is never released.
    wrong("@%first mbarrier.arrive.shared.b64 _, [%empty+0];", "", |kind| {
        matches!(kind, FaultKind::Deadlock(_))
    });
    // Only one warp waits on behalf of its warp group.
    let alone =
        format!("setp.ge.u32 %q, %number, 32; @%q bra $over; {} $over:", wait("%full+8", "0", "full1"));
    wrong(&wait("%full+8", "0", "full1"), &alone, |kind| {
        matches!(kind, FaultKind::Race { .. } | FaultKind::InFlight(_) | FaultKind::Uninitialised(_))
    });
}
