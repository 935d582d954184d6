//! Tests f64 arithmetic, comparisons, and conversions to and from f64.

use std::cmp::Ordering;

use rustc_apfloat::ieee::{Double, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

use super::probe::{Check, Oracle, f32_edges, run, triples};

const NAN: u64 = 0x7FFF_FFFF_FFFF_FFFF;

fn double(bits: u64) -> Double {
    Double::from_bits(u128::from(bits))
}

/// Returns a result's bits. Every NaN is the canonical one.
fn bits(value: Double) -> Option<u64> {
    Some(if value.is_nan() { NAN } else { value.to_bits() as u64 })
}

/// Compares two numbers. `None` if one is NaN.
fn order([a, b, _]: [u64; 3]) -> Option<Ordering> {
    double(a).partial_cmp(&double(b))
}

fn flag(holds: bool) -> Option<u64> {
    Some(u64::from(holds))
}

fn narrowed(a: u64, round: Round) -> Option<u64> {
    let value: Single = double(a).convert_r(round, &mut false).value;
    Some(if value.is_nan() { 0x7FFF_FFFF } else { value.to_bits() as u64 })
}

fn of_integer(number: i128) -> Option<u64> {
    bits(Double::from_i128_r(number, Round::NearestTiesToEven).value)
}

/// Instructions with f64 sources.
const OF_F64: [(&str, &str, Oracle); 29] = [
    ("add.rn.f64", "add.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
        bits(double(a).add_r(double(b), Round::NearestTiesToEven).value)
    }),
    ("sub.rn.f64", "sub.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
        bits(double(a).sub_r(double(b), Round::NearestTiesToEven).value)
    }),
    ("mul.rn.f64", "mul.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
        bits(double(a).mul_r(double(b), Round::NearestTiesToEven).value)
    }),
    ("div.rn.f64", "div.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
        bits(double(a).div_r(double(b), Round::NearestTiesToEven).value)
    }),
    ("rcp.rn.f64", "rcp.rn.f64 %ld, %la;", |[a, _, _]| {
        bits(double(1f64.to_bits()).div_r(double(a), Round::NearestTiesToEven).value)
    }),
    ("fma.rn.f64", "fma.rn.f64 %ld, %la, %lb, %lc;", |[a, b, c]| {
        bits(double(a).mul_add_r(double(b), double(c), Round::NearestTiesToEven).value)
    }),
    // The sign of a NaN is unspecified.
    ("abs.f64", "abs.f64 %ld, %la;", |[a, _, _]| (!double(a).is_nan()).then_some(a & !(1 << 63))),
    ("neg.f64", "neg.f64 %ld, %la;", |[a, _, _]| (!double(a).is_nan()).then_some(a ^ 1 << 63)),
    ("mov.f64", "mov.f64 %ld, %la;", |[a, _, _]| Some(a)),
    ("selp.f64", "selp.f64 %ld, %la, 0d3FF0000000000000, %pc;", |[a, _, c]| {
        Some(if c & 1 == 1 { a } else { 1f64.to_bits() })
    }),
    ("setp.eq.f64", "setp.eq.f64 %pd, %la, %lb;", |o| flag(order(o).is_some_and(|c| c.is_eq()))),
    ("setp.ne.f64", "setp.ne.f64 %pd, %la, %lb;", |o| flag(order(o).is_some_and(|c| c.is_ne()))),
    ("setp.lt.f64", "setp.lt.f64 %pd, %la, %lb;", |o| flag(order(o).is_some_and(|c| c.is_lt()))),
    ("setp.le.f64", "setp.le.f64 %pd, %la, %lb;", |o| flag(order(o).is_some_and(|c| c.is_le()))),
    ("setp.gt.f64", "setp.gt.f64 %pd, %la, %lb;", |o| flag(order(o).is_some_and(|c| c.is_gt()))),
    ("setp.ge.f64", "setp.ge.f64 %pd, %la, %lb;", |o| flag(order(o).is_some_and(|c| c.is_ge()))),
    ("setp.equ.f64", "setp.equ.f64 %pd, %la, %lb;", |o| flag(order(o).is_none_or(|c| c.is_eq()))),
    ("setp.neu.f64", "setp.neu.f64 %pd, %la, %lb;", |o| flag(order(o).is_none_or(|c| c.is_ne()))),
    ("setp.ltu.f64", "setp.ltu.f64 %pd, %la, %lb;", |o| flag(order(o).is_none_or(|c| c.is_lt()))),
    ("setp.leu.f64", "setp.leu.f64 %pd, %la, %lb;", |o| flag(order(o).is_none_or(|c| c.is_le()))),
    ("setp.gtu.f64", "setp.gtu.f64 %pd, %la, %lb;", |o| flag(order(o).is_none_or(|c| c.is_gt()))),
    ("setp.geu.f64", "setp.geu.f64 %pd, %la, %lb;", |o| flag(order(o).is_none_or(|c| c.is_ge()))),
    ("setp.num.f64", "setp.num.f64 %pd, %la, %lb;", |o| flag(order(o).is_some())),
    ("setp.nan.f64", "setp.nan.f64 %pd, %la, %lb;", |o| flag(order(o).is_none())),
    ("cvt.rn.f32.f64", "cvt.rn.f32.f64 %d, %la;", |[a, _, _]| narrowed(a, Round::NearestTiesToEven)),
    ("cvt.rz.f32.f64", "cvt.rz.f32.f64 %d, %la;", |[a, _, _]| narrowed(a, Round::TowardZero)),
    ("cvt.rp.f32.f64", "cvt.rp.f32.f64 %d, %la;", |[a, _, _]| narrowed(a, Round::TowardPositive)),
    ("cvt.rm.f32.f64", "cvt.rm.f32.f64 %d, %la;", |[a, _, _]| narrowed(a, Round::TowardNegative)),
    // Both halves, swapped.
    (
        "mov.b64",
        "{ .reg .f64 %f; mov.f64 %f, %la; mov.b64 {%a, %b}, %f; mov.b64 %ld, {%b, %a}; }",
        |[a, _, _]| Some(a.rotate_left(32)),
    ),
];

