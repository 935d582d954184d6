//! Tests `mma` of FP4 with block scales, against the definition of its sums, which the executor uses
//! too. The golden vectors of MMA-Sim test the definition.
//!
//! Fragments are placed by the ISA's formulas: element i of a lane's A is at row `group` if its
//! register is even and `group + 8` if it is odd, and B has columns for rows.

use microscale_executor::{FaultKind, Launch, Memory, Module};
use microscale_formats::{Format, fp4_dot};

/// The kind in the opcode, bytes of scales per row, and values of the selectors.
struct Kind {
    format: Format,
    opcode: &'static str,
    scales: usize,
    bytes: &'static [u32],
}

const KINDS: [Kind; 3] = [
    Kind {
        format: Format::Nvfp4,
        opcode: "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
        scales: 4,
        bytes: &[0],
    },
    Kind {
        format: Format::Mxfp4,
        opcode: "kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
        scales: 2,
        bytes: &[0, 2],
    },
    Kind {
        format: Format::Mxfp4,
        opcode: "kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
        scales: 2,
        bytes: &[0, 2],
    },
];

/// D = A·B + C with codes of 64 elements per row of A and column of B, and their scales.
struct Product {
    a: [([u8; 32], [u8; 4]); 16],
    b: [([u8; 32], [u8; 4]); 8],
    c: [[f32; 8]; 16],
}

impl Product {
    fn random(format: Format, random: &mut fastrand::Rng) -> Self {
        let nan = if format == Format::Nvfp4 { 0x7F } else { 0xFF };
        let scale = |random: &mut fastrand::Rng| match random.u8(..) {
            0 => nan,
            1 => 0,
            2 => 1,
            3..10 => random.u8(..nan),
            _ if format == Format::Nvfp4 => random.u8(0x20..0x58),
            _ => random.u8(110..140),
        };
        let mut line = || {
            let codes = std::array::from_fn(|_| random.u8(..));
            (codes, std::array::from_fn(|_| scale(random)))
        };
        let (a, b) = (std::array::from_fn(|_| line()), std::array::from_fn(|_| line()));
        let mut addend = || if random.bool() { 0.0 } else { random.f32() * 4096.0 - 2048.0 };
        Self { a, b, c: [(); 16].map(|()| [(); 8].map(|()| addend())) }
    }

    /// Returns a lane's ten words, then its words of scales under the selectors. Words that no
    /// selector chooses are all ones.
    fn words(&self, lane: usize, kind: &Kind, [[byte_a, a], [byte_b, b]]: [[u32; 2]; 2]) -> [u32; 12] {
        let (group, place) = (lane >> 2, lane % 4);
        let codes = |line: &[u8; 32], half: usize| {
            u32::from_le_bytes(*line[16 * half + 4 * place..].first_chunk().unwrap())
        };
        let of_a = |i: usize| codes(&self.a[group + 8 * (i % 2)].0, i / 2);
        let of_c = |i: usize| self.c[group + 8 * (i / 2)][2 * place + i % 2].to_bits();
        let scales = |scales: &[u8; 4], byte: u32| {
            let mut word = [0xAA; 4];
            word[byte as usize..][..kind.scales].copy_from_slice(&scales[..kind.scales]);
            u32::from_le_bytes(word)
        };
        let of_row = place.wrapping_sub(2 * a as usize);
        let scale_a = if of_row < 2 { scales(&self.a[group + 8 * of_row].1, byte_a) } else { u32::MAX };
        let scale_b = if place == b as usize { scales(&self.b[group].1, byte_b) } else { u32::MAX };
        let of_b = |half: usize| codes(&self.b[group].0, half);
        let [a, c] = [[0, 1, 2, 3].map(of_a), [0, 1, 2, 3].map(of_c)];
        [a[0], a[1], a[2], a[3], of_b(0), of_b(1), c[0], c[1], c[2], c[3], scale_a, scale_b]
    }

    fn expected(&self, kind: &Kind, row: usize, column: usize) -> u32 {
        let (a, b) = (&self.a[row], &self.b[column]);
        let (a, b) = ((&a.0[..], &a.1[..kind.scales]), (&b.0[..], &b.1[..kind.scales]));
        fp4_dot::step(self.c[row][column], fp4_dot::terms(kind.format, a, b)).to_bits()
    }
}

