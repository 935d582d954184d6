//! Tests `mma` with f32 sums.
//!
//! Fragments are placed by the ISA's formulas. Sums are computed with exact integers and
//! `rustc_apfloat`.

use half::{bf16, f16};
use microscale_executor::{Approximation, Launch, Memory, Module};
use rustc_apfloat::ieee::Single;
use rustc_apfloat::{Float, Round};

/// D = A·B + C with 16-bit factors.
#[derive(Clone)]
struct Product {
    a: [[u16; 16]; 16],
    b: [[u16; 8]; 16],
    c: [[f32; 8]; 16],
}

/// The type in the opcode, and the decoder of its codes.
#[derive(Clone, Copy)]
pub(super) struct Element {
    pub(super) name: &'static str,
    pub(super) value: fn(u16) -> f64,
}

pub(super) const F16: Element = Element { name: "f16", value: |bits| f16::from_bits(bits).to_f64() };
pub(super) const BF16: Element = Element { name: "bf16", value: |bits| bf16::from_bits(bits).to_f64() };

impl Product {
    fn random(mut element: impl FnMut() -> u16, mut addend: impl FnMut() -> f32) -> Self {
        Self {
            a: [(); 16].map(|()| [(); 16].map(|()| element())),
            b: [(); 16].map(|()| [(); 8].map(|()| element())),
            c: [(); 16].map(|()| [(); 8].map(|()| addend())),
        }
    }

    /// Returns a lane's ten words: four of A, two of B, four of C.
    ///
    /// The formulas are the ones below the ISA's figures.
    fn fragment(&self, lane: usize) -> [u32; 10] {
        let (group, place) = (lane >> 2, lane % 4);
        let a = |i: usize| {
            let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
            let col = if i < 4 { place * 2 + (i & 1) } else { place * 2 + (i & 1) + 8 };
            u32::from(self.a[row][col])
        };
        let b = |i: usize| {
            let row = if i < 2 { place * 2 + (i & 1) } else { place * 2 + (i & 1) + 8 };
            u32::from(self.b[row][group])
        };
        let c = |i: usize| {
            let (row, col) = place_of(lane, i);
            self.c[row][col].to_bits()
        };
        let a2 = |i: usize| a(2 * i) | a(2 * i + 1) << 16;
        let b2 = |i: usize| b(2 * i) | b(2 * i + 1) << 16;
        [a2(0), a2(1), a2(2), a2(3), b2(0), b2(1), c(0), c(1), c(2), c(3)]
    }
}

/// Returns the row and column of a lane's element of C and D.
fn place_of(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, lane % 4 * 2 + (i & 1))
}

/// Runs the products on the executor, one block each.
fn results(products: &[Product], element: Element, approximation: Approximation) -> Vec<[[f32; 8]; 16]> {
    let name = element.name;
    let same: String = (0..4).map(|i| format!("setp.ne.b32 %p, %c{i}, %d{i}; @%p trap; ")).collect();
    let text = format!(
        ".version 8.8 .target sm_80 .address_size 64
        .visible .entry test(.param .u64 inputs, .param .u64 outputs) {{
            .reg .b32 %r<8>; .reg .b32 %a<4>; .reg .b32 %b<2>; .reg .f32 %c<4>; .reg .f32 %d<4>; .reg .b64 %from; .reg .b64 %to; .reg .b64 %place; .reg .pred %p;
            ld.param.u64 %from, [inputs]; ld.param.u64 %to, [outputs];
            mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 32, %r0;
            mul.wide.u32 %place, %r0, 40; add.s64 %from, %from, %place;
            mul.wide.u32 %place, %r0, 16; add.s64 %to, %to, %place;
            ld.global.v2.b32 {{%a0, %a1}}, [%from]; ld.global.v2.b32 {{%a2, %a3}}, [%from+8]; ld.global.v2.b32 {{%b0, %b1}}, [%from+16];
            ld.global.v2.f32 {{%c0, %c1}}, [%from+24]; ld.global.v2.f32 {{%c2, %c3}}, [%from+32];
            mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
                {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c1, %c2, %c3}};
            // Repeated in place, which must not matter.
            mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
                {{%c0, %c1, %c2, %c3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c1, %c2, %c3}};
            {same}
            st.global.v4.f32 [%to], {{%d0, %d1, %d2, %d3}};
            ret;
        }}"
    );
    let module = Module::parse(&text).unwrap();
    let words = products.iter().flat_map(|product| (0..32).flat_map(|lane| product.fragment(lane)));
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let mut memory = Memory::new();
    let inputs = memory.allocate_from("inputs", &bytes);
    let outputs = memory.allocate("outputs", products.len() * 512);
    let launch = Launch::new(products.len() as u32, 32).approximation(approximation);
    module.kernel("test").unwrap().run(&mut memory, &launch, &[inputs.into(), outputs.into()]).unwrap();
    let bytes = memory.bytes(outputs).unwrap();
    let of_lanes = |words: &[[u8; 4]]| {
        let mut d = [[0.0; 8]; 16];
        for (at, word) in words.iter().enumerate() {
            let (row, col) = place_of(at / 4, at % 4);
            d[row][col] = f32::from_le_bytes(*word);
        }
        d
    };
    bytes.as_chunks().0.chunks(128).map(of_lanes).collect()
}

