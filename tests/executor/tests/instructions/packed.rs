//! Tests pairs of f16 or bf16, and pairs of 16-bit integers.

use rustc_apfloat::ieee::{BFloat, Half};
use rustc_apfloat::{Float, Round};

use super::probe::{Check, Oracle, run, triples};

const NAN: u64 = 0x7FFF;

/// Applies an oracle to both halves.
fn both([a, b, c]: [u64; 3], one: impl Fn([u64; 3]) -> Option<u64>) -> Option<u64> {
    let low = one([a, b, c].map(|word| word & 0xFFFF))?;
    let high = one([a, b, c].map(|word| word >> 16 & 0xFFFF))?;
    Some(high << 16 | low)
}

fn of<F: Float>(bits: u64) -> F {
    F::from_bits(u128::from(bits))
}

fn bits(value: impl Float) -> Option<u64> {
    Some(if value.is_nan() { NAN } else { value.to_bits() as u64 })
}

fn fma<F: Float>(operands: [u64; 3]) -> Option<u64> {
    both(operands, |[a, b, c]| bits(of::<F>(a).mul_add_r(of(b), of(c), Round::NearestTiesToEven).value))
}

/// Returns the larger or smaller number. If one is NaN, returns NaN with `nan`, or else the other
/// one.
fn extreme<F: Float>(operands: [u64; 3], larger: bool, nan: bool) -> Option<u64> {
    both(operands, |[a, b, _]| {
        let (x, y) = (of::<F>(a), of::<F>(b));
        Some(match (x.is_nan(), y.is_nan()) {
            (true, true) => NAN,
            (true, _) | (_, true) if nan => NAN,
            (true, _) => b,
            (_, true) => a,
            _ => {
                let a_is_less = x < y || (x == y && x.is_negative());
                if a_is_less == larger { b } else { a }
            }
        })
    })
}

/// Returns the larger magnitude, with the product of both signs.
fn xorsign<F: Float>(operands: [u64; 3]) -> Option<u64> {
    both(operands, |[a, b, _]| {
        if of::<F>(a).is_nan() || of::<F>(b).is_nan() {
            return Some(NAN);
        }
        Some((a & 0x7FFF).max(b & 0x7FFF) | (a ^ b) & 0x8000)
    })
}

fn abs<F: Float>(operands: [u64; 3]) -> Option<u64> {
    both(operands, |[a, _, _]| (!of::<F>(a).is_nan()).then_some(a & 0x7FFF))
}

pub(super) fn checks() -> Vec<Check> {
    let table: [(&str, &str, Oracle); 16] = [
        ("fma.rn.f16x2", "fma.rn.f16x2 %d, %a, %b, %c;", fma::<Half>),
        ("fma.rn.bf16x2", "fma.rn.bf16x2 %d, %a, %b, %c;", fma::<BFloat>),
        ("mul.rn.f16x2", "mul.rn.f16x2 %d, %a, %b;", |operands| {
            both(operands, |[a, b, _]| bits(of::<Half>(a).mul_r(of(b), Round::NearestTiesToEven).value))
        }),
        ("mul.rn.bf16x2", "mul.rn.bf16x2 %d, %a, %b;", |operands| {
            both(operands, |[a, b, _]| bits(of::<BFloat>(a).mul_r(of(b), Round::NearestTiesToEven).value))
        }),
        ("add.rn.f16x2", "add.rn.f16x2 %d, %a, %b;", |operands| {
            both(operands, |[a, b, _]| bits(of::<Half>(a).add_r(of(b), Round::NearestTiesToEven).value))
        }),
        ("add.rn.bf16x2", "add.rn.bf16x2 %d, %a, %b;", |operands| {
            both(operands, |[a, b, _]| bits(of::<BFloat>(a).add_r(of(b), Round::NearestTiesToEven).value))
        }),
        ("abs.f16x2", "abs.f16x2 %d, %a;", abs::<Half>),
        ("abs.bf16x2", "abs.bf16x2 %d, %a;", abs::<BFloat>),
        ("min.f16x2", "min.f16x2 %d, %a, %b;", |operands| extreme::<Half>(operands, false, false)),
        ("min.bf16x2", "min.bf16x2 %d, %a, %b;", |operands| extreme::<BFloat>(operands, false, false)),
        ("max.NaN.f16x2", "max.NaN.f16x2 %d, %a, %b;", |operands| extreme::<Half>(operands, true, true)),
        ("max.NaN.bf16x2", "max.NaN.bf16x2 %d, %a, %b;", |operands| extreme::<BFloat>(operands, true, true)),
        ("max.NaN.xorsign.abs.f16x2", "max.NaN.xorsign.abs.f16x2 %d, %a, %b;", xorsign::<Half>),
        ("max.NaN.xorsign.abs.bf16x2", "max.NaN.xorsign.abs.bf16x2 %d, %a, %b;", xorsign::<BFloat>),
        ("min.u16x2", "min.u16x2 %d, %a, %b;", |operands| both(operands, |[a, b, _]| Some(a.min(b)))),
        ("min.s16x2", "min.s16x2 %d, %a, %b;", |operands| {
            both(operands, |[a, b, _]| Some((a as i16).min(b as i16) as u16 as u64))
        }),
    ];
    let halves = [
        0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF, 0x80, 0x3F80, 0x7F7F,
        0x7F80, 0x7F81, 0x4300, 0x6400,
    ];
    let edges: Vec<u64> = halves
        .iter()
        .flat_map(|low| {
            halves.iter().flat_map(move |high| [high << 16 | low, (high ^ 0x8000) << 16 | low ^ 0x8000])
        })
        .collect();
    let inputs = |seed| {
        let mut inputs = triples(&edges[..], 200_000, seed);
        // Close exponents, so that sums cancel and round.
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..200_000 {
            let base = rng.u64(0x0800..0x7000);
            let mut half = || (base + rng.u64(..0x800)) & 0x7FFF | rng.u64(..2) << 15;
            let mut word = || half() << 16 | half();
            inputs.push([word(), word(), word()]);
        }
        inputs
    };
    table
        .into_iter()
        .zip(200..)
        .map(|((opcode, text, oracle), seed)| Check { opcode, text, inputs: inputs(seed), oracle })
        .collect()
}

#[test]
fn pairs() {
    run(&checks());
}
