//! Tests tensor memory and its products (`tcgen05`).
//!
//! Fragments are placed by the layouts of CuTe's `SM100_TMEM_LOAD` atoms, matrices in shared memory
//! by its K-major layouts, and scales by its atoms of 128 rows. `fp4_dot`, which is compared with
//! MMA-Sim's golden vectors, has the sums.

use microscale_executor::{FaultKind, Module, Schedule};
use microscale_formats::{Format, fp4_dot};

use super::kernel::{Kernel, SCHEDULES, wait, words};

/// A barrier of the cluster.
const CLUSTER: &str = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";

/// Allocates columns: `%tensor` is their address, and `%mine` the address of the warp's lanes.
fn begun(columns: usize, group: usize) -> String {
    let started = if group == 2 { CLUSTER } else { "" };
    format!(
        ".reg .b32 %t<130>, %tensor, %mine; .reg .pred %warp; .reg .b64 %x, %y;
        setp.lt.u32 %warp, %number, 32; {started}
        @%warp tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%empty+32], {columns};
        bar.sync 0; ld.shared.b32 %tensor, [%empty+32];
        shr.u32 %mine, %number, 5; shl.b32 %mine, %mine, 21; add.s32 %mine, %mine, %tensor;\n"
    )
}

/// Frees the columns after a barrier.
fn ended(columns: usize, group: usize) -> String {
    format!(
        "bar.sync 0; @%warp tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
        @%warp tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tensor, {columns};"
    )
}

/// Returns a list of registers `%t`.
fn registers(count: usize) -> String {
    let all: Vec<String> = (0..count).map(|i| format!("%t{i}")).collect();
    format!("{{{}}}", all.join(", "))
}

/// A shape of loads and stores, its number of repetitions, and CuTe's layout: for each bit of the
/// thread and then of the register, from the lowest, the distance in rows and in columns.
struct Shape {
    name: &'static str,
    count: usize,
    lanes: usize,
    thread: [(usize, usize); 5],
    register: &'static [(usize, usize)],
}

impl Shape {
    /// Returns the lane and column of a thread's register.
    fn place(&self, thread: usize, register: usize) -> (usize, usize) {
        let bits = |number: usize, steps: &[(usize, usize)]| {
            let set = steps.iter().enumerate().filter(|(i, _)| number >> i & 1 == 1);
            set.fold((0, 0), |(rows, columns), (_, step)| (rows + step.0, columns + step.1))
        };
        let (a, b) = (bits(thread, &self.thread), bits(register, self.register));
        (a.0 + b.0, a.1 + b.1)
    }
}

const SHAPES: [Shape; 5] = [
    Shape {
        name: "32x32b",
        count: 16,
        lanes: 32,
        thread: [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0)],
        register: &[(0, 1), (0, 2), (0, 4), (0, 8)],
    },
    Shape {
        name: "16x64b",
        count: 1,
        lanes: 16,
        thread: [(8, 0), (0, 1), (1, 0), (2, 0), (4, 0)],
        register: &[],
    },
    Shape {
        name: "16x64b",
        count: 8,
        lanes: 16,
        thread: [(8, 0), (0, 1), (1, 0), (2, 0), (4, 0)],
        register: &[(0, 2), (0, 4), (0, 8)],
    },
    Shape {
        name: "16x128b",
        count: 4,
        lanes: 16,
        thread: [(0, 1), (0, 2), (1, 0), (2, 0), (4, 0)],
        register: &[(8, 0), (0, 4), (0, 8)],
    },
    Shape {
        name: "16x256b",
        count: 4,
        lanes: 16,
        thread: [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)],
        register: &[(0, 1), (8, 0), (0, 8), (0, 16)],
    },
];

#[test]
fn every_shape_reaches_its_words() {
    for shape in &SHAPES {
        let count = 1 << shape.register.len();
        for half in (0..32).step_by(shape.lanes) {
            let fill = |i: usize| format!("mad.lo.u32 %t{i}, %number, 1000, {i};\n");
            let store = |i: usize| format!("st.global.b32 [%x+{}], %t{i};\n", i * 4);
            let text = format!(
                "{}{} tcgen05.st.sync.aligned.32x32b.x32.b32 [%mine+5], {}; tcgen05.wait::st.sync.aligned;
                tcgen05.ld.sync.aligned.{}.x{}.b32 {}, [%mine+{}]; tcgen05.wait::ld.sync.aligned;
                mul.wide.u32 %x, %number, {}; add.s64 %x, %x, %out; {}{}",
                begun(64, 1),
                (0..32).map(fill).collect::<String>(),
                registers(32),
                shape.name,
                shape.count,
                registers(count),
                (half << 16) + 5,
                count * 4,
                (0..count).map(store).collect::<String>(),
                ended(64, 1),
            );
            let kernel = Kernel { output: 512 * count, ..kernel(&text, &[]) };
            for (i, found) in words(&kernel.stored()).into_iter().enumerate() {
                let (thread, register) = (i / count, i % count);
                let (row, column) = shape.place(thread % 32, register);
                let lane = thread / 32 * 32 + half + row;
                assert_eq!(found as usize, lane * 1000 + column, "{}, thread {thread}", shape.name);
            }
            // A store and a load of the same shape agree.
            let there = text
                .replace(
                    "32x32b.x32.b32 [%mine+5]",
                    &format!("{}.x{}.b32 [%mine+{}]", shape.name, shape.count, (half << 16) + 5),
                )
                .replace(&format!("], {};", registers(32)), &format!("], {};", registers(count)));
            let found = words(&Kernel { output: 512 * count, ..kernel_of(&there) }.stored());
            assert!(
                found.iter().enumerate().all(|(i, &found)| found as usize == i / count * 1000 + i % count)
            );
        }
    }
}

