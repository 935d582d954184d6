//! Tests matrix products of warp groups.
//!
//! Registers are placed by the ISA's formulas, matrices in shared memory by CUTLASS's layouts. Sums
//! of 16-bit factors use the oracles of `mma`. E4M3 is placed as pairs of the size of one 16-bit
//! factor.

use microscale_executor::{Approximation, FaultKind, Schedule};

use super::kernel::{Kernel, SCHEDULES, wait};
use super::matrix::{BF16, Element, F16, cut, in_order, nearest};

/// A K-major layout of B.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// The value of the swizzle field.
    mode: u64,
    /// The number of address bits that swizzling changes, in CUTLASS's `Swizzle<bits, 4, 3>`.
    bits: u32,
    /// Strides in bytes: between rows of eight numbers, to the next such matrix in K, and to the
    /// next in N.
    strides: [usize; 3],
    /// Number of consecutive products of 16.
    steps: usize,
}

const fn layout(mode: u64, bits: u32, strides: [usize; 3], steps: usize) -> Layout {
    Layout { mode, bits, strides, steps }
}

const LAYOUTS: [Layout; 6] = [
    layout(0, 0, [16, 128, 256], 1),
    layout(0, 0, [16, 4112, 128], 2),
    layout(3, 1, [32, 16, 256], 1),
    layout(2, 2, [64, 16, 512], 2),
    layout(1, 3, [128, 16, 1024], 4),
    layout(1, 3, [128, 16, 2048], 2),
];

impl Layout {
    /// Returns the offset of a number of B.
    fn place(&self, n: usize, k: usize) -> usize {
        let [row, beside, below] = self.strides;
        let plain = n % 8 * row + k / 8 * beside + n / 8 * below + k % 8 * 2;
        plain ^ (plain >> 3 & (((1 << self.bits) - 1) << 4))
    }

    /// Returns the descriptor of a step without the address of B. With swizzling, K's stride is
    /// ignored.
    fn descriptor(&self, step: usize) -> u64 {
        let [_, beside, below] = self.strides.map(|stride| stride as u64 >> 4);
        let leading = if self.bits == 0 { beside } else { 1 };
        self.mode << 62 | below << 32 | leading << 16 | (2 * beside * step as u64)
    }

    fn size(&self, columns: usize) -> usize {
        let last = (0..columns).map(|n| self.place(n, self.steps * 16 - 1)).max().unwrap();
        (last + 1024).next_multiple_of(2048)
    }
}

/// Pairs of E4M3 factors.
const E4M3: Element = Element { name: "e4m3", value: |_| unreachable!("a pair has two values") };

