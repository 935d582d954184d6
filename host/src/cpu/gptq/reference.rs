//! GPTQ by its definition: one row, one column and one candidate at a time.

use microscale_formats::search::{Found, Scales};
use microscale_formats::{E2m1, E4m3, E8m0, Search, block, mx, nvfp4, search};

use super::block::{BlockFactor, ScaleRange};
use super::factor::GptqFactor;

/// A format's arithmetic by `microscale_formats`.
pub(super) enum Definition {
    Mxfp4(mx::Arithmetic),
    Nvfp4(nvfp4::Quantizer, Option<microscale_formats::GlobalScale>),
}

impl Definition {
    fn plain(&self, amax: f32) -> u8 {
        match self {
            Self::Mxfp4(arithmetic) => {
                let addend = arithmetic.scale_rule.mantissa_addend::<E2m1>();
                let exponent = mx::rounded_exponent(amax.to_bits(), addend);
                mx::scale_from_exponent::<E2m1>(exponent).to_bits()
            }
            Self::Nvfp4(quantizer, _) => {
                quantizer.rounded_scale(quantizer.wanted_scale(amax, |x| x)).to_bits()
            }
        }
    }

    fn factor(&self, byte: u8) -> f32 {
        match self {
            Self::Mxfp4(_) => E8m0::from_bits(byte).to_f32(),
            Self::Nvfp4(_, global) => global.factor(byte),
        }
    }

    /// The code of a value.
    pub(super) fn code(&self, value: f32, byte: u8) -> u8 {
        match self {
            Self::Mxfp4(arithmetic) => {
                let reciprocal = E8m0::from_bits(byte).reciprocal();
                mx::encode::<E2m1>(value, reciprocal, arithmetic.ties, arithmetic.negative_zero)
            }
            Self::Nvfp4(quantizer, _) => quantizer.encode(value, quantizer.scaling(E4m3::from_bits(byte))),
        }
    }

    /// The magnitude of a value's code.
    fn magnitude(&self, value: f32, byte: u8) -> f32 {
        E2m1::from_bits(self.code(value, byte) & 7).to_f32()
    }
}

/// The recursion over one block.
struct Descent<const N: usize> {
    rounded_from: [f32; N],
    dequantized: [f32; N],
    error: f32,
}

/// Quantizes columns one after the other, each to `round` of its weight with feedback.
fn descend<const N: usize>(
    factor: &BlockFactor<N>,
    updated: &[f32; N],
    unit: f32,
    round: impl Fn(usize, f32) -> f32,
) -> Descent<N> {
    let mut descent = Descent { rounded_from: *updated, dequantized: [0.0; N], error: 0.0 };
    for k in 0..N {
        let mut from = updated[k];
        for ((dequantized, updated), feedback) in
            descent.dequantized.iter().zip(updated).zip(&factor.feedback).take(k)
        {
            from = (-(dequantized - updated)).mul_add(feedback[k], from);
        }
        let from = finite_or(from, updated[k]);
        let dequantized = round(k, from).copysign(from);
        let error = (from - dequantized) * unit * factor.pivots[k];
        descent.error += error * error;
        (descent.rounded_from[k], descent.dequantized[k]) = (from, dequantized);
    }
    descent
}