/// Makes a kernel of four warps.
fn kernel<'a>(text: &'a str, given: &'a [u8]) -> Kernel<'a> {
    Kernel { text, blocks: 1, threads: 128, cluster: 1, shared: 2048, given, output: 0, races: true }
}

fn kernel_of(text: &str) -> Kernel<'_> {
    kernel(text, &[])
}

/// A K-major layout of a matrix of FP4 codes in shared memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// The value of the swizzle field.
    mode: u64,
    /// The number of address bits that swizzling changes, in CUTLASS's `Swizzle<bits, 4, 3>`.
    bits: u32,
    /// Strides in bytes: between rows, to the next 16 bytes in K, and to the next eight rows.
    strides: [usize; 3],
    /// Number of consecutive products of 64.
    steps: usize,
}

const fn layout(mode: u64, bits: u32, strides: [usize; 3], steps: usize) -> Layout {
    Layout { mode, bits, strides, steps }
}

const LAYOUTS: [Layout; 6] = [
    layout(0, 0, [16, 128, 256], 1),
    layout(0, 0, [16, 4112, 128], 2),
    layout(6, 1, [32, 16, 256], 1),
    layout(4, 2, [64, 16, 512], 2),
    layout(2, 3, [128, 16, 1024], 4),
    layout(2, 3, [128, 16, 2048], 2),
];

impl Layout {
    /// Returns the offset of a byte of a row.
    fn place(&self, row: usize, byte: usize) -> usize {
        let [inside, beside, below] = self.strides;
        let plain = row % 8 * inside + byte / 16 * beside + row / 8 * below + byte % 16;
        plain ^ (plain >> 3 & (((1 << self.bits) - 1) << 4))
    }

    /// Returns the descriptor of a step of a matrix at an offset. With swizzling, K's stride is
    /// ignored.
    fn descriptor(&self, at: usize, step: usize) -> u64 {
        let [_, beside, below] = self.strides.map(|stride| stride as u64 >> 4);
        let leading = if self.bits == 0 { beside } else { 1 };
        let start = at as u64 / 16 + 2 * beside * step as u64;
        self.mode << 61 | 1 << 46 | below << 32 | leading << 16 | start
    }

    fn size(&self, rows: usize) -> usize {
        let last = (0..rows).map(|row| self.place(row, self.steps * 32 - 1)).max().unwrap();
        (last + 1).next_multiple_of(2048)
    }
}

/// Rows of codes, two per byte, and scales.
type Rows = Vec<(Vec<u8>, Vec<u8>)>;

/// D = A·B of `group` blocks, with 128 rows each.
struct Product {
    format: Format,
    columns: usize,
    layout: Layout,
    group: usize,
    /// Whether A and B are negated.
    negated: [bool; 2],
    a: Rows,
    b: Rows,
}

impl Product {
    fn random(format: Format, columns: usize, layout: Layout, group: usize, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut rows = |count: usize| -> Rows {
            let codes = layout.steps * 32;
            (0..count)
                .map(|_| {
                    let scale = |rng: &mut fastrand::Rng| match format {
                        Format::Nvfp4 => rng.u8(..0x7f),
                        _ => rng.u8(110..140),
                    };
                    let scales = (0..codes * 2 / format.block()).map(|_| scale(&mut rng)).collect();
                    ((0..codes).map(|_| rng.u8(..)).collect(), scales)
                })
                .collect()
        };
        let (a, b) = (rows(128 * group), rows(columns));
        Self { format, columns, layout, group, negated: [seed % 2 == 1, seed % 3 == 1], a, b }
    }

    /// Number of words of scales of a row: a word has four, for one step of NVFP4 or two of MXFP4.
    fn words(&self) -> usize {
        if self.format == Format::Nvfp4 { self.layout.steps } else { self.layout.steps.div_ceil(2) }
    }

    /// Number of atoms of B's scales for a word.
    fn atoms(&self) -> usize {
        self.columns.div_ceil(128)
    }

    /// Offsets of A, B, and the scales of A and of B, and the size.
    fn places(&self) -> [usize; 5] {
        let b = self.layout.size(128);
        let scales_a = b + self.layout.size(self.columns / self.group);
        let scales_b = scales_a + self.words() * 512;
        let end = scales_b + self.words() * self.atoms() * 512;
        [0, b, scales_a, scales_b, end.next_multiple_of(2048)]
    }

    /// Returns the shared memory of each block.
    fn given(&self) -> Vec<u8> {
        let [_, at_b, scales_a, scales_b, size] = self.places();
        let mut all = Vec::new();
        for block in 0..self.group {
            let mut bytes = vec![0; size];
            let a = &self.a[block * 128..][..128];
            let own = self.columns / self.group;
            for (at, rows) in [(0, a), (at_b, &self.b[block * own..][..own])] {
                for (row, (codes, _)) in rows.iter().enumerate() {
                    for (i, &code) in codes.iter().enumerate() {
                        bytes[at + self.layout.place(row, i)] = code;
                    }
                }
            }
            // An atom has 128 rows: row r at 16·(r mod 32) + 4·(r / 32). B's scales are in all
            // blocks.
            for (at, rows, atoms) in [(scales_a, a, 1), (scales_b, &self.b[..], self.atoms())] {
                for (row, (_, scales)) in rows.iter().enumerate() {
                    for (i, &scale) in scales.iter().enumerate() {
                        let atom = i / 4 * atoms + row / 128;
                        bytes[at + atom * 512 + row % 32 * 16 + row % 128 / 32 * 4 + i % 4] = scale;
                    }
                }
            }
            all.extend(bytes);
        }
        all
    }