/// The sum that Hopper's tensor cores compute of pairs of E4M3 factors and `c`, by MMA-Sim's rule:
/// products and `c` are truncated to 13 fraction bits of the largest exponent, and so is their sum.
fn hopper(a: &[u16], b: &[u16], c: f32) -> f32 {
    let factors = |pairs: &[u16]| pairs.iter().flat_map(|pair| pair.to_le_bytes()).collect::<Vec<u8>>();
    // The number and the exponent of a code; zeros have an exponent below all others.
    let number = |code: u8| {
        let (field, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
        let (significand, exponent) = if field == 0 { (fraction, -6) } else { (1.0 + fraction, field - 7) };
        let value = significand * 2f64.powi(exponent) * if code & 0x80 == 0 { 1.0 } else { -1.0 };
        (value, if value == 0.0 { -126 } else { exponent })
    };
    let least = |x: f64| if x == 0.0 { -126 } else { (x.abs().log2().floor() as i32).max(-126) };
    let mut terms = vec![(f64::from(c), least(c.into()))];
    for (a, b) in factors(a).into_iter().zip(factors(b)) {
        let (a, b) = (number(a), number(b));
        terms.push((a.0 * b.0, a.1 + b.1));
    }
    let largest = terms.iter().map(|(_, exponent)| *exponent).max().unwrap();
    let truncated = |x: f64, exponent: i32| {
        let unit = 2f64.powi(exponent - 13);
        (x / unit).trunc() * unit
    };
    let sum: f64 = terms.iter().map(|(value, _)| truncated(*value, largest)).sum();
    truncated(sum, least(sum)) as f32 + 0.0
}

/// A product of 64 rows.
struct Product {
    columns: usize,
    layout: Layout,
    element: Element,
    a: Vec<Vec<u16>>,
    b: Vec<Vec<u16>>,
    c: Vec<Vec<f32>>,
    /// Whether the first step adds to C.
    adds: bool,
    /// Whether A is in shared memory, after B.
    shared_a: bool,
}

impl Product {
    fn random(columns: usize, layout: Layout, which: usize, adds: bool, seed: u64) -> Self {
        let element = [F16, BF16, E4M3][which];
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut codes = |rows: usize| -> Vec<Vec<u16>> {
            let mut code = || {
                if element.name == "e4m3" {
                    // Neither NaN nor numbers from 2 on.
                    return rng.u16(..) & 0xBFBF;
                }
                let (sign, mantissa) = (rng.u16(..2) << 15, rng.u16(..128));
                if element.name == "f16" {
                    sign | (rng.u16(..6) + 12) << 10 | mantissa << 3
                } else {
                    sign | (rng.u16(..6) + 124) << 7 | mantissa
                }
            };
            (0..rows).map(|_| (0..layout.steps * 16).map(|_| code()).collect()).collect()
        };
        let (a, b) = (codes(64), codes(columns));
        let c = (0..64).map(|_| (0..columns).map(|_| (rng.f32() - 0.5) * 8.0).collect()).collect();
        Self { columns, layout, element, a, b, c, adds, shared_a: false }
    }

    /// Returns the bytes of shared memory: B, and A if it is there.
    fn shared(&self) -> usize {
        self.layout.size(self.columns) + if self.shared_a { self.layout.size(64) } else { 0 }
    }

    /// Returns shared memory, then the registers of A by steps and of C, by threads.
    fn given(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.shared()];
        let behind = self.layout.size(self.columns);
        let matrices = [(0, &self.b), (behind, &self.a)];
        for (at, matrix) in &matrices[..1 + usize::from(self.shared_a)] {
            for (n, line) in matrix.iter().enumerate() {
                for (k, code) in line.iter().enumerate() {
                    bytes[at + self.layout.place(n, k)..][..2].copy_from_slice(&code.to_le_bytes());
                }
            }
        }
        for step in 0..self.layout.steps {
            for thread in 0..128 {
                let (warp, group, place) = (thread / 32, thread % 32 / 4, thread % 4);
                for i in 0..8 {
                    let row = warp * 16 + group + if i / 2 % 2 == 1 { 8 } else { 0 };
                    let k = place * 2 + i % 2 + if i >= 4 { 8 } else { 0 };
                    bytes.extend(self.a[row][step * 16 + k].to_le_bytes());
                }
            }
        }
        for thread in 0..128 {
            for i in 0..self.columns / 2 {
                let (row, column) = place_of(thread, i);
                bytes.extend(self.c[row][column].to_le_bytes());
            }
        }
        bytes
    }

    /// Returns the text of all steps in order.
    fn text(&self) -> String {
        let (size, steps, count) = (self.shared(), self.layout.steps, self.columns / 2);
        let d: Vec<String> = (0..count).map(|i| format!("%d{i}")).collect();
        let load = |i: usize| format!("ld.global.f32 %d{i}, [%l2+{}]; ", i * 4);
        let store = |i: usize| format!("st.global.f32 [%l3+{}], %d{i}; ", i * 4);
        let step = |step: usize| {
            let a = (0..4).map(|i| format!("%r{}", 8 + step * 4 + i)).collect::<Vec<_>>().join(", ");
            let of_a = self.layout.descriptor(step) + self.layout.size(self.columns) as u64 / 16;
            let (declared, a) = match self.shared_a {
                true => (format!(".reg .b64 %a{step}; add.s64 %a{step}, %b, {of_a}; "), format!("%a{step}")),
                false => (String::new(), format!("{{{a}}}")),
            };
            format!(
                "{declared}add.s64 %l{}, %b, {}; setp.ne.b32 %p, {}, 0;
                {} {{{}}}, {a}, %l{}, %p, 1, 1{transposed};\n",
                4 + step,
                self.layout.descriptor(step),
                u32::from(self.adds || step > 0),
                opcode(self.element, self.columns),
                d.join(", "),
                4 + step,
                transposed = if self.element.name == "e4m3" { "" } else { ", 0" },
            )
        };
        let operands = |step: usize| {
            format!(
                "ld.global.v4.b32 {{%r{}, %r{}, %r{}, %r{}}}, [%l1+{}]; ",
                8 + step * 4,
                9 + step * 4,
                10 + step * 4,
                11 + step * 4,
                size + step * 2048
            )
        };
        format!(
            "shl.b32 %r0, %number, 4; cvt.u64.u32 %l0, %r0; add.s64 %l1, %in, %l0; add.s32 %r1, %shared, %r0; mov.b32 %r2, 0;
            $copy: ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%l1]; st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
            add.s64 %l1, %l1, 2048; add.s32 %r1, %r1, 2048; add.s32 %r2, %r2, 2048; setp.lt.u32 %p, %r2, {size}; @%p bra $copy;
            sub.s64 %l1, %l1, {size};
            mul.wide.u32 %l2, %number, {}; add.s64 %l3, %out, %l2; add.s64 %l2, %in, %l2; add.s64 %l2, %l2, {};
            {}{}
            cvt.u64.u32 %b, %shared; shr.u64 %b, %b, 4;
            fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
            {} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
            {}",
            count * 4,
            size + steps * 2048,
            (0..count).map(load).collect::<String>(),
            (0..steps).map(operands).collect::<String>(),
            (0..steps).map(step).collect::<String>(),
            (0..count).map(store).collect::<String>(),
        )
    }

    fn kernel<'a>(&self, text: &'a str, given: &'a [u8]) -> Kernel<'a> {
        let (shared, output) = (self.shared(), 128 * self.columns * 2);
        Kernel { text, blocks: 1, threads: 128, shared, given, output, races: true, cluster: 1 }
    }

    fn check(
        &self,
        schedule: Schedule,
        approximation: Approximation,
        oracle: fn([(f64, f64); 16], f32) -> f32,
    ) {
        let value = self.element.value;
        self.check_by(schedule, approximation, |a, b, c| {
            oracle(std::array::from_fn(|k| (value(a[k]), value(b[k]))), c)
        });
    }

    /// Compares with the sums of a step's codes of a row and a column, and an addend.
    fn check_by(
        &self,
        schedule: Schedule,
        approximation: Approximation,
        sum_of: impl Fn(&[u16], &[u16], f32) -> f32,
    ) {
        let (text, given) = (self.text(), self.given());
        let found = self.kernel(&text, &given).with(schedule, approximation);
        let found = found.unwrap_or_else(|fault| panic!("{:?}: {fault}", self.layout));
        for (at, found) in found.as_chunks().0.iter().enumerate() {
            let (row, column) = place_of(at / (self.columns / 2), at % (self.columns / 2));
            let mut sum = if self.adds { self.c[row][column] } else { 0.0 };
            for step in 0..self.layout.steps {
                let codes = step * 16..step * 16 + 16;
                sum = sum_of(&self.a[row][codes.clone()], &self.b[column][codes], sum);
            }
            let found = f32::from_le_bytes(*found);
            assert_eq!(found, sum, "{:?}, {row}, {column} of {}", self.layout, self.columns);
        }
    }
}

