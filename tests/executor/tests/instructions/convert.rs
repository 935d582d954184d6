//! Tests conversions between floating-point formats.

use float4::F4E2M1;
use rustc_apfloat::ieee::{BFloat, Float8E4M3FN, Float8E5M2, Half, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

use super::probe::{Check, Oracle, f32_triples, run};

fn single(bits: u64) -> Single {
    Single::from_bits(u128::from(bits as u32))
}

fn convert<To: Float>(from: impl FloatConvert<To>, round: Round) -> To {
    from.convert_r(round, &mut false).value
}

/// The first operand goes to the upper half.
fn pair<To: Float>([a, b, _]: [u64; 3], round: Round) -> Option<u64>
where
    Single: FloatConvert<To>,
{
    let one = |bits| {
        let value: To = convert(single(bits), round);
        if value.is_nan() { 0x7FFF } else { value.to_bits() as u64 }
    };
    Some(one(a) << 16 | one(b))
}

/// Converts to a byte. NaN is 0x7F, and too large numbers become the largest one.
fn byte<To: Float>(bits: u64, largest: u64) -> u64
where
    Single: FloatConvert<To>,
{
    let value = single(bits);
    let rounded: To = convert(value, Round::NearestTiesToEven);
    match (value.is_nan(), rounded.is_finite()) {
        (true, _) => 0x7F,
        (false, false) => largest | bits >> 24 & 0x80,
        (false, true) => rounded.to_bits() as u64,
    }
}

fn bytes<To: Float>([a, b, _]: [u64; 3], largest: u64) -> Option<u64>
where
    Single: FloatConvert<To>,
{
    Some(byte::<To>(a, largest) << 8 | byte::<To>(b, largest))
}

fn widened<From: Float + FloatConvert<Half>>([a, _, _]: [u64; 3]) -> Option<u64> {
    let one = |code: u64| {
        let value: Half = convert(From::from_bits(u128::from(code & 0xFF)), Round::NearestTiesToEven);
        if value.is_nan() { 0x7FFF } else { value.to_bits() as u64 }
    };
    Some(one(a >> 8) << 16 | one(a))
}

const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Converts to E2M1. Zeros keep their sign, and NaN gives the largest positive number.
fn e2m1(bits: u64) -> u64 {
    let value = f32::from_bits(bits as u32);
    let magnitude = F4E2M1::from_f64(f64::from(value.abs())).to_f64();
    let code = VALUES.iter().position(|known| *known == magnitude).expect("a value of E2M1") as u64;
    if value.is_nan() { 7 } else { code | bits >> 28 & 8 }
}

fn from_e2m1([a, _, _]: [u64; 3]) -> Option<u64> {
    let one = |code: u64| {
        let value = VALUES[(code & 7) as usize] as f32;
        u64::from(half::f16::from_f32(if code & 8 == 0 { value } else { -value }).to_bits())
    };
    Some(one(a >> 4 & 0xF) << 16 | one(a & 0xF))
}

/// Returns all 16-bit inputs.
fn all_16() -> Vec<[u64; 3]> {
    (0..1 << 16).map(|bits| [bits, 0, 0]).collect()
}

pub(super) fn checks() -> Vec<Check> {
    let of_f32: [(&str, &str, Oracle); 8] = [
        ("cvt.rn.f16x2.f32", "cvt.rn.f16x2.f32 %d, %a, %b;", |operands| {
            pair::<Half>(operands, Round::NearestTiesToEven)
        }),
        ("cvt.rz.f16x2.f32", "cvt.rz.f16x2.f32 %d, %a, %b;", |operands| {
            pair::<Half>(operands, Round::TowardZero)
        }),
        ("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 %d, %a, %b;", |operands| {
            pair::<BFloat>(operands, Round::NearestTiesToEven)
        }),
        ("cvt.rn.f16.f32", "cvt.rn.f16.f32 %hd, %a;", |[a, _, _]| {
            pair::<Half>([0, a, 0], Round::NearestTiesToEven)
        }),
        ("cvt.rn.bf16.f32", "cvt.rn.bf16.f32 %hd, %a;", |[a, _, _]| {
            pair::<BFloat>([0, a, 0], Round::NearestTiesToEven)
        }),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e4m3x2.f32 %hd, %a, %b;", |operands| {
            bytes::<Float8E4M3FN>(operands, 0x7E)
        }),
        ("cvt.rn.satfinite.e5m2x2.f32", "cvt.rn.satfinite.e5m2x2.f32 %hd, %a, %b;", |operands| {
            bytes::<Float8E5M2>(operands, 0x7B)
        }),
        (
            "cvt.rn.satfinite.e2m1x2.f32",
            "{ .reg .b8 pair, zero; cvt.rn.satfinite.e2m1x2.f32 pair, %a, %b; mov.b16 {zero, _}, 0; mov.b32 %d, {pair, zero, zero, zero}; }",
            |[a, b, _]| Some(e2m1(a) << 4 | e2m1(b)),
        ),
    ];
    let of_codes: [(&str, &str, Oracle); 6] = [
        ("cvt.f32.f16", "cvt.f32.f16 %d, %ha;", |[a, _, _]| {
            let value = Half::from_bits(u128::from(a));
            (!value.is_nan())
                .then(|| FloatConvert::<Single>::convert(value, &mut false).value.to_bits() as u64)
        }),
        ("cvt.f32.bf16", "cvt.f32.bf16 %d, %ha;", |[a, _, _]| {
            (!BFloat::from_bits(u128::from(a)).is_nan()).then_some(a << 16)
        }),
        ("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e4m3x2 %d, %ha;", widened::<Float8E4M3FN>),
        ("cvt.rn.f16x2.e5m2x2", "cvt.rn.f16x2.e5m2x2 %d, %ha;", widened::<Float8E5M2>),
        // The high half has the other sign.
        (
            "cvt.rn.satfinite.e4m3x2.f16x2",
            "{ .reg .b32 pair; shl.b32 pair, %a, 16; xor.b32 pair, pair, 0x80000000; or.b32 pair, pair, %a; cvt.rn.satfinite.e4m3x2.f16x2 %hd, pair; }",
            |[a, _, _]| {
                let widened = |code: u64| {
                    let value = Half::from_bits(u128::from(code));
                    FloatConvert::<Single>::convert(value, &mut false).value.to_bits() as u64
                };
                bytes::<Float8E4M3FN>([widened(a ^ 0x8000), widened(a), 0], 0x7E)
            },
        ),
        (
            "cvt.rn.f16x2.e2m1x2",
            "{ .reg .b8 pair, r1, r2, r3; mov.b32 {pair, r1, r2, r3}, %a; cvt.rn.f16x2.e2m1x2 %d, pair; }",
            from_e2m1,
        ),
    ];
    // The common inputs, and values around the numbers of E2M1, E4M3, E5M2 and f16.
    let inputs = |seed| {
        let mut inputs = f32_triples(seed);
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..200_000 {
            let mut near = || {
                let exponent = rng.u64(127 - 28..127 + 18);
                let mantissa = (rng.u64(..32) << 18).wrapping_add(rng.u64(..3)).wrapping_sub(1);
                rng.u64(..2) << 31 | (exponent << 23).wrapping_add(mantissa)
            };
            inputs.push([near(), near(), 0]);
        }
        inputs
    };
    let of_f32 = of_f32.into_iter().zip(300..);
    let of_f32 =
        of_f32.map(|((opcode, text, oracle), seed)| Check { opcode, text, inputs: inputs(seed), oracle });
    let of_codes =
        of_codes.into_iter().map(|(opcode, text, oracle)| Check { opcode, text, inputs: all_16(), oracle });
    of_f32.chain(of_codes).collect()
}

#[test]
fn conversions() {
    run(&checks());
}