    /// Returns the instruction descriptor of a step.
    fn kind(&self, step: usize) -> u32 {
        let nvfp4 = self.format == Format::Nvfp4;
        let id = if nvfp4 { 0 } else { step as u32 % 2 * 2 };
        let rows = self.group as u32;
        id << 4
            | u32::from(self.negated[0]) << 13
            | u32::from(self.negated[1]) << 14
            | 1 << 7
            | 1 << 10
            | (self.columns as u32 / 8) << 17
            | u32::from(!nvfp4) << 23
            | rows << 27
            | id << 29
    }

    fn opcode(&self) -> String {
        let kind = match self.format {
            Format::Nvfp4 => "kind::mxf4nvf4.block_scale.block16",
            _ => "kind::mxf4.block_scale.block32",
        };
        format!("tcgen05.mma.cta_group::{}.{kind}", self.group)
    }

    /// Returns the text that copies the input to shared memory, multiplies and stores D.
    fn text(&self) -> String {
        let [_, at_b, scales_a, scales_b, size] = self.places();
        let (group, columns) = (self.group, self.columns);
        let behind = columns.next_multiple_of(8);
        let of_b = |word: usize| behind + 4 * self.words() + word * self.atoms() * 4;
        let mut issue = String::new();
        let mut copy = |to: usize, from: usize| {
            issue += &format!(
                "add.s64 %x, %b, {}; add.s32 %t0, %tensor, {to}; tcgen05.cp.cta_group::{group}.32x128b.warpx4 [%t0], %x;\n",
                1u64 << 46 | 8 << 32 | 1 << 16 | from as u64 >> 4
            );
        };
        for word in 0..self.words() {
            copy(behind + 4 * word, scales_a + word * 512);
            for atom in 0..self.atoms() {
                copy(of_b(word) + 4 * atom, scales_b + (word * self.atoms() + atom) * 512);
            }
        }
        for step in 0..self.layout.steps {
            let word = if self.format == Format::Nvfp4 { step } else { step / 2 };
            issue += &format!(
                "add.s64 %x, %b, {}; add.s64 %y, %b, {}; setp.ne.b32 %p, {step}, 0;
                add.s32 %t0, %tensor, {}; add.s32 %t1, %tensor, {};
                {} [%tensor], %x, %y, {}, [%t0], [%t1], %p;\n",
                self.layout.descriptor(0, step),
                self.layout.descriptor(at_b, step),
                behind + 4 * word,
                of_b(word),
                self.opcode(),
                self.kind(step),
            );
        }
        let (sync, commit, leader) = match group {
            1 => ("bar.sync 0;", "shared::cluster.b64 [%full]", ""),
            _ => (
                CLUSTER,
                "shared::cluster.multicast::cluster.b64 [%full], 3",
                "setp.eq.and.b32 %first, %block, 0, %first;",
            ),
        };
        let load = |first: usize| {
            let store = |i: usize| format!("st.global.b32 [%x+{}], %t{i};\n", (first + i) * 4);
            format!(
                "tcgen05.ld.sync.aligned.32x32b.x8.b32 {}, [%mine+{first}]; tcgen05.wait::ld.sync.aligned; {}",
                registers(8),
                (0..8).map(store).collect::<String>()
            )
        };
        format!(
            "{} @%first mbarrier.init.shared::cta.b64 [%full], 1; @%first fence.mbarrier_init.release.cluster;
            shl.b32 %r0, %number, 4; mad.lo.u32 %r2, %block, {size}, %r0; cvt.u64.u32 %l0, %r2; add.s64 %l1, %in, %l0; add.s32 %r1, %shared, %r0; mov.b32 %r2, 0;
            $copy: ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%l1]; st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
            add.s64 %l1, %l1, 2048; add.s32 %r1, %r1, 2048; add.s32 %r2, %r2, 2048; setp.lt.u32 %q, %r2, {size}; @%q bra $copy;
            and.b32 %r3, %shared, 0xffffff; cvt.u64.u32 %b, %r3; shr.u64 %b, %b, 4;
            fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
            {leader} @!%first bra $wait;
            {issue} tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.{commit};
            $wait: {} tcgen05.fence::after_thread_sync;
            mad.lo.u32 %r0, %block, 128, %number; mul.wide.u32 %x, %r0, {}; add.s64 %x, %x, %out;
            {} tcgen05.fence::before_thread_sync; {sync} {}",
            begun(512, group),
            wait("%full", "0", "a"),
            columns * 4,
            (0..columns).step_by(8).map(load).collect::<String>(),
            ended(512, group),
        )
    }

    fn kernel<'a>(&self, text: &'a str, given: &'a [u8]) -> Kernel<'a> {
        let blocks = self.group as u32;
        let output = self.a.len() * self.columns * 4;
        let shared = self.places()[4];
        Kernel { text, blocks, threads: 128, cluster: blocks, shared, given, output, races: true }
    }

    fn check(&self) {
        self.equals(|row, column| {
            let (a, b) = (&self.a[row], &self.b[column]);
            let signs = self.negated.map(|negated| if negated { 0x88 } else { 0 });
            let signed = |codes: &[u8], sign: u8| codes.iter().map(|code| code ^ sign).collect::<Vec<u8>>();
            let codes = (signed(&a.0, signs[0]), signed(&b.0, signs[1]));
            fp4_dot::row(self.format, (&codes.0, &a.1), (&codes.1, &b.1))
        });
    }

    /// Checks D against `expected`, its value in a row and a column.
    fn equals(&self, expected: impl Fn(usize, usize) -> f32) {
        let (text, given) = (self.text(), self.given());
        for schedule in SCHEDULES {
            let found = self.kernel(&text, &given).under(schedule);
            let found = words(&found.unwrap_or_else(|fault| panic!("{:?}: {fault}", self.layout)));
            for (i, found) in found.into_iter().enumerate() {
                let expected = expected(i / self.columns, i % self.columns).to_bits();
                assert_eq!(
                    found, expected,
                    "{:?}, {schedule:?}, {i} of {} columns",
                    self.layout, self.columns
                );
            }
        }
    }
}