/// Returns the row and column of a thread's element of C and D.
fn place_of(thread: usize, i: usize) -> (usize, usize) {
    let row = thread / 32 * 16 + thread % 32 / 4 + if i / 2 % 2 == 1 { 8 } else { 0 };
    (row, i / 4 * 8 + thread % 4 * 2 + i % 2)
}

/// Returns the opcode of a product.
fn opcode(Element { name, .. }: Element, columns: usize) -> String {
    let depth = if name == "e4m3" { 32 } else { 16 };
    format!("wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{name}.{name}")
}

/// Returns the opcodes of products.
pub(super) fn opcodes() -> Vec<String> {
    let of = |columns: usize| [F16, BF16, E4M3].map(|element| opcode(element, columns));
    SHAPES.into_iter().flat_map(of).collect()
}

const SHAPES: [usize; 13] = [8, 16, 24, 32, 48, 64, 96, 104, 128, 144, 192, 224, 256];

#[test]
fn every_shape_multiplies() {
    for (i, columns) in SHAPES.into_iter().enumerate() {
        for which in 0..2 {
            let layout = LAYOUTS[(i + which) % LAYOUTS.len()];
            let layout = if columns > 64 && layout.strides[1] > 16 { LAYOUTS[4] } else { layout };
            let product = Product::random(columns, layout, which, i % 2 == 0, i as u64);
            product.check(SCHEDULES[i % 3], Approximation::Nearest, nearest);
        }
        let product = Product::random(columns, LAYOUTS[4], 2, i % 2 == 0, i as u64);
        product.check_by(SCHEDULES[i % 3], Approximation::Nearest, hopper);
    }
}

