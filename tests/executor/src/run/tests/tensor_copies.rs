//! Tests tensor copies from global to shared memory.

use super::SCHEDULES;
use crate::{Fault, FaultKind, Launch, Memory, Module, Schedule, Space, Swizzle, TensorMap};

/// Threads of the block, and size of the destination's variable in bytes.
const THREADS: u32 = 64;
const SHARED: usize = 1 << 14;

/// Declarations. The parameters are the addresses of the output and of a buffer with the map, the
/// map itself, and the number of words.
const HEAD: &str = ".version 8.8 .target sm_90 .address_size 64
    .visible .entry k(
        .param .u64 k_param_0, .param .u64 k_param_1, .param .align 64 .b8 k_param_2[128], .param .u32 k_param_3
    ) {
    .shared .align 1024 .b8 box[SHARED]; .shared .align 8 .b8 barrier[8];
    .reg .b64 %d<4>, %map, %out, %other; .reg .b32 %r<8>, %lane, %to, %bar, %words, %x, %y; .reg .pred %p<3>, %first;";

/// Thread 0 copies a box. All threads wait and store the box's words.
const BODY: &str = "
    mov.b64 %d1, k_param_2; cvta.param.u64 %map, %d1;
    ld.param.u64 %out, [k_param_0]; ld.param.u64 %other, [k_param_1]; ld.param.u32 %words, [k_param_3];
    mov.u32 %lane, %tid.x; mov.u32 %bar, barrier; mov.u32 %to, box; setp.eq.u32 %first, %lane, 0;
    mov.b32 %x, FIRST; mov.b32 %y, SECOND;
    @%first mbarrier.init.shared.b64 [%bar], 1; @%first fence.mbarrier_init.release.cluster; bar.sync 0;
    @!%first bra $wait;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], EXPECTED;
    COPY [%to+OFFSET], [%map, CORNER], [%bar];
    $wait: mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0; @!%p1 bra $wait;
    mov.b32 %r1, %lane;
    $next: setp.ge.u32 %p1, %r1, %words; @%p1 bra $end;
    shl.b32 %r2, %r1, 2; cvt.u64.u32 %d2, %r2; add.s64 %d2, %d2, %out; add.s32 %r2, %r2, %to;
    ld.shared.b32 %r3, [%r2+OFFSET]; st.global.b32 [%d2], %r3; add.s32 %r1, %r1, THREADS; bra $next;
    $end:";

/// A tensor, and a copy of one of its boxes.
#[derive(Clone, Copy)]
struct Trial<'a> {
    dims: &'a [u64],
    strides: &'a [u64],
    box_dims: &'a [u32],
    swizzle: Swizzle,
    corner: &'a [i32],
    /// The offset of the destination from a multiple of 1024.
    offset: usize,
    /// Replaced parts of the kernel.
    changes: &'a [(&'a str, &'a str)],
    /// Changes the bytes of the map.
    encode: fn(TensorMap) -> Vec<u8>,
}

const FLAT: Trial = Trial {
    dims: &[100, 7],
    strides: &[112],
    box_dims: &[48, 4],
    swizzle: Swizzle::None,
    corner: &[5, 2],
    offset: 0,
    changes: &[],
    encode: |map| map.encode().into(),
};
const SWIZZLED: Trial = Trial {
    dims: &[300, 7, 3],
    strides: &[304, 4096],
    box_dims: &[128, 6, 2],
    swizzle: Swizzle::Bytes128,
    corner: &[33, 1, 1],
    ..FLAT
};

/// A copy from the map in the parameters to the map in the buffer `other`.
const IN_BUFFER: (&str, &str) = ("[%map,", "[%other,");