#[test]
fn every_layout_multiplies() {
    for (i, layout) in LAYOUTS.into_iter().enumerate() {
        for format in [Format::Nvfp4, Format::Mxfp4] {
            Product::random(format, [8, 40, 24][i % 3], layout, 1, i as u64).check();
        }
    }
}

#[test]
fn every_number_of_columns_multiplies() {
    for (i, columns) in [16, 32, 64, 128, 136, 256].into_iter().enumerate() {
        let format = if i % 2 == 0 { Format::Nvfp4 } else { Format::Mxfp4 };
        Product::random(format, columns, LAYOUTS[3], 1, i as u64).check();
    }
}

#[test]
fn pairs_of_blocks_multiply() {
    for (i, columns) in [16, 64, 160].into_iter().enumerate() {
        for format in [Format::Nvfp4, Format::Mxfp4] {
            Product::random(format, columns, LAYOUTS[[2, 3, 4][i]], 2, i as u64).check();
        }
    }
}

/// The first block's rows are ones, the second one's twos. The first block has columns of halves,
/// the second one of threes. One row of each block has a scale of 2, one column a scale of 1/2.
#[test]
fn a_pair_shares_columns_and_has_rows_of_its_own() {
    let layout = LAYOUTS[3];
    for (format, [half, one, two]) in [(Format::Nvfp4, [0x30, 0x38, 0x40]), (Format::Mxfp4, [126, 127, 128])]
    {
        let codes = |code: u8| vec![code << 4 | code; layout.steps * 32];
        let scales = |scale: u8| vec![scale; layout.steps * 64 / format.block()];
        let row =
            |row| (codes(if row < 128 { 2 } else { 4 }), scales(if row % 128 == 5 { two } else { one }));
        let column =
            |column| (codes(if column < 8 { 1 } else { 5 }), scales(if column == 15 { half } else { one }));
        let (a, b) = ((0..256).map(row).collect(), (0..16).map(column).collect());
        let product = Product { format, columns: 16, layout, group: 2, negated: [false; 2], a, b };
        product.equals(|row, column| {
            // 128 products each.
            let sum = match (row / 128, column / 8) {
                (0, 0) => 64.0,
                (0, _) => 384.0,
                (_, 0) => 128.0,
                _ => 768.0,
            };
            let of_row = if row % 128 == 5 { 2.0 } else { 1.0 };
            sum * of_row * if column == 15 { 0.5 } else { 1.0 }
        });
    }
}

#[test]
fn commits_arrive_in_any_order_at_blocks_that_have_not_ended() {
    let product = Product::random(Format::Nvfp4, 16, LAYOUTS[3], 2, 1);
    let given = product.given();
    let commit = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64";
    let init = "@%first mbarrier.init.shared::cta.b64 [%full], 1;";
    let two = changed(&product.text(), init, &format!("{init} {}", init.replace("full", "empty")));
    let two = changed(&two, commit, &format!("{commit} [%empty], 3; {commit}"));
    // The first commit may arrive after the second one, at a block that has ended.
    let late = product.kernel(&two, &given).under(Schedule::HighestFirst).unwrap_err();
    assert!(matches!(*late.kind, FaultKind::NoSuchBlock { .. }), "{late}");
    let both = changed(&two, "$wait:", &format!("$wait: {}", wait("%empty", "0", "e")));
    product.kernel(&both, &given).stored();
    // A block ends before the products of the pair.
    let leaves = "setp.eq.b32 %q, %block, 1; @%q exit; setp.eq.and.b32 %first, %block, 0, %first;";
    let left = changed(&product.text(), "setp.eq.and.b32 %first, %block, 0, %first;", leaves);
    let left = product.kernel(&left, &given).under(Schedule::HighestFirst).unwrap_err();
    assert!(matches!(*left.kind, FaultKind::NoSuchBlock { .. }), "{left}");
}

