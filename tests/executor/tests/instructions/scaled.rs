//! Tests `mma` with block scales.
//!
//! Fragments and selectors are placed by the ISA's formulas. `fp4_dot`, which is compared with
//! MMA-Sim's golden vectors, has the sums, and the crate `float4` has the exact ones.

use float4::F4E2M1;
use microscale_executor::{Approximation, FaultKind, Launch, Memory, Module};
use microscale_formats::{Format, fp4_dot};

/// An opcode's kind, number of scales and type of scales, and the format.
type Form = (&'static str, Format);

const FORMS: [Form; 4] = [
    ("kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", Format::Nvfp4),
    ("kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", Format::Mxfp4),
    ("kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", Format::Mxfp4),
    ("kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0", Format::Mxfp4),
];

/// The selected byte, the pair of lanes for A and the lane for B.
#[derive(Clone, Copy, Debug)]
struct Selection {
    bytes: [u32; 2],
    threads: [u32; 2],
}

impl Selection {
    const FIRST: Self = Self { bytes: [0, 0], threads: [0, 0] };

    /// Returns all that a format has.
    fn all(format: Format) -> Vec<Self> {
        let bytes: &[u32] = if format == Format::Nvfp4 { &[0] } else { &[0, 2] };
        let mut all = Vec::new();
        for &a in bytes {
            for &b in bytes {
                all.extend((0..8).map(|i| Self { bytes: [a, b], threads: [i / 4, i % 4] }));
            }
        }
        all
    }

    /// Returns the row of A whose scales a lane holds.
    fn row(self, lane: usize) -> Option<usize> {
        let first = 2 * self.threads[0] as usize;
        (lane % 4 / 2 * 2 == first).then(|| lane / 4 + lane % 2 * 8)
    }

    /// Returns the column of B whose scales a lane holds.
    fn column(self, lane: usize) -> Option<usize> {
        (lane % 4 == self.threads[1] as usize).then_some(lane / 4)
    }
}

/// D = A·B + C. A has 16 rows and B 8 columns of 64 codes, each with up to four scales.
#[derive(Clone)]
struct Product {
    a: Vec<([u8; 64], [u8; 4])>,
    b: Vec<([u8; 64], [u8; 4])>,
    c: [[f32; 8]; 16],
}

impl Product {
    fn random(rng: &mut fastrand::Rng, mut scale: impl FnMut(&mut fastrand::Rng) -> u8) -> Self {
        let mut one = |_| ([(); 64].map(|()| rng.u8(..16)), [(); 4].map(|()| scale(rng)));
        Self { a: (0..16).map(&mut one).collect(), b: (0..8).map(&mut one).collect(), c: [[0.0; 8]; 16] }
    }

    /// Returns a lane's 12 words: four of A, two of B, four of C, and the scales.
    ///
    /// `other` has the bytes of scales that are not selected.
    fn fragment(&self, format: Format, lane: usize, of: Selection, other: &mut fastrand::Rng) -> [u32; 12] {
        let (group, place) = (lane >> 2, lane % 4);
        let word = |codes: &[u8; 64], from: usize| {
            (0..8).fold(0, |word, i| word | u32::from(codes[from + i]) << (4 * i))
        };
        let a = |i: usize| word(&self.a[group + i % 2 * 8].0, 8 * place + i / 2 * 32);
        let b = |i: usize| word(&self.b[group].0, 8 * place + i * 32);
        let c = |i: usize| {
            let (row, column) = place_of(lane, i);
            self.c[row][column].to_bits()
        };
        let count = fp4_dot::STEP / format.block();
        let mut scales = |held: Option<&([u8; 64], [u8; 4])>, byte: u32| {
            let mut bytes = other.u32(..).to_le_bytes();
            if let Some((_, scales)) = held {
                bytes[byte as usize..][..count].copy_from_slice(&scales[..count]);
            }
            u32::from_le_bytes(bytes)
        };
        let sa = scales(of.row(lane).map(|row| &self.a[row]), of.bytes[0]);
        let sb = scales(of.column(lane).map(|column| &self.b[column]), of.bytes[1]);
        [a(0), a(1), a(2), a(3), b(0), b(1), c(0), c(1), c(2), c(3), sa, sb]
    }

    /// Returns the words of all lanes.
    fn fragments(&self, format: Format, of: Selection, seed: u64) -> Vec<[u32; 12]> {
        let mut other = fastrand::Rng::with_seed(seed);
        (0..32).map(|lane| self.fragment(format, lane, of, &mut other)).collect()
    }

    /// Returns an element of D by `fp4_dot`.
    fn element(&self, format: Format, row: usize, column: usize) -> f32 {
        let packed =
            |codes: &[u8; 64]| codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect::<Vec<_>>();
        let count = fp4_dot::STEP / format.block();
        let ((a, sa), (b, sb)) = (&self.a[row], &self.b[column]);
        let (a, b) = (packed(a), packed(b));
        let (a, b) = ((&a[..], &sa[..count]), (&b[..], &sb[..count]));
        match self.c[row][column] {
            0.0 => fp4_dot::row(format, a, b),
            c => fp4_dot::step(c, fp4_dot::terms(format, a, b)),
        }
    }
}

/// Returns the row and column of a lane's element of C and D.
fn place_of(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, lane % 4 * 2 + (i & 1))
}