impl Trial<'_> {
    fn bytes(&self) -> usize {
        self.box_dims.iter().product::<u32>() as usize
    }

    /// Returns the offset of an element in the buffer, if it is in the tensor.
    fn place(&self, at: [i64; 3]) -> Option<usize> {
        let rank = self.dims.len();
        let inside = (0..rank).all(|dim| (0..self.dims[dim] as i64).contains(&at[dim]));
        let step = |dim: usize| if dim == 0 { 1 } else { self.strides[dim - 1] as i64 };
        inside.then(|| (0..rank).map(|dim| at[dim] * step(dim)).sum::<i64>() as usize)
    }

    /// Returns the byte at a place of the buffer.
    fn byte(place: usize) -> u8 {
        (place * 37 + place / 256 * 11 + 1) as u8
    }

    /// Returns the bytes that the kernel stores.
    fn expected(&self) -> Vec<u8> {
        let of = |dim: usize| self.box_dims.get(dim).map_or(1, |&size| size as usize);
        let mut bytes = vec![0; self.bytes()];
        for i in 0..bytes.len() {
            let index = [i % of(0), i / of(0) % of(1), i / of(0) / of(1)];
            let at = std::array::from_fn(|dim| {
                index[dim] as i64 + self.corner.get(dim).map_or(0, |&start| i64::from(start))
            });
            let address = self.offset + i;
            let to = match self.swizzle {
                Swizzle::None => address,
                Swizzle::Bytes128 => address ^ (address >> 7 & 7) << 4,
            };
            bytes[to - self.offset] = self.place(at).map_or(0, Self::byte);
        }
        bytes
    }

    /// Returns the kernel's output.
    fn under(&self, schedule: Schedule) -> Result<Vec<u8>, Fault> {
        let rank = self.dims.len();
        let corner = if rank == 2 { "{%x, %y}".into() } else { format!("{{%x, %y, {}}}", self.corner[2]) };
        let opcode =
            format!("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes");
        let mut text = format!("{HEAD} {BODY} ret; }}");
        for (from, to) in self.changes {
            assert!(text.contains(from), "{from}");
            text = text.replace(from, to);
        }
        for (from, to) in [
            ("COPY", opcode),
            ("CORNER", corner),
            ("FIRST", self.corner[0].to_string()),
            ("SECOND", self.corner[1].to_string()),
            ("EXPECTED", self.bytes().to_string()),
            ("OFFSET", self.offset.to_string()),
            ("THREADS", THREADS.to_string()),
            ("SHARED", SHARED.to_string()),
        ] {
            text = text.replace(from, &to);
        }
        let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let kernel = module.kernel("k").unwrap_or_else(|error| panic!("{error}"));
        let mut memory = Memory::new();
        let bytes = self.bytes();
        let out = memory.allocate("out", bytes);
        // The bytes between rows are never written, and the buffer ends with the tensor.
        let last =
            self.place(std::array::from_fn(|dim| self.dims.get(dim).map_or(0, |&size| size as i64 - 1)));
        let input = memory.allocate_aligned("in", last.unwrap() + 1, 16);
        for z in 0..self.dims.get(2).map_or(1, |&size| size as i64) {
            for y in 0..self.dims[1] as i64 {
                let start = self.place([0, y, z]).unwrap();
                let row: Vec<u8> = (start..start + self.dims[0] as usize).map(Self::byte).collect();
                memory.write(input, start, &row);
            }
        }
        let map = TensorMap::new(input.address(), self.dims, self.strides, self.box_dims, self.swizzle);
        let map = (self.encode)(map.unwrap());
        let other = memory.allocate_from_aligned("map", &[&map[..], &[0; 64]].concat(), 64);
        let launch = Launch::new(1, THREADS).schedule(schedule).limit(100_000);
        let arguments = [out.into(), other.into(), crate::Argument::bytes(map), (bytes as u32 / 4).into()];
        kernel.run(&mut memory, &launch, &arguments)?;
        Ok(memory.bytes(out).unwrap())
    }

    /// Checks the stored bytes under every schedule.
    #[track_caller]
    fn copies(&self) {
        for schedule in SCHEDULES {
            let found = self.under(schedule).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}"));
            assert!(found == self.expected(), "{schedule:?}, {:?}", self.corner);
        }
    }

    /// Checks the kind of the fault under every schedule.
    #[track_caller]
    fn faults(&self, expected: fn(&FaultKind) -> bool) {
        for schedule in SCHEDULES {
            let fault = self.under(schedule).expect_err("a fault");
            assert!(expected(&fault.kind), "{schedule:?}: {fault}");
        }
    }
}

/// The kinds of a wait that is missing or too early.
fn early(kind: &FaultKind) -> bool {
    matches!(
        kind,
        FaultKind::Race { .. }
            | FaultKind::InFlight(_)
            | FaultKind::Uninitialised(_)
            | FaultKind::NeverAwaited(_)
    )
}

#[test]
fn boxes_are_copied_row_by_row() {
    FLAT.copies();
    Trial { offset: 128, ..FLAT }.copies();
    // The mode is `.tile` by default.
    Trial {
        changes: &[("COPY", "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes")],
        ..FLAT
    }
    .copies();
    Trial { dims: &[100, 7, 5], strides: &[112, 16 * 50], box_dims: &[32, 3, 4], corner: &[9, 1, 1], ..FLAT }
        .copies();
    // Rows of more than 128 bytes, and a stride of 0.
    Trial { dims: &[256, 4], strides: &[0], box_dims: &[256, 3], corner: &[0, 1], ..FLAT }.copies();
}