#[test]
fn rows_are_copied_to_tensor_memory() {
    for (i, layout) in LAYOUTS.into_iter().enumerate() {
        let columns = if i % 2 == 0 { 8 } else { 4 };
        let rows: Vec<Vec<u8>> =
            (0..128).map(|row| (0..32).map(|byte| (row * 29 + byte * 3) as u8).collect()).collect();
        let size = layout.size(128);
        let mut given = vec![0; size];
        for (row, bytes) in rows.iter().enumerate() {
            for (byte, &value) in bytes.iter().enumerate() {
                given[layout.place(row, byte)] = value;
            }
        }
        let store = |i: usize| format!("st.global.b32 [%x+{}], %t{i};\n", i * 4);
        let text = format!(
            "{} @%first mbarrier.init.shared.b64 [%full], 1; shl.b32 %r0, %number, 4; cvt.u64.u32 %l0, %r0;
            add.s64 %l1, %in, %l0; add.s32 %r1, %shared, %r0; mov.b32 %r2, 0;
            $copy: ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%l1]; st.shared.v4.b32 [%r1], {{%r4, %r5, %r6, %r7}};
            add.s64 %l1, %l1, 2048; add.s32 %r1, %r1, 2048; add.s32 %r2, %r2, 2048; setp.lt.u32 %q, %r2, {size}; @%q bra $copy;
            cvt.u64.u32 %b, %shared; shr.u64 %b, %b, 4; fence.proxy.async.shared::cta; bar.sync 0; @!%first bra $wait;
            add.s64 %x, %b, {}; tcgen05.cp.cta_group::1.128x{}b [%tensor+3], %x;
            tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%full];
            $wait: {} tcgen05.fence::after_thread_sync; mul.wide.u32 %x, %number, {}; add.s64 %x, %x, %out;
            tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {}, [%mine+3]; tcgen05.wait::ld.sync.aligned; {} {}",
            begun(32, 1),
            layout.descriptor(0, 0),
            columns * 32,
            wait("%full", "0", "a"),
            columns * 4,
            registers(columns),
            (0..columns).map(store).collect::<String>(),
            ended(32, 1),
        );
        let found = Kernel { shared: size, output: 512 * columns, ..kernel(&text, &given) }.stored();
        let expected: Vec<u8> = rows.iter().flat_map(|row| &row[..columns * 4]).copied().collect();
        assert_eq!(found, expected, "{layout:?}");
        let change = |from: &str, to: &str, expected| {
            Kernel { shared: size, output: 512 * columns, ..kernel(&changed(&text, from, to), &given) }
                .faults(expected);
        };
        change("[%tensor+3], %x", "[%tensor+30], %x", |kind| matches!(kind, FaultKind::OutOfBounds(_)));
        change("fence.proxy.async.shared::cta;", "", |kind| matches!(kind, FaultKind::Unfenced { .. }));
        // The thread's own warp may not read the words before the commit's phase either.
        change(&wait("%full", "0", "a"), "", |kind| {
            race(kind) || matches!(kind, FaultKind::Uninitialised(_))
        });
        change(
            "tcgen05.commit",
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%mine]; tcgen05.commit",
            |kind| matches!(kind, FaultKind::Deadlock(_) | FaultKind::IncompleteWarp { .. }),
        );
    }
}

fn race(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::Race { .. })
}

fn unfenced(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::UnfencedTensor { .. })
}

fn misuse(kind: &FaultKind) -> bool {
    matches!(kind, FaultKind::TensorMemory(_))
}

/// Replaces the first text that stands in the second.
#[track_caller]
fn changed(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from}");
    text.replacen(from, to, 1)
}

#[test]
fn products_need_their_fences_and_waits() {
    let product = Product::random(Format::Nvfp4, 16, LAYOUTS[3], 1, 1);
    let (text, given) = (product.text(), product.given());
    let faults = |text: &str, expected: fn(&FaultKind) -> bool| product.kernel(text, &given).faults(expected);
    let change = |from: &str, to: &str, expected| faults(&changed(&text, from, to), expected);
    let after = "tcgen05.fence::after_thread_sync;";
    // Shared memory that threads wrote needs a proxy fence, and a barrier.
    change("fence.proxy.async.shared::cta;", "", |kind| matches!(kind, FaultKind::Unfenced { .. }));
    change(
        "fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync; bar.sync 0;",
        "fence.proxy.async.shared::cta;",
        |kind| race(kind) || matches!(kind, FaultKind::Uninitialised(_) | FaultKind::Mbarrier(..)),
    );
    // Results need the commit's phase and a fence.
    let waited = wait("%full", "0", "a");
    change(&format!("{waited} {after}"), after, |kind| {
        race(kind) || matches!(kind, FaultKind::Uninitialised(_))
    });
    change(&format!("{waited} {after}"), &waited, unfenced);
    // The issuing thread's warp needs it too.
    change(&format!("{waited} {after}"), &format!("{waited} @!%warp {after}"), unfenced);
    // The commit comes before the last product.
    let commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%full];";
    let last = text.rfind("tcgen05.mma").unwrap();
    let early = changed(&format!("{}{commit} {}", &text[..last], &text[last..]), &format!("\n {commit}"), "");
    faults(&early, |kind| race(kind) || matches!(kind, FaultKind::ProductNeverAwaited));
    change(commit, "", |kind| matches!(kind, FaultKind::Deadlock(_)));
    // No thread waits or reads.
    let begin = text.find("$wait:").unwrap();
    let end = text.rfind("bar.sync 0; @%warp").unwrap();
    let forgotten = format!("{} $wait: {}", &text[..begin], &text[end..]);
    faults(&forgotten, |kind| race(kind) || matches!(kind, FaultKind::ProductNeverAwaited));
    // Operands are overwritten before the products are complete.
    let write = "setp.eq.u32 %q, %number, 64; @%q st.shared.b32 [%shared], 1;";
    change("$wait:", &format!("$wait: {write}"), race);
    let late = changed(&text, after, after).replacen(
        &format!("{waited} {after}"),
        &format!("{waited} {after} {write}"),
        1,
    );
    assert_eq!(product.kernel(&late, &given).stored(), product.kernel(&text, &given).stored());
    // Registers of a load are inaccessible until the wait.
    change("tcgen05.wait::ld.sync.aligned;", "", |kind| matches!(kind, FaultKind::PendingRegister(_)));
    // The mbarrier's initialization needs a fence.
    let init = "@%first mbarrier.init.shared::cta.b64 [%full], 1;";
    let fence = "@%first fence.mbarrier_init.release.cluster;";
    let without = changed(&text, &format!("{init} {fence}"), "");
    let proxy = "fence.proxy.async.shared::cta;";
    faults(&changed(&without, proxy, &format!("{proxy} {init}")), |kind| {
        matches!(kind, FaultKind::Mbarrier(..))
    });
    let fenced = changed(&without, proxy, &format!("{proxy} {init} {fence}"));
    product.kernel(&fenced, &given).stored();
    // Sums are overwritten by another product while a thread may load them.
    let again = format!(
        "$wait: {waited} {after} @!%first bra $load; setp.ne.b32 %p, 0, 0;
        {} [%tensor], %x, %y, {}, [%t0], [%t1], %p;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%full]; $load:",
        product.opcode(),
        product.kind(0)
    );
    change(&format!("$wait: {waited} {after}"), &again, race);
    // Only one thread issues a product, and it needs the fence too.
    change("@!%first bra $wait;", "setp.gt.u32 %q, %number, 1; @%q bra $wait;", |kind| {
        matches!(kind, FaultKind::NotUniform(_))
    });
}

