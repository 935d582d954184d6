//! f64: arithmetic, comparisons, and what comes of f32.

use rustc_apfloat::ieee::{Double, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

use super::probe::{Check, Oracle, f32_edges, run, triples};

const NAN: u64 = 0x7FFF_FFFF_FFFF_FFFF;

fn double(bits: u64) -> Double {
    Double::from_bits(u128::from(bits))
}

/// A result: every NaN is the canonical one.
fn bits(value: Double) -> Option<u64> {
    Some(if value.is_nan() { NAN } else { value.to_bits() as u64 })
}

pub(super) fn checks() -> Vec<Check> {
    let of_f64: [(&str, &str, Oracle); 8] = [
        ("add.rn.f64", "add.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
            bits(double(a).add_r(double(b), Round::NearestTiesToEven).value)
        }),
        ("sub.rn.f64", "sub.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
            bits(double(a).sub_r(double(b), Round::NearestTiesToEven).value)
        }),
        ("mul.rn.f64", "mul.rn.f64 %ld, %la, %lb;", |[a, b, _]| {
            bits(double(a).mul_r(double(b), Round::NearestTiesToEven).value)
        }),
        // Of NaN the sign is left open.
        ("abs.f64", "abs.f64 %ld, %la;", |[a, _, _]| (!double(a).is_nan()).then_some(a & !(1 << 63))),
        ("mov.f64", "mov.f64 %ld, %la;", |[a, _, _]| Some(a)),
        ("selp.f64", "selp.f64 %ld, %la, 0d3FF0000000000000, %pc;", |[a, _, c]| {
            Some(if c & 1 == 1 { a } else { 1f64.to_bits() })
        }),
        ("setp.lt.f64", "setp.lt.f64 %pd, %la, %lb;", |[a, b, _]| {
            Some(u64::from(double(a).partial_cmp(&double(b)).is_some_and(|order| order.is_lt())))
        }),
        ("setp.gt.f64", "setp.gt.f64 %pd, %la, %lb;", |[a, b, _]| {
            Some(u64::from(double(a).partial_cmp(&double(b)).is_some_and(|order| order.is_gt())))
        }),
    ];
    let of_f32: (&str, &str, Oracle) = ("cvt.f64.f32", "cvt.f64.f32 %ld, %a;", |[a, _, _]| {
        bits(Single::from_bits(u128::from(a as u32)).convert(&mut false).value)
    });
    // The edges of f64 are those of f32, with the exponent's and the mantissa's extremes drawn apart.
    let widened = f32_edges().into_iter().flat_map(|bits| {
        let f32 = f32::from_bits(bits as u32);
        [f64::from(f32).to_bits(), bits, bits << 32, bits << 32 | 0xFFFF_FFFF]
    });
    let edges: Vec<u64> = widened.collect();
    let of_f64 = of_f64.into_iter().zip(700..).map(|((opcode, text, oracle), seed)| Check {
        opcode,
        text,
        inputs: triples(&edges, 20_000, seed),
        oracle,
    });
    let (opcode, text, oracle) = of_f32;
    of_f64.chain([Check { opcode, text, inputs: triples(&f32_edges(), 20_000, 799), oracle }]).collect()
}

#[test]
fn f64() {
    run(&checks());
}