#[test]
fn swizzled_boxes_follow_the_shared_address() {
    for offset in [0, 128, 896, 1024, 1536] {
        Trial { offset, ..SWIZZLED }.copies();
        Trial { offset, dims: &[300, 20], strides: &[304], box_dims: &[128, 9], corner: &[7, 3], ..SWIZZLED }
            .copies();
    }
}

#[test]
fn elements_outside_of_the_tensor_become_zeros() {
    let far = [i32::MIN, -128, -127, -17, -16, -1, 0, 1, 99, 299, 300, i32::MAX];
    for x in far {
        Trial { corner: &[x, 2], ..FLAT }.copies();
        Trial { corner: &[x, 1, 1], ..SWIZZLED }.copies();
    }
    for y in [i32::MIN, -4, -3, -1, 4, 6, 7, i32::MAX] {
        Trial { corner: &[5, y], ..FLAT }.copies();
        Trial { corner: &[33, y, 1], ..SWIZZLED }.copies();
    }
    for z in [i32::MIN, -2, -1, 0, 2, 3, i32::MAX] {
        Trial { corner: &[33, 1, z], ..SWIZZLED }.copies();
        Trial { corner: &[-33, -1, z], ..SWIZZLED }.copies();
    }
    Trial { corner: &[280, 5, 2], ..SWIZZLED }.copies();
}

#[test]
fn the_mbarrier_counts_all_bytes_of_the_box() {
    // Of a box outside of the tensor, too.
    for corner in [&[5, 2], &[1000, 2], &[80, -2]] {
        let trial = Trial { corner, ..FLAT };
        let deadlock = |kind: &FaultKind| matches!(kind, FaultKind::Deadlock(_));
        Trial { changes: &[("EXPECTED", "208")], ..trial }.faults(deadlock);
        Trial { changes: &[("EXPECTED", "176")], ..trial }
            .faults(|kind| early(kind) || matches!(kind, FaultKind::Mbarrier(..) | FaultKind::Deadlock(_)));
    }
}

#[test]
fn a_box_must_not_be_read_before_the_wait() {
    for trial in [FLAT, SWIZZLED, Trial { corner: &[1000, 2], ..FLAT }] {
        let wait = "mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0; @!%p1 bra $wait;";
        Trial { changes: &[(wait, "")], ..trial }.faults(early);
        let some = "setp.lt.u32 %p1, %lane, 32; @%p1 bra $over;
            $again: mbarrier.try_wait.parity.shared.b64 %p1, [%bar], 0; @!%p1 bra $again; $over:";
        Trial { changes: &[(wait, some)], ..trial }.faults(early);
    }
}

#[test]
fn writes_before_a_tensor_copy_need_a_fence() {
    let unfenced = |kind: &FaultKind| matches!(kind, FaultKind::Unfenced { .. });
    for trial in [FLAT, SWIZZLED] {
        let store = "@%first st.shared.b32 [%to], 1; FENCE @!%first bra $wait;";
        let change = |fence: &str, check: &dyn Fn(Trial)| {
            check(Trial { changes: &[("@!%first bra $wait;", &store.replace("FENCE", fence))], ..trial });
        };
        change("", &|trial| trial.faults(unfenced));
        change("fence.proxy.async.shared::cta;", &|trial| trial.copies());
    }
    // The launch must not write the source.
    let store =
        "@%first ld.global.b64 %d3, [%other+8]; @%first st.global.b8 [%d3+234], 1; @!%first bra $wait;";
    Trial { changes: &[("@!%first bra $wait;", store)], ..FLAT }.faults(unfenced);
}

#[test]
fn destinations_must_be_aligned_and_in_one_variable() {
    for trial in [FLAT, SWIZZLED] {
        for offset in [16, 64, 1000] {
            Trial { offset, ..trial }.faults(|kind| {
                matches!(kind, FaultKind::Misaligned(access)
                    if access.space == Space::Shared && access.bytes == 128)
            });
        }
        Trial { offset: SHARED - 128, ..trial }
            .faults(|kind| matches!(kind, FaultKind::OutOfBounds(access) if access.space == Space::Shared));
    }
    let copy = "COPY [%to+OFFSET], [%map, CORNER], [%bar];";
    let two = "COPY [%to+OFFSET], [%map, CORNER], [%bar]; COPY [%to+OFFSET+128], [%map, CORNER], [%bar];";
    let two = two.replace("OFFSET+128", "128");
    Trial { changes: &[(copy, &two)], ..SWIZZLED }.faults(early);
}