/// Returns a module with this form of `mma`. `scales` holds its last operands, and `before` runs
/// first.
fn text(target: &str, kind: &str, scales: &str, before: &str) -> String {
    format!(
        ".version 8.8 .target {target} .address_size 64
        .visible .entry test(.param .u64 inputs, .param .u64 outputs) {{
            .reg .b32 %r<8>; .reg .b32 %a<4>; .reg .b32 %b<2>; .reg .f32 %c<4>; .reg .f32 %d<4>; .reg .b32 %sa, %sb;
            .reg .b64 %from; .reg .b64 %to; .reg .b64 %place; .reg .pred %p; .reg .b16 %h<4>;
            ld.param.u64 %from, [inputs]; ld.param.u64 %to, [outputs];
            mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 32, %r0;
            mul.wide.u32 %place, %r0, 48; add.s64 %from, %from, %place;
            mul.wide.u32 %place, %r0, 16; add.s64 %to, %to, %place;
            ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%from]; ld.global.v2.b32 {{%b0, %b1}}, [%from+16];
            ld.global.v2.f32 {{%c0, %c1}}, [%from+24]; ld.global.v2.f32 {{%c2, %c3}}, [%from+32];
            {before}
            mma.sync.aligned.m16n8k64.row.col.{kind}
                {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c1, %c2, %c3}}, {scales};
            st.global.v4.f32 [%to], {{%d0, %d1, %d2, %d3}};
            ret;
        }}"
    )
}

/// Loads the scales of all lanes.
const LOAD: &str = "ld.global.v2.b32 {%sa, %sb}, [%from+40];";

/// Returns the last operands with numbers as selectors.
fn operands(Selection { bytes, threads }: Selection) -> String {
    format!("%sa, {{{}, {}}}, {{%sb}}, {{{}, {}}}", bytes[0], threads[0], bytes[1], threads[1])
}

