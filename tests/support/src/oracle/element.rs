//! Element formats as lists of magnitudes, and rounding by a search for the nearest magnitude.

use std::cmp::Ordering;
use std::sync::LazyLock;

use microscale::formats::Ties;

/// The magnitudes of E2M1's codes 0 to 7.
pub const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The magnitudes of E4M3's codes 0 to 0x7E. 0x7F is NaN.
pub static E4M3: LazyLock<Vec<f64>> =
    LazyLock::new(|| (0..=0x7E).map(|code| magnitude(code, 3, 7)).collect());

/// The magnitudes of E5M2's codes 0 to 0x7B. 0x7C is infinity, 0x7D to 0x7F are NaN.
pub static E5M2: LazyLock<Vec<f64>> =
    LazyLock::new(|| (0..=0x7B).map(|code| magnitude(code, 2, 15)).collect());

/// Returns the magnitude of an 8-bit float's code without sign, by the definition of such floats.
fn magnitude(code: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let steps = 1u8 << mantissa_bits;
    let (exponent, mantissa) = (i32::from(code / steps), f64::from(code % steps) / f64::from(steps));
    match exponent {
        0 => mantissa * power_of_two(1 - bias),
        _ => (1.0 + mantissa) * power_of_two(exponent - bias),
    }
}

/// Returns 2^`exponent`.
pub fn power_of_two(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

/// Returns the code whose magnitude is nearest to `wanted` ≥ 0, saturating at the last.
///
/// The midpoints of neighbours are exact in f64.
pub fn nearest(magnitudes: &[f64], wanted: f64, ties: Ties) -> u8 {
    assert!(wanted >= 0.0, "{wanted} is no magnitude");
    let code = |index: usize| u8::try_from(index).expect("at most 128 magnitudes");
    let above = magnitudes.partition_point(|magnitude| *magnitude < wanted);
    if above == 0 || above == magnitudes.len() {
        return code(above.min(magnitudes.len() - 1));
    }
    let midpoint = (magnitudes[above - 1] + magnitudes[above]) / 2.0;
    let up = match wanted.partial_cmp(&midpoint).expect("numbers") {
        Ordering::Less => false,
        Ordering::Greater => true,
        Ordering::Equal => match ties {
            Ties::Even => above.is_multiple_of(2),
            Ties::Away => true,
            Ties::Zero => false,
        },
    };
    code(if up { above } else { above - 1 })
}

/// Returns the value of an E2M1 code from 0 to 15.
pub fn e2m1_value(code: u8) -> f64 {
    signed(MAGNITUDES[usize::from(code % 8)], code >= 8)
}

/// Returns the value of an E4M3 byte.
pub fn e4m3_value(byte: u8) -> f64 {
    E4M3.get(usize::from(byte % 128)).map_or(f64::NAN, |magnitude| signed(*magnitude, byte >= 128))
}

/// Returns the value of an E5M2 byte.
pub fn e5m2_value(byte: u8) -> f64 {
    match byte % 128 {
        0x7C => signed(f64::INFINITY, byte >= 128),
        0x7D.. => f64::NAN,
        code => signed(E5M2[usize::from(code)], byte >= 128),
    }
}

fn signed(magnitude: f64, negative: bool) -> f64 {
    if negative { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the code at the least distance. `ties` selects one of two.
    fn by_distance(magnitudes: &[f64], wanted: f64, ties: Ties) -> u8 {
        let least = magnitudes.iter().map(|m| (m - wanted).abs()).fold(f64::INFINITY, f64::min);
        let mut best = (0..magnitudes.len()).filter(|code| (magnitudes[*code] - wanted).abs() == least);
        let (low, high) = (best.next().expect("one is nearest"), best.next());
        let found = match (high, ties) {
            (None, _) | (Some(_), Ties::Zero) => low,
            (Some(high), Ties::Away) => high,
            (Some(high), Ties::Even) => {
                if low % 2 == 0 {
                    low
                } else {
                    high
                }
            }
        };
        found as u8
    }

    #[test]
    fn nearest_minimizes_the_distance() {
        let mut rng = fastrand::Rng::with_seed(20);
        for magnitudes in [&MAGNITUDES, E4M3.as_slice(), &E5M2] {
            let largest = magnitudes[magnitudes.len() - 1];
            let midpoints = magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
            let near = midpoints
                .flat_map(|m| [m, f64::from((m as f32).next_down()), f64::from((m as f32).next_up())]);
            let any = std::iter::repeat_with(|| rng.f64() * rng.f64() * 1.1 * largest).take(10_000);
            for wanted in near.chain(any).chain(magnitudes.iter().copied()) {
                for ties in <Ties as microscale::Words>::values() {
                    let right = by_distance(magnitudes, wanted, ties);
                    assert_eq!(nearest(magnitudes, wanted, ties), right, "{wanted} of {}", magnitudes.len());
                }
            }
        }
    }

    #[test]
    fn the_8_bit_floats_match_ocp() {
        assert_eq!(
            (E4M3.len(), E4M3[1], E4M3[8], E4M3[0x38], E4M3[0x7E]),
            (127, 0.001953125, 0.015625, 1.0, 448.0)
        );
        assert_eq!((E5M2.len(), E5M2[1], E5M2[0x3C], E5M2[0x7B]), (124, power_of_two(-16), 1.0, 57344.0));
    }
}