#[test]
fn maps_may_be_in_parameters_or_in_buffers() {
    for trial in [FLAT, SWIZZLED] {
        Trial { changes: &[IN_BUFFER], ..trial }.copies();
        // The parameter is on its alignment, and so is the space, but on no more.
        let check = "setp.eq.u64 %p1, %d1, 64; @!%p1 trap; sub.s64 %d2, %map, %d1; and.b64 %d2, %d2, 127;
            setp.eq.u64 %p1, %d2, 64; @!%p1 trap; @!%first bra $wait;";
        Trial { changes: &[("@!%first bra $wait;", check)], ..trial }.copies();
    }
    let map = TensorMap::new(256, &[16, 1], &[16], &[16, 1], Swizzle::None).unwrap();
    assert_eq!(crate::Argument::from(map), crate::Argument::bytes(map.encode()));
}

#[test]
fn bad_maps_are_faults() {
    let bad = |kind: &FaultKind| matches!(kind, FaultKind::TensorMap(..));
    let misplaced = |kind: &FaultKind| {
        matches!(kind, FaultKind::OutOfBounds(access) | FaultKind::Misaligned(access)
            if access.space == Space::Global)
    };
    let changes: [fn(TensorMap) -> Vec<u8>; 4] = [
        |_| vec![0; 128],
        |map| [&map.encode()[64..], &map.encode()[..64]].concat(),
        // A size of 0.
        |map| [&map.encode()[..32], &[0; 8], &map.encode()[40..]].concat(),
        // Bytes after the last field.
        |map| [&map.encode()[..127], &[1]].concat(),
    ];
    for encode in changes {
        Trial { encode, ..FLAT }.faults(bad);
        Trial { encode, changes: &[IN_BUFFER], ..FLAT }.faults(bad);
    }
    let at = |map: &str, expected: fn(&FaultKind) -> bool| {
        let change = format!("{map}; @!%first bra $wait;");
        Trial { changes: &[("@!%first bra $wait;", &change)], ..FLAT }.faults(expected);
    };
    at("add.s64 %map, %map, 32", bad);
    at("add.s64 %map, %map, 64", bad);
    at("add.s64 %map, %map, -64", bad);
    at("add.s64 %map, %map, 256", misplaced);
    // An address in the parameter space is not generic.
    at("mov.b64 %map, %d1", misplaced);
    at("add.s64 %map, %other, 32", misplaced);
    at("add.s64 %map, %other, 64", bad);
    at("add.s64 %map, %other, 128", misplaced);
    Trial { changes: &[(".align 64 .b8", ".align 16 .b8")], ..FLAT }.faults(bad);
    // The map has another rank than the instruction.
    let flat = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes";
    Trial { changes: &[("COPY", flat), ("CORNER", "{%x, %y}")], ..SWIZZLED }.faults(bad);
    let deep = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes";
    Trial { changes: &[("COPY", deep), ("CORNER", "{%x, %y, 0}")], ..FLAT }.faults(bad);
}

#[test]
fn maps_must_be_constant() {
    let constant = |kind: &FaultKind| matches!(kind, FaultKind::NotConstant(_));
    let store = "@%first ld.global.b64 %d3, [%other+120]; @%first st.global.b64 [%other+120], %d3;";
    let before = format!("{store} @!%first bra $wait;");
    Trial { changes: &[IN_BUFFER, ("@!%first bra $wait;", &before)], ..FLAT }.faults(constant);
    let after = format!("$end: {store}");
    Trial { changes: &[IN_BUFFER, ("$end:", &after)], ..FLAT }.faults(constant);
}

#[test]
fn only_elements_in_the_tensor_are_read() {
    // The map describes one more row and plane than there are.
    let longer: fn(TensorMap) -> Vec<u8> = |map| {
        let mut bytes = map.encode();
        bytes[40] += 1;
        bytes.into()
    };
    let outside = |kind: &FaultKind| {
        matches!(kind, FaultKind::OutOfBounds(access)
            if access.space == Space::Global && access.bytes == 48)
    };
    Trial { encode: longer, ..FLAT }.copies();
    Trial { encode: longer, corner: &[5, 4], ..FLAT }.faults(outside);
    // Unwritten bytes after the end of a row.
    let wider: fn(TensorMap) -> Vec<u8> = |map| {
        let mut bytes = map.encode();
        bytes[32] += 1;
        bytes.into()
    };
    Trial { encode: wider, ..FLAT }.copies();
    Trial { encode: wider, corner: &[80, 2], ..FLAT }
        .faults(|kind| matches!(kind, FaultKind::Uninitialised(access) if access.space == Space::Global));
}