/// Runs a product. Lanes whose scales no selector chooses do not write these registers.
fn run(
    product: &Product,
    kind: &Kind,
    [a, b]: [[u32; 2]; 2],
    changed: impl Fn(&str) -> String,
) -> Result<Vec<u32>, FaultKind> {
    let text = format!(
        ".version 8.8 .target sm_120f .address_size 64
        .visible .entry test(.param .u64 inputs, .param .u64 outputs) {{
            .reg .b32 %t; .reg .b32 %q; .reg .b32 %a<4>; .reg .b32 %b<2>; .reg .f32 %c<4>; .reg .b32 %s<2>; .reg .b16 %byte; .reg .b64 %from; .reg .b64 %to; .reg .b64 %place; .reg .pred %p;
            ld.param.u64 %from, [inputs]; ld.param.u64 %to, [outputs];
            mov.u32 %t, %tid.x; and.b32 %q, %t, 3;
            mul.wide.u32 %place, %t, 48; add.s64 %from, %from, %place;
            mul.wide.u32 %place, %t, 16; add.s64 %to, %to, %place;
            ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%from]; ld.global.v2.b32 {{%b0, %b1}}, [%from+16];
            ld.global.v2.f32 {{%c0, %c1}}, [%from+24]; ld.global.v2.f32 {{%c2, %c3}}, [%from+32];
            setp.eq.u32 %p, %q, {}; @%p ld.global.b32 %s0, [%from+40];
            setp.eq.u32 %p, %q, {}; @%p ld.global.b32 %s0, [%from+40];
            setp.eq.u32 %p, %q, {}; @%p ld.global.b32 %s1, [%from+44];
            mov.b16 %byte, {};
            mma.sync.aligned.m16n8k64.row.col.{} {{%c0, %c1, %c2, %c3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c1, %c2, %c3}}, %s0, {{%byte, {}}}, %s1, {{{}, {}}};
            st.global.v4.f32 [%to], {{%c0, %c1, %c2, %c3}};
            ret;
        }}",
        2 * a[1], 2 * a[1] + 1, b[1], a[0], kind.opcode, a[1], b[0], b[1],
    );
    let module = Module::parse(&changed(&text)).unwrap();
    let words = (0..32).flat_map(|lane| product.words(lane, kind, [a, b]));
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let mut memory = Memory::new();
    let inputs = memory.allocate_from("inputs", &bytes);
    let outputs = memory.allocate("outputs", 512);
    let launch = Launch::new(1, 32);
    let done = module.kernel("test").unwrap().run(&mut memory, &launch, &[inputs.into(), outputs.into()]);
    done.map_err(|fault| *fault.kind)?;
    Ok(memory.bytes(outputs).unwrap().as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// All selectors of a kind.
fn selectors(kind: &Kind) -> Vec<[[u32; 2]; 2]> {
    let bytes = kind.bytes.iter().flat_map(|a| kind.bytes.iter().map(move |b| [*a, *b]));
    let threads = |[x, y]: [u32; 2]| (0..8).map(move |i| [[x, i % 2], [y, i / 2]]);
    bytes.flat_map(threads).collect()
}

#[test]
fn sums_are_the_definition_s_for_every_selector() {
    let mut random = fastrand::Rng::with_seed(7);
    for kind in &KINDS {
        for selectors in selectors(kind) {
            let product = Product::random(kind.format, &mut random);
            let found = run(&product, kind, selectors, str::to_owned).unwrap();
            for (at, found) in found.iter().enumerate() {
                let (lane, i) = (at / 4, at % 4);
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let expected = product.expected(kind, row, column);
                assert_eq!(*found, expected, "{}, {selectors:?}, row {row}, column {column}", kind.opcode);
            }
        }
    }
}

#[test]
fn other_lanes_scales_are_not_read_and_other_selectors_are_faults() {
    let mut random = fastrand::Rng::with_seed(8);
    for kind in &KINDS {
        let product = Product::random(kind.format, &mut random);
        let right = [[0, 1], [0, 2]];
        // The scales of the lanes that were not selected are never written.
        let other = |text: &str| text.replace("{0, 2};", "{0, 1};");
        let found = run(&product, kind, right, other);
        assert!(matches!(found, Err(FaultKind::UnwrittenRegister(_))), "{found:?}");
        let byte = if kind.scales == 4 { 2 } else { 1 };
        for (from, to) in
            [("%byte, 1}", "%byte, 2}"), ("{0, 2};", "{0, 4};"), ("{0, 2};", &format!("{{{byte}, 2}};"))]
        {
            let found = run(&product, kind, right, |text| text.replace(from, to));
            assert!(matches!(found, Err(FaultKind::ScaleSelector(_))), "{to}: {found:?}");
        }
    }
}

#[test]
fn other_forms_are_not_known() {
    for wrong in [
        "kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0",
    ] {
        let text = format!(
            ".version 8.8 .target sm_120f .address_size 64 .visible .entry test() {{ .reg .b32 %r<12>;
            mma.sync.aligned.m16n8k64.row.col.{wrong} {{%r0, %r0, %r0, %r0}}, {{%r0, %r0, %r0, %r0}}, {{%r0, %r0}}, {{%r0, %r0, %r0, %r0}}, %r0, {{0, 0}}, %r0, {{0, 0}};
            ret; }}"
        );
        let kernel = Module::parse(&text).unwrap().kernel("test").map(|_| ());
        let message = kernel.unwrap_err().to_string();
        assert!(message.contains("is not supported: this form of mma"), "{message}");
    }
}