/// Searches the scale of a block.
fn search_scale<const N: usize>(
    definition: &Definition,
    factor: &BlockFactor<N>,
    updated: &[f32; N],
    range: &ScaleRange,
    plain: u8,
    larger: u8,
) -> Found {
    let amax = f32::from_bits(block::amax_bits(updated));
    let mut found = Found { byte: plain, tried: 1 };
    if amax == 0.0 {
        return found;
    }
    let unit = search::unit(amax.to_bits());
    let error = |byte: u8| {
        let round = |_, value| definition.magnitude(value, byte) * definition.factor(byte);
        descend(factor, updated, unit, round).error
    };
    let zeros = descend(factor, updated, unit, |_, _| 0.0);
    let largest = zeros.rounded_from.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let mut least = finite_or(error(plain), f32::INFINITY);
    let mut see = |byte: u8, least: &mut f32| {
        let error = error(byte);
        found.tried += 1;
        if error < *least || (error == *least && found.byte != plain && byte < found.byte) {
            (found.byte, *least) = (byte, error);
        }
    };
    let (low, high) = range.around(plain, larger);
    let is_zero = |byte: u8| definition.magnitude(largest, byte) == 0.0;
    for byte in plain.saturating_add(1).max(low)..=high {
        // All codes are zero under this scale and every larger one, once they are under a smaller
        // one.
        let previous = if byte == plain.saturating_add(1).max(low) { plain } else { byte - 1 };
        if is_zero(previous) {
            break;
        }
        see(byte, &mut least);
    }
    let limit = factor.bounds.least_factor(zeros.error.sqrt(), least.sqrt(), amax * unit);
    for byte in (low..=high.min(plain.saturating_sub(1))).rev() {
        if byte >= plain || definition.factor(byte) * unit < limit {
            break;
        }
        see(byte, &mut least);
    }
    found
}

/// The result for one block.
pub(super) struct BlockResult<const N: usize> {
    pub(super) start: usize,
    pub(super) byte: u8,
    pub(super) plain: u8,
    pub(super) tried: u32,
    /// The bits of the updated weights' amax.
    pub(super) amax: u32,
    /// The weights that were rounded, by position.
    pub(super) rounded_from: [f32; N],
    /// The squared errors, in the factor's unit.
    pub(super) error: f64,
}

/// Quantizes a row of weights, by position. `chosen` returns a position's scale if it is
/// chosen already.
///
/// `poisoned` returns whether the column at a position is in a NaN block, whose weights must be 0.
pub(super) fn quantize_row<const N: usize>(
    definition: &Definition,
    factor: &GptqFactor,
    (range, kind): (&ScaleRange, Search),
    weights: &[f32],
    chosen: impl Fn(usize) -> Option<u8>,
    poisoned: impl Fn(usize) -> bool,
) -> Vec<BlockResult<N>> {
    let mut residuals = vec![0.0f32; weights.len()];
    let mut results = Vec::new();
    for start in (0..weights.len()).step_by(N) {
        let of_block = BlockFactor::<N>::of(factor, start);
        let mut updated = [0.0; N];
        for k in 0..N {
            let mut value = weights[start + k];
            for (j, residual) in residuals[..start].iter().enumerate() {
                value = (-residual).mul_add(factor.feedback.at(j, start + k), value);
            }
            for j in 0..k {
                let change = updated[j] - weights[start + j];
                value = (-change).mul_add(of_block.feedback[j][k], value);
            }
            updated[k] = if poisoned(start + k) { 0.0 } else { finite_or(value, weights[start + k]) };
        }
        let amax = f32::from_bits(block::amax_bits(&updated));
        let plain = definition.plain(amax);
        let larger = definition.plain((amax * 1.5).min(f32::MAX));
        let found = match (chosen(start), kind) {
            (Some(byte), _) => Found { byte, tried: 0 },
            (None, Search::None) => Found { byte: plain, tried: 0 },
            (None, _) => search_scale(definition, &of_block, &updated, range, plain, larger),
        };
        let round = |k: usize, value| {
            if poisoned(start + k) {
                return 0.0;
            }
            let byte = chosen(start + k).unwrap_or(found.byte);
            definition.magnitude(value, byte) * definition.factor(byte)
        };
        let descent = descend(&of_block, &updated, 1.0, round);
        let mut error = 0.0;
        for k in (0..N).filter(|k| !poisoned(start + k)) {
            residuals[start + k] = descent.dequantized[k] - weights[start + k];
            let rest = f64::from(descent.rounded_from[k]) - f64::from(descent.dequantized[k]);
            let weighted = rest * f64::from(of_block.pivots[k]);
            error += weighted * weighted;
        }
        let (Found { byte, tried }, rounded_from) = (found, descent.rounded_from);
        let amax = amax.to_bits();
        results.push(BlockResult { start, byte, plain, tried, amax, rounded_from, error });
    }
    results
}

/// The value, or the other one if it is not finite.
fn finite_or(value: f32, other: f32) -> f32 {
    if value.is_finite() { value } else { other }
}