/// Instructions with other sources.
const TO_F64: [(&str, &str, Oracle); 5] = [
    // A NaN keeps its payload.
    ("cvt.f64.f32", "cvt.f64.f32 %ld, %a;", |[a, _, _]| {
        let value: Double = Single::from_bits(u128::from(a as u32)).convert(&mut false).value;
        Some(value.to_bits() as u64)
    }),
    ("cvt.rn.f64.u32", "cvt.rn.f64.u32 %ld, %a;", |[a, _, _]| of_integer((a as u32).into())),
    ("cvt.rn.f64.s32", "cvt.rn.f64.s32 %ld, %a;", |[a, _, _]| of_integer((a as i32).into())),
    ("cvt.rn.f64.u64", "cvt.rn.f64.u64 %ld, %la;", |[a, _, _]| of_integer(a.into())),
    ("cvt.rn.f64.s64", "cvt.rn.f64.s64 %ld, %la;", |[a, _, _]| of_integer((a as i64).into())),
];

/// Adds numbers with close exponents, so that sums cancel and tie.
///
/// Exponents are within f32's range and around its limits.
fn near(inputs: &mut Vec<[u64; 3]>, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..50_000 {
        let base = rng.u64(1023 - 152..1023 + 130);
        let mut one = || {
            let mantissa = if rng.bool() { rng.u64(..1 << 52) } else { rng.u64(..1 << 26) << 26 };
            let tie = if rng.bool() { 1 << 28 | mantissa & !0 << 29 } else { mantissa };
            rng.u64(..2) << 63 | (base + rng.u64(..4)) << 52 | tie
        };
        inputs.push([one(), one(), one()]);
    }
}

pub(super) fn checks() -> Vec<Check> {
    // The edge cases of f64 are f32's, with the extremes of exponent and mantissa varied
    // independently.
    let widened = f32_edges().into_iter().flat_map(|bits| {
        let f32 = f32::from_bits(bits as u32);
        [f64::from(f32).to_bits(), bits, bits << 32, bits << 32 | 0xFFFF_FFFF]
    });
    let edges: Vec<u64> = widened.collect();
    let of_f64 = OF_F64.into_iter().zip(700..).map(|((opcode, text, oracle), seed)| {
        let mut inputs = triples(&edges, 20_000, seed);
        near(&mut inputs, seed);
        Check { opcode, text, inputs, oracle }
    });
    let to_f64 = TO_F64.into_iter().zip(780..).map(|((opcode, text, oracle), seed)| Check {
        opcode,
        text,
        inputs: triples(&f32_edges(), 20_000, seed),
        oracle,
    });
    of_f64.chain(to_f64).collect()
}

#[test]
fn f64() {
    run(&checks());
}
