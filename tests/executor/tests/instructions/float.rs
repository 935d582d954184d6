//! Tests f32 arithmetic, minima and maxima, and comparisons.

use rustc_apfloat::ieee::Single;
use rustc_apfloat::{Float, Round};

use super::probe::{Check, Oracle, f32_triples, results, run};

const NAN: u64 = 0x7FFF_FFFF;

fn single(bits: u64) -> Single {
    Single::from_bits(u128::from(bits as u32))
}

/// Returns a result's bits. Every NaN is the canonical one.
fn bits(value: Single) -> Option<u64> {
    Some(if value.is_nan() { NAN } else { value.to_bits() as u64 })
}

fn float([a, b, c]: [u64; 3]) -> [f32; 3] {
    [a, b, c].map(|bits| f32::from_bits(bits as u32))
}

/// Returns the smaller or larger number, with −0 below +0. If one is NaN, returns the other.
fn extreme([a, b, _]: [u64; 3], larger: bool, nan: bool) -> Option<u64> {
    let [x, y, _] = float([a, b, 0]);
    let (a, b) = (a & 0xFFFF_FFFF, b & 0xFFFF_FFFF);
    Some(match (x.is_nan(), y.is_nan()) {
        (true, true) => NAN,
        (true, _) | (_, true) if nan => NAN,
        (true, _) => b,
        (_, true) => a,
        _ => {
            let a_is_less = x < y || (x == y && x.is_sign_negative());
            if a_is_less == larger { b } else { a }
        }
    })
}

pub(super) fn checks() -> Vec<Check> {
    let arithmetic: [(&str, &str, Oracle); 17] = [
        ("add.rn.f32", "add.rn.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).add_r(single(b), Round::NearestTiesToEven).value)
        }),
        ("add.rz.f32", "add.rz.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).add_r(single(b), Round::TowardZero).value)
        }),
        ("add.rp.f32", "add.rp.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).add_r(single(b), Round::TowardPositive).value)
        }),
        ("sub.rn.f32", "sub.rn.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).sub_r(single(b), Round::NearestTiesToEven).value)
        }),
        ("mul.rn.f32", "mul.rn.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).mul_r(single(b), Round::NearestTiesToEven).value)
        }),
        ("mul.rz.f32", "mul.rz.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).mul_r(single(b), Round::TowardZero).value)
        }),
        ("div.rn.f32", "div.rn.f32 %d, %a, %b;", |[a, b, _]| {
            bits(single(a).div_r(single(b), Round::NearestTiesToEven).value)
        }),
        ("rcp.rn.f32", "rcp.rn.f32 %d, %a;", |[a, _, _]| {
            bits(single(0x3F80_0000).div_r(single(a), Round::NearestTiesToEven).value)
        }),
        ("sqrt.rn.f32", "sqrt.rn.f32 %d, %a;", |[a, _, _]| {
            // The processor's square root is rounded to nearest.
            bits(single(f32::from_bits(a as u32).sqrt().to_bits().into()))
        }),
        ("fma.rn.f32", "fma.rn.f32 %d, %a, %b, %c;", |[a, b, c]| {
            bits(single(a).mul_add_r(single(b), single(c), Round::NearestTiesToEven).value)
        }),
        // The sign of a NaN is unspecified.
        ("abs.f32", "abs.f32 %d, %a;", |[a, _, _]| (!single(a).is_nan()).then_some(a & 0x7FFF_FFFF)),
        ("neg.f32", "neg.f32 %d, %a;", |[a, _, _]| {
            (!single(a).is_nan()).then_some((a ^ 0x8000_0000) & 0xFFFF_FFFF)
        }),
        ("copysign.f32", "copysign.f32 %d, %a, %b;", |[a, b, _]| Some(a & 0x8000_0000 | b & 0x7FFF_FFFF)),
        ("min.f32", "min.f32 %d, %a, %b;", |operands| extreme(operands, false, false)),
        ("max.f32", "max.f32 %d, %a, %b;", |operands| extreme(operands, true, false)),
        ("max.NaN.f32", "max.NaN.f32 %d, %a, %b;", |operands| extreme(operands, true, true)),
        ("selp.f32", "selp.f32 %d, %a, %b, %pc;", |[a, b, c]| {
            Some(if c & 1 == 1 { a } else { b } & 0xFFFF_FFFF)
        }),
    ];
    let comparisons: [(&str, &str, Oracle); 14] = [
        ("setp.eq.f32", "setp.eq.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a == b))
        }),
        ("setp.lt.f32", "setp.lt.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a < b))
        }),
        ("setp.le.f32", "setp.le.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a <= b))
        }),
        ("setp.gt.f32", "setp.gt.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a > b))
        }),
        ("setp.ge.f32", "setp.ge.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a >= b))
        }),
        ("setp.equ.f32", "setp.equ.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_none_or(|c| c.is_eq())))
        }),
        ("setp.neu.f32", "setp.neu.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_none_or(|c| c.is_ne())))
        }),
        ("setp.ltu.f32", "setp.ltu.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_none_or(|c| c.is_lt())))
        }),
        ("setp.leu.f32", "setp.leu.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_none_or(|c| c.is_le())))
        }),
        ("setp.gtu.f32", "setp.gtu.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_none_or(|c| c.is_gt())))
        }),
        ("setp.geu.f32", "setp.geu.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_none_or(|c| c.is_ge())))
        }),
        ("setp.num.f32", "setp.num.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(!a.is_nan() && !b.is_nan()))
        }),
        ("setp.nan.f32", "setp.nan.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.is_nan() || b.is_nan()))
        }),
        ("setp.ne.f32", "setp.ne.f32 %pd, %a, %b;", |o| {
            let [a, b, _] = float(o);
            Some(u64::from(a.partial_cmp(&b).is_some_and(|c| c.is_ne())))
        }),
    ];
    let all = arithmetic.into_iter().chain(comparisons).zip(100..);
    all.map(|((opcode, text, oracle), seed)| Check { opcode, text, inputs: f32_triples(seed), oracle })
        .collect()
}

#[test]
fn f32() {
    run(&checks());
}

#[test]
fn approximate_reciprocals_are_within_a_unit() {
    let inputs = f32_triples(90);
    let found = results("rcp.approx.ftz.f32 %d, %a;", &inputs);
    for ([a, _, _], found) in inputs.into_iter().zip(found) {
        let (a, found) = (f32::from_bits(a as u32), f32::from_bits(found as u32));
        if a.is_nan() {
            assert!(found.is_nan());
        } else if a == 0.0 || a.is_subnormal() {
            assert_eq!(found, f32::INFINITY.copysign(a));
        } else if a.is_infinite() {
            assert_eq!(found.to_bits(), 0f32.copysign(a).to_bits());
        } else {
            let exact = 1.0 / f64::from(a);
            let unit = 2f64.powi((exact.abs().log2().floor() as i32 - 23).max(-149));
            let flushed = exact.abs() < f64::from(f32::MIN_POSITIVE) && found == 0.0;
            assert!(flushed || (f64::from(found) - exact).abs() <= unit, "1 / {a:e} gives {found:e}");
        }
    }
}