/// Runs a module, one block per 32 lanes, and returns the matrices D.
fn run(text: &str, lanes: &[[u32; 12]]) -> Result<Vec<[[f32; 8]; 16]>, FaultKind> {
    let module = Module::parse(text).unwrap();
    let bytes: Vec<u8> = lanes.iter().flatten().copied().flat_map(u32::to_le_bytes).collect();
    let mut memory = Memory::new();
    let inputs = memory.allocate_from("inputs", &bytes);
    let outputs = memory.allocate("outputs", lanes.len() * 16);
    // The sums must not depend on it.
    let launch = Launch::new(lanes.len() as u32 / 32, 32).approximation(Approximation::Low);
    let kernel = module.kernel("test").unwrap_or_else(|error| panic!("{error}"));
    kernel.run(&mut memory, &launch, &[inputs.into(), outputs.into()]).map_err(|fault| *fault.kind)?;
    let bytes = memory.bytes(outputs).unwrap();
    let of_lanes = |words: &[[u8; 4]]| {
        let mut d = [[0.0; 8]; 16];
        for (at, word) in words.iter().enumerate() {
            let (row, column) = place_of(at / 4, at % 4);
            d[row][column] = f32::from_le_bytes(*word);
        }
        d
    };
    Ok(bytes.as_chunks().0.chunks(128).map(of_lanes).collect())
}

/// Returns a scale byte: NaN, zero, a subnormal or any other.
fn special(format: Format, rng: &mut fastrand::Rng) -> u8 {
    match (format, rng.u32(..60)) {
        (Format::Nvfp4, 0) => 0x7F | rng.u8(..2) << 7,
        (Format::Nvfp4, 1..5) => 0,
        (Format::Nvfp4, 5..12) => rng.u8(1..8),
        (Format::Nvfp4, _) => rng.u8(..0x7F),
        (_, 0) => 0xFF,
        (_, 1..5) => rng.u8(..2),
        (_, 5..12) => rng.u8(..0xFF),
        _ => rng.u8(120..136),
    }
}

#[test]
fn sums_are_those_of_fp4_dot_for_every_form_and_selector() {
    let mut rng = fastrand::Rng::with_seed(1);
    for (kind, format) in FORMS {
        let (mut nan, mut zero) = (0, 0);
        for selection in Selection::all(format) {
            let mut products: Vec<_> =
                (0..12).map(|_| Product::random(&mut rng, |rng| special(format, rng))).collect();
            for product in &mut products[4..] {
                product.c = [(); 16].map(|()| {
                    [(); 8].map(|()| match rng.u32(..16) {
                        0 => f32::from_bits(rng.u32(..)),
                        1 => f32::INFINITY,
                        _ => (rng.f32() - 0.5) * 2f32.powi(rng.i32(-20..20)),
                    })
                });
            }
            let lanes: Vec<_> = products
                .iter()
                .flat_map(|product| product.fragments(format, selection, rng.u64(..)))
                .collect();
            let found = run(&text("sm_120f", kind, &operands(selection), LOAD), &lanes).unwrap();
            for (product, found) in products.iter().zip(found) {
                for (row, found) in found.iter().enumerate() {
                    for (column, found) in found.iter().enumerate() {
                        let expected = product.element(format, row, column);
                        assert_eq!(found.to_bits(), expected.to_bits(), "{kind}, {selection:?}");
                        (nan, zero) = (nan + usize::from(found.is_nan()), zero + usize::from(*found == 0.0));
                    }
                }
            }
        }
        assert!(nan > 100 && nan > zero, "{kind}: {nan} NaN, {zero} zeros");
    }
}

/// With scales near 1 and small addends, nothing is truncated.
#[test]
fn small_sums_are_exact() {
    let mut rng = fastrand::Rng::with_seed(2);
    for (kind, format) in FORMS {
        // 2^(s - 127) of E8M0, and 2^(s / 8 - 7) of E4M3 without a fraction.
        let (one, unit) = if format == Format::Nvfp4 { (7, 8) } else { (127, 1) };
        let mut product = Product::random(&mut rng, |rng| (one - 2 + rng.u8(..5)) * unit);
        product.c = [(); 16].map(|()| [(); 8].map(|()| f32::from(rng.i16(-1000..1000)) / 64.0));
        let lanes = product.fragments(format, Selection::FIRST, 3);
        let found = run(&text("sm_120a", kind, &operands(Selection::FIRST), LOAD), &lanes).unwrap()[0];
        let value = |(codes, scales): &([u8; 64], [u8; 4]), k: usize| {
            let exponent = i32::from(scales[k / format.block()] / unit) - i32::from(one);
            F4E2M1::from_bits(codes[k]).to_f64() * 2f64.powi(exponent)
        };
        for (row, found) in found.iter().enumerate() {
            for (column, &found) in found.iter().enumerate() {
                let products = (0..64).map(|k| value(&product.a[row], k) * value(&product.b[column], k));
                let sum: f64 = products.sum::<f64>() + f64::from(product.c[row][column]);
                assert_eq!(f64::from(found), sum, "{kind}, row {row}, column {column}");
            }
        }
    }
}

