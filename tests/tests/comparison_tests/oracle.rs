//! Slow and obvious implementations of both formats that share no code with the library.

use half::bf16;
use microscale::{Format, NonFinite, Recipe, Report, Shape};
use microscale_test_support::oracle::{Exact, elements, power_of_two};

/// The formats and their block sizes.
pub(super) const FORMATS: [(&str, usize); 2] = [("mxfp4-e3m0", 32), ("nf4", 64)];

/// Returns the format of a word.
pub(super) fn format(word: &str) -> Format {
    Format::ALL.into_iter().find(|format| format.facts().word == word).expect("a format")
}

/// Returns the default recipe of a format.
pub(super) fn recipe(word: &str) -> Recipe {
    let format = format(word);
    Recipe::of(format, microscale::Numerics::default_for(format)).expect("the default")
}

/// A block or a whole matrix: scales as bits, codes unpacked.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Made {
    pub(super) scales: Vec<u16>,
    pub(super) codes: Vec<u8>,
    pub(super) report: Report,
}

const E3M0: [f64; 8] = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0];

/// bitsandbytes' codebook, and the thresholds in its kernels' `dQuantizeNF4`, copied from there.
const NF4: [f64; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];
const THRESHOLDS: [f64; 15] = [
    -0.8480964004993439,
    -0.6106329262256622,
    -0.4599952697753906,
    -0.33967943489551544,
    -0.23460740596055984,
    -0.13791173323988914,
    -0.045525018125772476,
    0.03979014977812767,
    0.1202552504837513,
    0.2035212516784668,
    0.2920137718319893,
    0.3893125355243683,
    0.5016634166240692,
    0.6427869200706482,
    0.8614784181118011,
];

/// Returns the value of a code under a scale, before rounding to an output type.
pub(super) fn value(word: &str, code: u8, scale: u16) -> f64 {
    match word {
        "nf4" if scale & 0x7F80 == 0x7F80 => f64::NAN,
        "nf4" => {
            let scale = bf16::from_bits(scale).to_f32();
            f64::from(NF4[usize::from(code)] as f32 * scale)
        }
        _ if scale == 255 => f64::NAN,
        _ => {
            let magnitude = E3M0[usize::from(code & 7)] * power_of_two(i32::from(scale) - 127);
            if code >= 8 { -magnitude } else { magnitude }
        }
    }
}

fn amax(block: &[f64]) -> f64 {
    block.iter().fold(0.0, |amax, value| amax.max(value.abs()))
}

/// MXFP4 with E3M0. Everything is exact in f64.
fn e3m0(block: &[f64], made: &mut Made) {
    let amax = amax(block);
    let wanted = (-170..=127).rfind(|k| 16.0 * power_of_two(*k) <= amax);
    let exponent = wanted.map_or(-127, |k: i32| k.max(-127));
    let scale = power_of_two(exponent);
    let code = |value: &f64| {
        let x = value.abs() / scale;
        let distance = |code: usize| (x - E3M0[code]).abs();
        let least = (0..8).map(distance).fold(f64::INFINITY, f64::min);
        // Of two equally near codes, zero wins, because it is even. Otherwise the larger one wins.
        let nearest = if distance(0) == least { 0 } else { (0..8).rfind(|i| distance(*i) == least).unwrap() };
        nearest as u8 | if value.is_sign_negative() { 8 } else { 0 }
    };
    let codes: Vec<u8> = block.iter().map(code).collect();
    made.report.clipped_blocks += u64::from(amax > 16.0 * scale);
    made.report.flushed_blocks += u64::from(amax > 0.0 && codes.iter().all(|code| code & 7 == 0));
    made.report.saturated_scales += u64::from(amax > 0.0 && wanted != Some(exponent));
    made.scales.push((exponent + 127) as u16);
    made.codes.extend(codes);
}

/// NF4. f64 has more than twice the bits of f32, so each step is rounded to f32 once.
fn nf4(block: &[f64], made: &mut Made) {
    let amax = amax(block);
    let wanted = bf16::from_f64(amax);
    let scale = if wanted.is_infinite() { bf16::MAX } else { wanted };
    let s = scale.to_f64();
    let reciprocal = (1.0 / s) as f32;
    let code = |value: &f64| {
        let x = match reciprocal.is_finite() {
            _ if s == 0.0 => 0.0,
            true => (value * f64::from(reciprocal)) as f32,
            false => (value / s) as f32,
        };
        THRESHOLDS.iter().filter(|threshold| x > **threshold as f32).count() as u8
    };
    let codes: Vec<u8> = block.iter().map(code).collect();
    let flushed = amax > 0.0 && codes.iter().all(|code| NF4[usize::from(*code)] * s == 0.0);
    made.report.clipped_blocks += u64::from(wanted.is_infinite());
    made.report.flushed_blocks += u64::from(flushed);
    made.report.saturated_scales += u64::from(wanted.is_infinite() || flushed);
    made.scales.push(scale.to_bits());
    made.codes.extend(codes);
}

/// Quantizes a matrix. The policy `error` gives the same result as `propagate`.
pub(super) fn quantize<T: Exact>(word: &str, values: &[T], shape: Shape, policy: NonFinite) -> Made {
    let mut made = Made::default();
    for (at, value) in elements(values, shape) {
        let value = value.to_f64();
        made.report.nan += u64::from(value.is_nan());
        made.report.infinite += u64::from(value.is_infinite());
        if !value.is_finite() && made.report.first_non_finite.is_none() {
            made.report.first_non_finite = Some(at);
        }
    }
    let (_, length) = FORMATS.into_iter().find(|(of, _)| *of == word).expect("a format");
    for row in 0..shape.rows {
        for first in (0..shape.cols).step_by(length) {
            let mut block = vec![0.0; length];
            for col in first..shape.cols.min(first + length) {
                let value = values[row * shape.row_stride + col].to_f64();
                block[col - first] = match policy {
                    NonFinite::Saturate if value.is_nan() => 0.0,
                    NonFinite::Saturate => value.clamp(-T::LARGEST, T::LARGEST),
                    _ => value,
                };
            }
            if block.iter().any(|value| !value.is_finite()) {
                made.scales.push(if word == "nf4" { 0x7FC0 } else { 255 });
                made.codes.extend(vec![0; length]);
            } else if word == "nf4" {
                nf4(&block, &mut made);
            } else {
                e3m0(&block, &mut made);
            }
        }
    }
    made
}

/// Returns the scales and the codes of a tensor with linear scales.
pub(super) fn taken_apart(tensor: &microscale::QuantizedTensor) -> (Vec<u16>, Vec<u8>) {
    let scales = match tensor.scales().len() {
        n if n == tensor.rows() * tensor.blocks_per_row() => {
            tensor.scales().iter().map(|byte| u16::from(*byte)).collect()
        }
        _ => tensor.scales().chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect(),
    };
    (scales, tensor.codes().iter().flat_map(|byte| [byte & 15, byte >> 4]).collect())
}