#[test]
fn every_layout_is_read_and_every_sum_is_allowed() {
    for (i, layout) in LAYOUTS.into_iter().enumerate() {
        for schedule in SCHEDULES {
            let product = Product::random(32, layout, i % 2, true, i as u64);
            product.check(schedule, Approximation::Nearest, nearest);
        }
        let product = Product::random(16, layout, i % 2, false, i as u64);
        product.check(Schedule::HighestFirst, Approximation::Low, cut);
        product.check(Schedule::LowestFirst, Approximation::High, in_order);
        // No approximation changes E4M3.
        let product = Product::random(16, layout, 2, true, i as u64);
        product.check_by(Schedule::HighestFirst, Approximation::Low, hopper);
        product.check_by(Schedule::LowestFirst, Approximation::High, hopper);
        for schedule in SCHEDULES {
            let product = Product { shared_a: true, ..Product::random(16, layout, 2, true, i as u64) };
            product.check_by(schedule, Approximation::Nearest, hopper);
        }
    }
}

/// Runs a small product with a changed text, in blocks of `threads` threads.
fn changed(changes: &[(&str, &str)], threads: u32, expected: fn(&FaultKind) -> bool) {
    let product = Product::random(8, LAYOUTS[0], 0, true, 1);
    let mut text = product.text();
    for (from, to) in changes {
        assert!(text.contains(from), "{from} is not in {text}");
        text = text.replace(from, to);
    }
    let given = product.given();
    Kernel { threads, ..product.kernel(&text, &given) }.faults(expected);
}

#[test]
fn registers_of_pending_products_must_not_be_accessed() {
    let pending =
        |kind: &FaultKind| matches!(kind, FaultKind::PendingRegister(name) if name == "%d1" || name == "%r9");
    let commit = "wgmma.commit_group.sync.aligned;";
    let wait = "wgmma.wait_group.sync.aligned 0;";
    for touch in [
        "mov.f32 %d2, %d1;",
        "mov.f32 %d1, 0f00000000;",
        "mov.b32 %r0, %r9;",
        "mov.b32 %r9, 0;",
        "ld.global.f32 %d1, [%in];",
    ] {
        changed(&[(commit, &format!("{touch} {commit}"))], 128, pending);
        changed(&[(wait, &format!("{touch} {wait}"))], 128, pending);
        // Waits for all groups except the last one.
        changed(&[(wait, &format!("wgmma.wait_group.sync.aligned 1; {touch} {wait}"))], 128, pending);
    }
    let any = |kind: &FaultKind| matches!(kind, FaultKind::PendingRegister(_));
    changed(&[(wait, "")], 128, any);
    // A product without a group is not waited for.
    changed(&[(commit, "")], 128, any);
    changed(&[(wait, "exit;")], 128, |kind| matches!(kind, FaultKind::ProductNeverAwaited));
}