/// Changing a lane's word changes exactly the row of A or column of B that the lane holds.
#[test]
fn every_word_of_every_lane_counts_in_its_place_only() {
    let mut rng = fastrand::Rng::with_seed(4);
    for (kind, format) in [FORMS[0], FORMS[2]] {
        let one = if format == Format::Nvfp4 { 0x38 } else { 127 };
        for selection in Selection::all(format) {
            let mut product = Product::random(&mut rng, |_| one);
            // Ones, so that every change of a code or a scale changes the sums.
            product.a.iter_mut().chain(&mut product.b).for_each(|(codes, _)| codes.fill(2));
            let lanes = product.fragments(format, selection, 5);
            let text = text("sm_120f", kind, &operands(selection), LOAD);
            let before = run(&text, &lanes).unwrap()[0];
            let mut changed = Vec::new();
            for lane in 0..32 {
                for word in (0..6).chain(10..12) {
                    let mut other = lanes.clone();
                    // The lowest selected code or scale.
                    let byte = if word < 10 { 0 } else { selection.bytes[word - 10] };
                    other[lane][word] ^= 1 << (byte * 8);
                    changed.extend(other);
                }
            }
            let after = run(&text, &changed).unwrap();
            for (i, after) in after.iter().enumerate() {
                let (lane, word) = (i / 8, [0, 1, 2, 3, 4, 5, 10, 11][i % 8]);
                let (of_a, held) = match word {
                    0..4 => (true, Some(lane / 4 + word % 2 * 8)),
                    4 | 5 => (false, Some(lane / 4)),
                    10 => (true, selection.row(lane)),
                    _ => (false, selection.column(lane)),
                };
                for row in 0..16 {
                    for column in 0..8 {
                        let place = if of_a { row } else { column };
                        let equal = before[row][column] == after[row][column];
                        assert_eq!(equal, Some(place) != held, "{kind}, {selection:?}, {lane}, {word}");
                    }
                }
            }
            product.a.iter_mut().enumerate().for_each(|(row, (codes, _))| codes[0] = row as u8 % 8);
            let lanes = product.fragments(format, selection, 5);
            let mut exchanged = lanes.clone();
            exchanged.swap(0, 4);
            assert_ne!(run(&text, &exchanged).unwrap(), run(&text, &lanes).unwrap());
        }
        let [first, .., last] = &Selection::all(format)[..] else { panic!("no selectors") };
        let product = Product::random(&mut rng, |rng| special(format, rng));
        let lanes = product.fragments(format, *first, 6);
        let under = |of: Selection| run(&self::text("sm_120f", kind, &operands(of), LOAD), &lanes).unwrap();
        let bits = |of| under(of)[0].map(|row| row.map(f32::to_bits));
        assert_ne!(bits(*first), bits(*last));
    }
}