#[test]
fn operands_of_products_are_checked() {
    let product = Product::random(Format::Mxfp4, 16, LAYOUTS[3], 1, 2);
    let (text, given) = (product.text(), product.given());
    let change = |from: &str, to: &str, expected| {
        assert!(text.contains(from), "{from}");
        product.kernel(&text.replace(from, to), &given).faults(expected);
    };
    let kind = |text: &str, changed: u32, expected| {
        let from = format!(", {}, [%t0]", product.kind(0));
        product
            .kernel(&text.replace(&from, &format!(", {}, [%t0]", product.kind(0) ^ changed)), &given)
            .faults(expected);
    };
    // Another K, other rows or columns, transposed, other types, selectors that do not exist.
    for bits in [
        1 << 31,
        1 << 28,
        3 << 27,
        1 << 24,
        2 << 17,
        1 << 15,
        1 << 16,
        1 << 23,
        1 << 7,
        1 << 10,
        1 << 29,
        1 << 4,
        1,
    ] {
        kind(&text, bits, |kind| matches!(kind, FaultKind::InstructionDescriptor(..)));
    }
    let descriptor = |changed: u64, expected| {
        let of = product.layout.descriptor(0, 0);
        change(&format!("add.s64 %x, %b, {of};"), &format!("add.s64 %x, %b, {};", of ^ changed), expected);
    };
    // No version, other modes, a stride that is no multiple of the pattern, bits without a meaning.
    for bits in [1 << 46, 1 << 61, 7 << 61, 1 << 32, 1 << 49, 1 << 53] {
        descriptor(bits, |kind| matches!(kind, FaultKind::Descriptor(..)));
    }
    // Matrices and words outside of what there is.
    descriptor(1 << 13, |kind| matches!(kind, FaultKind::OutOfBounds(_)));
    change("add.s32 %t0, %tensor, 16;", "add.s32 %t0, %tensor, 510;", |kind| {
        matches!(kind, FaultKind::OutOfBounds(_))
    });
    change("%tensor, 16; add.s32 %t1", "%tensor, 400; add.s32 %t1", |kind| {
        matches!(kind, FaultKind::Uninitialised(_))
    });
    change("[%tensor], %x, %y", "[%tensor+65536], %x, %y", misuse);
    // The first product adds to words that nothing wrote.
    change("setp.ne.b32 %p, 0, 0;", "setp.eq.b32 %p, 0, 0;", |kind| {
        matches!(kind, FaultKind::Uninitialised(_))
    });
    // The lanes of a quarter have other scales.
    let other = "mov.b32 %t2, %number; tcgen05.st.sync.aligned.32x32b.x4.b32 [%mine+16], {%t2, %t2, %t2, %t2}; tcgen05.wait::st.sync.aligned;";
    let copy = text.find("add.s64 %x, %b,").unwrap();
    let copied = text[copy..].find("[%t0], %x;").unwrap() + copy + "[%t0], %x;".len();
    let stored = format!("{}{}", &text[..copy], &text[copied..]);
    let stored = changed(
        &stored,
        "tcgen05.fence::before_thread_sync;",
        &format!("{other} tcgen05.fence::before_thread_sync;"),
    );
    product.kernel(&stored, &given).faults(misuse);
    // With the same scales in each quarter it multiplies. Stores need their wait and both fences.
    let same =
        stored.replace("mov.b32 %t2, %number;", "and.b32 %t2, %number, 31; mul.lo.u32 %t2, %t2, 16843009;");
    product.kernel(&same, &given).stored();
    product.kernel(&changed(&same, "tcgen05.wait::st.sync.aligned;", ""), &given).faults(race);
    product.kernel(&changed(&same, "tcgen05.fence::before_thread_sync;", ""), &given).faults(unfenced);
    product.kernel(&changed(&same, "tcgen05.fence::after_thread_sync;", ""), &given).faults(unfenced);
}