#[test]
fn registers_need_a_fence_before_a_product() {
    let unfenced = |kind: &FaultKind| matches!(kind, FaultKind::UnfencedRegister(_));
    let fence = "wgmma.fence.sync.aligned;";
    changed(&[(fence, "")], 128, unfenced);
    changed(&[(fence, "wgmma.fence.sync.aligned; mov.b32 %r9, 0;")], 128, unfenced);
    changed(&[(fence, "wgmma.fence.sync.aligned; add.rn.f32 %d1, %d1, %d1;")], 128, unfenced);
}

#[test]
fn writes_of_other_threads_need_a_fence_and_a_barrier() {
    let unfenced = |kind: &FaultKind| matches!(kind, FaultKind::Unfenced { .. });
    changed(&[("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0;")], 128, unfenced);
    // A fence of the reader, or one for mbarriers, does not replace the writer's fence.
    changed(
        &[("fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0; fence.proxy.async.shared::cta;")],
        128,
        unfenced,
    );
    changed(&[("fence.proxy.async.shared::cta;", "fence.mbarrier_init.release.cluster;")], 128, unfenced);
    changed(&[("fence.proxy.async.shared::cta;", "@!%first fence.proxy.async.shared::cta;")], 128, unfenced);
    let race = |kind: &FaultKind| matches!(kind, FaultKind::Race { .. } | FaultKind::Uninitialised(_));
    changed(&[("bar.sync 0;", "")], 128, race);
    changed(&[("bar.sync 0;", "bar.warp.sync -1;")], 128, race);
    // A store during the product, and one after another warp's wait.
    let wait = "wgmma.wait_group.sync.aligned 0;";
    let store = "@%first st.shared.b32 [%shared], 1;";
    let raced = |kind: &FaultKind| matches!(kind, FaultKind::Race { .. });
    changed(&[(wait, &format!("{store} {wait}"))], 128, raced);
    let product = Product::random(8, LAYOUTS[0], 0, true, 1);
    let text = product.text().replace(wait, &format!("{wait} {store}"));
    product.kernel(&text, &product.given()).stored();
}

/// Threads that have observed an mbarrier's phase fence the copies that it counts.
#[test]
fn copies_that_an_mbarrier_counts_need_the_fence_of_an_observer() {
    let unfenced = |kind: &FaultKind| matches!(kind, FaultKind::Unfenced { .. });
    let product = Product::random(8, LAYOUTS[0], 0, true, 1);
    let (stored, given) = (product.text(), product.given());
    let expected = product.kernel(&stored, &given).stored();
    let text = |landed: &str| {
        let mut text = stored.clone();
        for (from, to) in [
            (
                "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%l1]; st.shared.v4.b32 [%r1], {%r4, %r5, %r6, %r7};",
                "cp.async.cg.shared.global [%r1], [%l1], 16;",
            ),
            ("fence.proxy.async.shared::cta; bar.sync 0;", landed),
        ] {
            assert!(text.contains(from), "{from} is not in {text}");
            text = text.replace(from, to);
        }
        format!("@%first mbarrier.init.shared.b64 [%full], 128; bar.sync 0; {text}")
    };
    let arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%full];";
    let (wait, fence) = (wait("%full", "0", "a"), "fence.proxy.async.shared::cta;");
    let passes = |landed: String| assert_eq!(product.kernel(&text(&landed), &given).stored(), expected);
    let fails = |landed: String| product.kernel(&text(&landed), &given).faults(unfenced);
    passes(format!("{arrive} {wait} {fence}"));
    // One observer fences, and a barrier orders its fence before the product.
    passes(format!("{arrive} {wait} @%first {fence} bar.sync 0;"));
    passes(format!("{arrive} @!%first bra $later; {wait} {fence} $later: bar.sync 0;"));
    fails(format!("{arrive} {wait}"));
    fails(format!("{arrive} {wait} bar.sync 0;"));
    fails(format!("{arrive} {wait} @%first {fence}"));
    fails(format!("{arrive} {wait} fence.mbarrier_init.release.cluster;"));
    // Fences before the copies have been observed to end.
    fails(format!("{fence} {arrive} {wait}"));
    fails(format!("{arrive} {fence} {wait} bar.sync 0;"));
    // The copying threads wait themselves, so the copies count as their own writes.
    passes(format!("cp.async.wait_all; {fence} bar.sync 0;"));
    fails(format!("cp.async.wait_all; bar.sync 0; {fence}"));
}