#[test]
fn lanes_that_are_not_selected_need_no_scales() {
    let mut rng = fastrand::Rng::with_seed(7);
    for (kind, format) in FORMS {
        for selection in Selection::all(format) {
            let product = Product::random(&mut rng, |rng| special(format, rng));
            let lanes = product.fragments(format, selection, 8);
            let load = |a: u32, b: u32| {
                format!(
                    "and.b32 %r2, %r0, 2; setp.eq.u32 %p, %r2, {}; @%p ld.global.b32 %sa, [%from+40];
                    and.b32 %r2, %r0, 3; setp.eq.u32 %p, %r2, {b}; @%p ld.global.b32 %sb, [%from+44];",
                    2 * a
                )
            };
            let [a, b] = selection.threads;
            let of = |before: &str| run(&text("sm_120f", kind, &operands(selection), before), &lanes);
            let bits = |d: Vec<[[f32; 8]; 16]>| d[0].map(|row| row.map(f32::to_bits));
            assert_eq!(of(&load(a, b)).map(bits), of(LOAD).map(bits));
            for before in [load(1 - a, b), load(a, (b + 1) % 4)] {
                assert!(matches!(of(&before), Err(FaultKind::UnwrittenRegister(_))), "{selection:?}");
            }
        }
    }
}

/// LLVM writes selectors as registers.
#[test]
fn selectors_in_registers_must_exist_and_agree() {
    let mut rng = fastrand::Rng::with_seed(9);
    let (kind, format) = FORMS[2];
    let selection = Selection { bytes: [2, 0], threads: [1, 3] };
    let product = Product::random(&mut rng, |rng| special(format, rng));
    let lanes = product.fragments(format, selection, 10);
    let of = |values: [&str; 4]| {
        let moves: String = (0..4).map(|i| format!("mov.b16 %h{i}, {};", values[i])).collect();
        let scales = "%sa, {%h0, %h1}, %sb, {%h2, %h3}";
        run(&text("sm_121f", kind, scales, &format!("cvt.u16.u32 %h0, %r0; {LOAD} {moves}")), &lanes)
    };
    let bits = |d: Vec<[[f32; 8]; 16]>| d[0].map(|row| row.map(f32::to_bits));
    let by_numbers = run(&text("sm_121a", kind, &operands(selection), LOAD), &lanes);
    assert_eq!(of(["2", "1", "0", "3"]).map(bits), by_numbers.map(bits));
    for values in [["1", "1", "0", "3"], ["2", "2", "0", "3"], ["2", "1", "3", "3"], ["2", "1", "0", "4"]] {
        assert!(matches!(of(values), Err(FaultKind::ScaleSelector { .. })), "{values:?}");
    }
    assert!(matches!(of(["%h0", "1", "0", "3"]), Err(FaultKind::NotUniform(_))));
}

#[test]
fn wrong_selectors_forms_and_targets_are_refused() {
    let refused = |target: &str, kind: &str, scales: &str, part: &str| {
        let module = Module::parse(&text(target, kind, scales, LOAD)).unwrap();
        let error = module.kernel("test").unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    let plain = operands(Selection::FIRST);
    for (kind, format) in FORMS {
        for target in ["sm_90a", "sm_100f", "sm_120"] {
            refused(target, kind, &plain, "has no block scales");
        }
        let wrong = |bytes, threads| {
            refused("sm_120f", kind, &operands(Selection { bytes, threads }), "selector");
        };
        for byte in [1, 3, 4] {
            wrong([byte, 0], [0, 0]);
            wrong([0, byte], [0, 0]);
        }
        if format == Format::Nvfp4 {
            wrong([2, 0], [0, 0]);
            wrong([0, 2], [0, 0]);
        }
        wrong([0, 0], [2, 0]);
        wrong([0, 0], [0, 4]);
        refused("sm_120f", kind, "%sa, %sb", "operands");
        refused("sm_120f", kind, "%sa, 0, %sb, {0, 0}", "{byte, thread}");
    }
    for kind in [
        "kind::mxf4nvf4.block_scale.f32.e2m1.e2m1.f32.ue4m3",
        "kind::mxf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue8m0",
        "kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue4m3",
        "kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e2m1.f32.ue8m0",
    ] {
        refused("sm_120f", kind, &plain, "block scales of this kind");
    }
}