/// Compares all elements with an oracle of the factors, in the order of K, and the addend.
fn compare(
    products: &[Product],
    element: Element,
    approximation: Approximation,
    oracle: impl Fn([(f64, f64); 16], f32, f32),
) {
    for (product, found) in products.iter().zip(results(products, element, approximation)) {
        for (row, found) in found.iter().enumerate() {
            for (col, &found) in found.iter().enumerate() {
                let factors = std::array::from_fn(|k| {
                    ((element.value)(product.a[row][k]), (element.value)(product.b[k][col]))
                });
                oracle(factors, product.c[row][col], found);
            }
        }
    }
}

/// Returns the addends as integers in units of 2^−60. All of these numbers are multiples of it.
fn integers(factors: [(f64, f64); 16], c: f32) -> Vec<i128> {
    let scaled = |x: f64, bits: i32| {
        let x = x * 2f64.powi(bits);
        assert!(x == x.trunc() && x.abs() < 2f64.powi(120));
        x as i128
    };
    let products = factors.iter().map(|&(a, b)| scaled(a, 30) * scaled(b, 30));
    products.chain([scaled(c.into(), 60)]).collect()
}

/// Returns random products whose sums cancel, tie and spread, within the range of `integers`.
fn products(name: &str, seed: u64) -> Vec<Product> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut products = Vec::new();
    for _ in 0..300 {
        // Exponents from a few binades, or from all that fit.
        let spread = [2, 5, 12, 24][rng.usize(..4)];
        let few = rng.bool();
        let mut other = rng.fork();
        let mut element = || {
            let sign = rng.u16(..2) << 15;
            let mantissa = if few { rng.u16(..4) << 5 } else { rng.u16(..128) };
            match name {
                "f16" if spread == 24 => sign | rng.u16(..0x7C00),
                "f16" => sign | (rng.u16(..spread.min(14)) + 8) << 10 | mantissa << 3,
                _ => sign | (rng.u16(..spread) + 127 - 12) << 7 | mantissa,
            }
        };
        let addend = || {
            let exponent = other.u32(127 - 20..127 + 20);
            let mantissa = other.u32(..1 << 23) & !0 << other.u32(..24);
            let zero = other.u32(..8) == 0;
            if zero { 0.0 } else { f32::from_bits(other.u32(..2) << 31 | exponent << 23 | mantissa) }
        };
        products.push(Product::random(&mut element, addend));
    }
    products
}

/// Returns the exact sum, rounded once.
pub(super) fn nearest(factors: [(f64, f64); 16], c: f32) -> f32 {
    // Integers become f32 by rounding to nearest, ties to even.
    integers(factors, c).iter().sum::<i128>() as f32 * 2f32.powi(-60)
}