#[test]
fn tensor_memory_is_allocated_reached_and_freed() {
    let store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%mine], {%number}; tcgen05.wait::st.sync.aligned;";
    let load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%t0}, [%mine]; tcgen05.wait::ld.sync.aligned;";
    let text = format!("{}{store} {load} {}", begun(64, 1), ended(64, 1));
    kernel_of(&text).stored();
    let change = |from: &str, to: &str, expected| kernel_of(&changed(&text, from, to)).faults(expected);
    for columns in ["48", "16", "1024"] {
        change("], 64;", &format!("], {columns};"), misuse);
    }
    // Several warps allocate or free, or a part is freed, or nothing is.
    change("@%warp tcgen05.alloc", "tcgen05.alloc", |kind| misuse(kind) || race(kind));
    change("@%warp tcgen05.dealloc", "tcgen05.dealloc", misuse);
    change("%tensor, 64;", "%tensor, 32;", misuse);
    change("@%warp tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tensor, 64;", "", misuse);
    // Too much is allocated, or after the permit was given back.
    let more = "@%warp tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%empty+40], 512;";
    change("bar.sync 0;", &format!("{more} bar.sync 0;"), misuse);
    let permit = "@%warp tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;";
    let late = more.replace("512", "32");
    change(permit, &format!("{permit} {late}"), misuse);
    let twice = "@%warp ld.shared.b32 %t1, [%empty+40]; @%warp tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t1, 32;";
    kernel_of(&changed(&text, permit, &format!("{late} bar.sync 0; {twice} {permit}"))).stored();
    // Words that nothing wrote, that are not allocated, and lanes of another warp.
    change(store, "", |kind| matches!(kind, FaultKind::Uninitialised(_)));
    let beyond = |kind: &FaultKind| matches!(kind, FaultKind::OutOfBounds(_));
    change("x1.b32 {%t0}, [%mine]", "x1.b32 {%t0}, [%mine+512]", beyond);
    change("x1.b32 [%mine], {%number}", "x1.b32 [%mine+512], {%number}", beyond);
    change("x1.b32 [%mine], {%number}", "x1.b32 [%tensor], {%number}", misuse);
    change("x1.b32 {%t0}, [%mine]", "x1.b32 {%t0}, [%tensor]", misuse);
    change("x1.b32 {%t0}, [%mine]", "x1.b32 {%t0}, [%mine+524288]", misuse);
    // A load that does not wait for a store, a store that does not wait for a load.
    change("tcgen05.wait::st.sync.aligned;", "", race);
    change("tcgen05.wait::ld.sync.aligned;", store, race);
    // The columns are freed while a warp still uses them.
    change("bar.sync 0; @%warp tcgen05.relinq", "@%warp tcgen05.relinq", |kind| {
        race(kind) || matches!(kind, FaultKind::OutOfBounds(_))
    });
    // Lanes disagree on the address, or some do not take part.
    change("x1.b32 {%t0}, [%mine]", "x1.b32 {%t0}, [%number]", |kind| {
        matches!(kind, FaultKind::NotUniform(_))
    });
    let half = "and.b32 %t1, %number, 1; setp.eq.b32 %q, %t1, 0; @%q tcgen05.ld";
    change("tcgen05.ld", half, |kind| {
        matches!(
            kind,
            FaultKind::Deadlock(_) | FaultKind::NotAMember { .. } | FaultKind::IncompleteWarp { .. }
        )
    });
    // The address of the columns is written by the warp that allocates.
    change("bar.sync 0;", "", |kind| race(kind) || matches!(kind, FaultKind::Uninitialised(_)));
}

#[test]
fn two_warp_groups_hand_over_columns() {
    // Warps w and w + 4 reach the same lanes.
    let text = format!(
        "{} setp.ge.u32 %q, %number, 128; and.b32 %t0, %mine, 0x7fffff; @%q bra $second;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%t0], {{%number}}; tcgen05.wait::st.sync.aligned;
        tcgen05.fence::before_thread_sync; bar.sync 1; bra.uni $end;
        $second: bar.sync 1; tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%t1}}, [%t0]; tcgen05.wait::ld.sync.aligned;
        mul.wide.u32 %x, %number, 4; add.s64 %x, %x, %out; st.global.b32 [%x+-512], %t1;
        $end: {}",
        begun(32, 1),
        ended(32, 1)
    );
    let of =
        |text: &str, run: &dyn Fn(&Kernel)| run(&Kernel { threads: 256, output: 512, ..kernel_of(text) });
    of(&text, &|kernel| assert_eq!(words(&kernel.stored()), (0..128).collect::<Vec<u32>>()));
    let fence = |name: &str| format!("tcgen05.fence::{name}_thread_sync;");
    of(&changed(&text, &fence("before"), ""), &|kernel| kernel.faults(unfenced));
    of(&changed(&text, &fence("after"), ""), &|kernel| kernel.faults(unfenced));
    // A fence before the wait, or after the barrier, is none.
    let wait = "tcgen05.wait::st.sync.aligned;";
    let swapped = changed(&changed(&text, &fence("before"), wait), wait, &fence("before"));
    of(&swapped, &|kernel| kernel.faults(unfenced));
    let early = changed(
        &text,
        &format!("bar.sync 1; {}", fence("after")),
        &format!("{} bar.sync 1;", fence("after")),
    );
    of(&early, &|kernel| kernel.faults(unfenced));
    of(&changed(&text, wait, ""), &|kernel| kernel.faults(race));
}