#[test]
fn inconsistent_descriptors_are_refused() {
    let wrong = |kind: &FaultKind| matches!(kind, FaultKind::Descriptor(..));
    let made = "shr.u64 %b, %b, 4;";
    for bits in [1u64 << 14, 1 << 31, 1 << 46, 1 << 52] {
        changed(&[(made, &format!("{made} or.b64 %b, %b, {bits};"))], 128, wrong);
    }
    for (mode, off) in [(1u64, 8), (1, 7), (2, 4), (2, 3), (3, 2), (3, 1)] {
        let change = format!("{made} add.s64 %b, %b, {off}; or.b64 %b, %b, {};", mode << 62);
        changed(&[(made, &change)], 128, wrong);
    }
    changed(&[(made, &format!("{made} or.b64 %b, %b, {};", 1u64 << 62 | 1 << 49))], 128, wrong);
    changed(&[(made, "shr.u64 %b, %b, 4; add.s64 %b, %b, 1024;")], 128, |kind| {
        matches!(kind, FaultKind::OutOfBounds(_) | FaultKind::Uninitialised(_))
    });
}

/// Warps 4 to 7 are a warp group like warps 0 to 3. Warps 2 to 5 are not.
#[test]
fn warp_groups_start_at_multiples_of_four() {
    let product = Product::random(16, LAYOUTS[4], 1, true, 3);
    let (text, given) = (product.text(), product.given());
    let expected = product.kernel(&text, &given).stored();
    let later = |first: u32| {
        format!("setp.lt.u32 %p, %number, {first}; @%p exit; sub.s32 %number, %number, {first}; {text}")
    };
    let second = later(128);
    assert_eq!(Kernel { threads: 256, ..product.kernel(&second, &given) }.stored(), expected);
    let crossing = later(64);
    Kernel { threads: 192, ..product.kernel(&crossing, &given) }
        .faults(|kind| matches!(kind, FaultKind::NotUniform(_) | FaultKind::Deadlock(_)));
    changed(&[], 96, |kind| matches!(kind, FaultKind::NotUniform(_)));
}

#[test]
fn warp_groups_must_be_complete_and_uniform() {
    let uneven = |kind: &FaultKind| matches!(kind, FaultKind::NotUniform(_));
    let incomplete = |kind: &FaultKind| matches!(kind, FaultKind::IncompleteWarp { .. });
    let deadlock = |kind: &FaultKind| matches!(kind, FaultKind::Deadlock(_));
    let fence = "wgmma.fence.sync.aligned;";
    changed(&[(fence, "setp.ge.u32 %q, %number, 96; @%q exit; wgmma.fence.sync.aligned;")], 128, deadlock);
    changed(&[(fence, "setp.eq.u32 %q, %number, 96; @%q exit; wgmma.fence.sync.aligned;")], 128, incomplete);
    changed(&[("setp.ne.b32 %p, 1, 0;", "setp.ne.b32 %p, %number, 0;")], 128, uneven);
    changed(&[("setp.ne.b32 %p, 1, 0;", "setp.lt.u32 %p, %number, 64;")], 128, uneven);
    changed(
        &[("add.s64 %l4, %b, ", "cvt.u64.u32 %l4, %number; add.s64 %b, %b, %l4; add.s64 %l4, %b, ")],
        128,
        uneven,
    );
    changed(
        &[(
            "add.s64 %l4, %b, ",
            "shr.u32 %r3, %number, 6; cvt.u64.u32 %l4, %r3; add.s64 %b, %b, %l4; add.s64 %l4, %b, ",
        )],
        128,
        |kind| {
            matches!(kind, FaultKind::NotUniform(_) | FaultKind::Uninitialised(_) | FaultKind::OutOfBounds(_))
        },
    );
}