/// Returns the sum of truncated addends, truncated to 24 bits.
pub(super) fn cut(factors: [(f64, f64); 16], c: f32) -> f32 {
    let cut = |x: i128, bits: u32| x / (1 << bits) * (1 << bits);
    let addends = integers(factors, c);
    let length = |x: i128| 128 - x.unsigned_abs().leading_zeros();
    let longest = addends.iter().map(|&x| length(x)).max().unwrap();
    let sum: i128 = addends.iter().map(|&x| cut(x, longest.saturating_sub(24))).sum();
    cut(sum, length(sum).saturating_sub(24)) as f32 * 2f32.powi(-60)
}

/// Adds one addend after the other.
pub(super) fn in_order(factors: [(f64, f64); 16], c: f32) -> f32 {
    let single = |x: f64| Single::from_bits(u128::from((x as f32).to_bits()));
    let sum = factors.iter().fold(single(c.into()), |sum, &(a, b)| {
        single(a).mul_add_r(single(b), sum, Round::NearestTiesToEven).value
    });
    f32::from_bits(sum.to_bits() as u32)
}

#[test]
fn nearest_rounds_the_exact_sum_once() {
    for (element, seed) in [(F16, 1), (BF16, 2)] {
        compare(&products(element.name, seed), element, Approximation::Nearest, |factors, c, found| {
            assert_eq!(found, nearest(factors, c), "{factors:?} {c}");
        });
    }
}

#[test]
fn lowest_truncates_addends_and_sum_to_24_bits() {
    for (element, seed) in [(F16, 3), (BF16, 4)] {
        compare(&products(element.name, seed), element, Approximation::Low, |factors, c, found| {
            assert_eq!(found, cut(factors, c), "{factors:?} {c}");
        });
    }
}

#[test]
fn highest_adds_products_one_after_the_other() {
    for (element, seed) in [(F16, 5), (BF16, 6)] {
        compare(&products(element.name, seed), element, Approximation::High, |factors, c, found| {
            assert_eq!(found.to_bits(), in_order(factors, c).to_bits(), "{factors:?} {c}");
        });
    }
}

#[test]
fn scattered_orders_differ_and_stay_within_the_bound_of_any_order() {
    let given = products("f16", 7);
    for seed in 0..3 {
        compare(&given, F16, Approximation::Scattered(seed), |factors, c, found| {
            let addends = integers(factors, c);
            let sum: i128 = addends.iter().sum();
            let magnitudes: i128 = addends.iter().map(|x| x.abs()).sum();
            let error = (found as f64 * 2f64.powi(60) - sum as f64).abs();
            assert!(error <= 17.0 * 2f64.powi(-24) * magnitudes as f64, "{factors:?} {c}: {found}");
        });
    }
    let under = |approximation| results(&given, F16, approximation);
    let [one, two, high] =
        [under(Approximation::Scattered(1)), under(Approximation::Scattered(2)), under(Approximation::High)];
    assert!(one != two && one != high && one == under(Approximation::Scattered(1)));
}

#[test]
fn exact_sums_are_equal_in_every_rounding() {
    let mut rng = fastrand::Rng::with_seed(8);
    let mut other = rng.fork();
    for element in [F16, BF16] {
        let mut small = || {
            let x = f32::from(rng.i8(-8..9));
            if element.name == "f16" { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() }
        };
        let given: Vec<_> =
            (0..20).map(|_| Product::random(&mut small, || f32::from(other.i16(..)))).collect();
        for approximation in all() {
            compare(&given, element, approximation, |factors, c, found| {
                let sum: f64 = factors.iter().map(|(a, b)| a * b).sum();
                assert_eq!(f64::from(found), sum + f64::from(c));
            });
        }
    }
}

fn all() -> [Approximation; 4] {
    [Approximation::Nearest, Approximation::Low, Approximation::High, Approximation::Scattered(9)]
}