#[test]
fn pairs_of_blocks_must_agree() {
    let product = Product::random(Format::Nvfp4, 16, LAYOUTS[3], 2, 1);
    let (text, given) = (product.text(), product.given());
    let change =
        |from: &str, to: &str, expected| product.kernel(&changed(&text, from, to), &given).faults(expected);
    // The second block issues, or both do.
    change(
        "setp.eq.and.b32 %first, %block, 0, %first;",
        "setp.eq.and.b32 %first, %block, 1, %first;",
        misuse,
    );
    change("setp.eq.and.b32 %first, %block, 0, %first;", "", misuse);
    // Only one block hears of the products.
    change("[%full], 3;", "[%full], 1;", |kind| matches!(kind, FaultKind::Deadlock(_)));
    change("[%full], 3;", "[%full], 7;", |kind| matches!(kind, FaultKind::NoSuchBlock { .. }));
    // Only one block allocates, or they differ.
    change(
        "setp.lt.u32 %warp, %number, 32;",
        "mad.lo.u32 %r31, %block, 1024, %number; setp.lt.u32 %warp, %r31, 32;",
        |kind| misuse(kind) || matches!(kind, FaultKind::Uninitialised(_)),
    );
    let sizes = "shr.u32 %r31, 512, %block; @%warp tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%empty+32], %r31;";
    change("@%warp tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%empty+32], 512;", sizes, misuse);
    // The other block may not have started.
    change(CLUSTER, "", misuse);
    // The other block's matrix is not there yet.
    change(&format!("tcgen05.fence::before_thread_sync; {CLUSTER}"), "bar.sync 0;", |kind| {
        race(kind)
            || matches!(
                kind,
                FaultKind::Uninitialised(_) | FaultKind::OutOfBounds(_) | FaultKind::Mbarrier(..)
            )
    });
}

#[test]
fn one_lane_is_elected() {
    let text = "elect.sync %r0|%p, -1; selp.b32 %r1, 1, 0, %p; elect.sync _|%q, -1; selp.b32 %r2, 2, 0, %q; or.b32 %r1, %r1, %r2;
        and.b32 %r3, %number, 31; setp.eq.u32 %p, %r0, %r3; selp.b32 %r2, 4, 0, %p; or.b32 %r1, %r1, %r2;
        mul.wide.u32 %l0, %number, 4; add.s64 %l0, %l0, %out; st.global.b32 [%l0], %r1;";
    for schedule in SCHEDULES {
        let found = words(&Kernel { output: 512, ..kernel_of(text) }.under(schedule).unwrap());
        for warp in found.chunks(32) {
            assert_eq!((warp.iter().sum::<u32>(), warp.iter().max()), (7, Some(&7)), "{schedule:?}");
        }
    }
}

#[test]
fn an_invalidated_mbarrier_may_be_initialised_again() {
    let arrive = "@%first mbarrier.arrive.shared.b64 _, [%full]; ";
    let init = "@%first mbarrier.init.shared.b64 [%full], 1; bar.sync 0;";
    let wait = |label: &str| wait("%full", "0", label);
    let end = "bar.sync 0; @%first mbarrier.inval.shared.b64 [%full];";
    let text = format!("{init} {arrive} {} {end} {init} {arrive} {} {end}", wait("a"), wait("b"));
    kernel_of(&text).stored();
    let misused = |kind: &FaultKind| matches!(kind, FaultKind::Mbarrier(..));
    kernel_of(&changed(&text, end, "bar.sync 0;")).faults(misused);
    kernel_of(&changed(&text, end, &format!("{end} {arrive}"))).faults(misused);
    kernel_of(&changed(&text, "bar.sync 0; @%first mbarrier.inval", "@%first mbarrier.inval"))
        .faults(|kind| matches!(kind, FaultKind::Mbarrier(..) | FaultKind::Race { .. }));
}

/// Returns why an instruction is refused.
fn refused(target: &str, text: &str) -> String {
    let text = format!(
        ".version 8.8 .target {target} .address_size 64 .visible .entry test() {{
            .reg .b32 %t<8>; .reg .b64 %x, %y; .reg .pred %p; {text} ret; }}"
    );
    let module = Module::parse(&text).unwrap();
    module.kernel("test").unwrap_err().to_string()
}

#[test]
fn unknown_forms_are_refused() {
    let operands = "[%t0], %x, %y, %t1, [%t2], [%t3], %p;";
    let multiply = |kind: &str| format!("tcgen05.mma.cta_group::1.{kind} {operands}");
    let known = "kind::mxf4.block_scale.block32";
    for (target, text, part) in [
        ("sm_90a", multiply(known), "has no tensor memory"),
        ("sm_120f", multiply(known), "has no tensor memory"),
        ("sm_100f", multiply("kind::mxf4nvf4.block_scale.scale_vec::4X"), "by .block16 or .block32"),
        ("sm_100a", multiply("kind::mxf8f6f4.block_scale.block32"), "this kind of product"),
        ("sm_100a", multiply("kind::f16"), "this form of tcgen05"),
        ("sm_100a", multiply(known).replace("::1", "::4"), "this group of blocks"),
        ("sm_100a", multiply(known) + &multiply(known).replace("group::1", "group::2"), "both groups"),
        (
            "sm_100a",
            "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%t0}, [%t1], 0;".into(),
            "this shape of a fragment",
        ),
        (
            "sm_100a",
            "tcgen05.ld.sync.aligned.32x32b.x3.b32 {%t0, %t2, %t3}, [%t1];".into(),
            "this shape of a fragment",
        ),
        (
            "sm_100a",
            "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%t0}, [%t1];".into(),
            "this shape of a fragment",
        ),
        ("sm_100a", "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%t0, %t0}, [%t1];".into(), "a register twice"),
        (
            "sm_100a",
            "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%t0}, [%t1];".into(),
            "this form of tcgen05",
        ),
        (
            "sm_100a",
            "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%t0], %x;".into(),
            "this shape of a copy",
        ),
        ("sm_100a", "tcgen05.shift.cta_group::1.down [%t0];".into(), "this form of tcgen05"),
        (
            "sm_100a",
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%x];".into(),
            "this form of tcgen05",
        ),
    ] {
        let message = refused(target, &text);
        assert!(message.contains(part), "{text}: {message}");
    }
}