#[test]
fn nan_and_infinities_follow_ieee() {
    let mut rng = fastrand::Rng::with_seed(9);
    let mut other = rng.fork();
    let infinity = |element: Element| if element.name == "f16" { 0x7C00 } else { 0x7F80 };
    for element in [F16, BF16] {
        let mut special = || {
            let sign = rng.u16(..2) << 15;
            match rng.u32(..60) {
                0 => infinity(element) | sign,
                1 if rng.bool() => infinity(element) | sign | rng.u16(1..0x80),
                2..10 => sign,
                _ => sign | 0x3C00,
            }
        };
        let mut addend = || match other.u32(..20) {
            0 => f32::INFINITY,
            1 => f32::NEG_INFINITY,
            2 => f32::NAN,
            _ => 1.0,
        };
        let given: Vec<_> = (0..100).map(|_| Product::random(&mut special, &mut addend)).collect();
        for approximation in all() {
            let classes = std::cell::RefCell::new([0; 3]);
            compare(&given, element, approximation, |factors, c, found| {
                let sum = factors.iter().fold(f64::from(c), |sum, (a, b)| sum + a * b);
                let class = if sum.is_nan() { 0 } else { 1 + usize::from(sum.is_finite()) };
                classes.borrow_mut()[class] += 1;
                match class {
                    0 => assert_eq!(found.to_bits(), 0x7FFF_FFFF),
                    1 => assert_eq!(f64::from(found), sum),
                    _ => assert!(found.is_finite()),
                }
            });
            assert!(classes.borrow().iter().all(|&count| count > 100), "{classes:?}");
        }
    }
}

/// Zeros, subnormals and sums beyond the largest f32.
#[test]
fn the_ends_of_the_range() {
    let one = |a: [f32; 2], b: [f32; 2], c: f32, approximation| {
        let mut product = Product { a: [[0; 16]; 16], b: [[0; 8]; 16], c: [[c; 8]; 16] };
        for k in 0..2 {
            product.a[0][k] = bf16::from_f32(a[k]).to_bits();
            product.b[k][0] = bf16::from_f32(b[k]).to_bits();
        }
        results(&[product], BF16, approximation)[0][0][0]
    };
    let least = f32::from_bits(1);
    for approximation in all() {
        let of = |a, b, c| one(a, b, c, approximation.clone());
        assert_eq!(of([2f32.powi(-100), 0.0], [2f32.powi(-49), 0.0], 0.0), least);
        assert_eq!(of([2f32.powi(-133), 0.0], [0.5, 0.0], 3.0 * least), 2f32.powi(-134) + 3.0 * least);
        assert_eq!(of([2f32.powi(-133), 0.0], [2f32.powi(-133), 0.0], 0.0), 0.0);
        assert_eq!(of([1.0, -1.0], [3.0, 3.0], 0.0).to_bits(), 0);
        assert_eq!(of([1.0, 0.0], [0.0, 0.0], f32::MAX), f32::MAX);
    }
    // A tie, broken only by an addend that no f64 can hold next to it.
    let beside =
        |rest| one([2f32.powi(-12), rest], [2f32.powi(-12), 2f32.powi(-50)], 1.0, Approximation::Nearest);
    assert_eq!(beside(0.0), 1.0);
    assert_eq!(beside(-(2f32.powi(-50))), 1.0);
    assert_eq!(beside(2f32.powi(-50)), 1f32.next_up());
    let (huge, one_and) = ([2f32.powi(100), 1.0], [2f32.powi(100), 1.0]);
    assert_eq!(one(huge, one_and, 0.0, Approximation::Nearest), f32::INFINITY);
    assert_eq!(one(huge, one_and, 0.0, Approximation::Low), f32::MAX);
    // Exceeds f32's range in between and returns. An exact sum is not affected.
    let back = ([2f32.powi(100), -(2f32.powi(100))], [2f32.powi(100), 2f32.powi(100)]);
    assert_eq!(one(back.0, back.1, 5.0, Approximation::Nearest), 5.0);
    assert_eq!(one(back.0, back.1, 5.0, Approximation::High), f32::INFINITY);
}
