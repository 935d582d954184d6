//! Sizes in bytes, with the units of storage.

/// Units and their bytes. Single letters are binary, as in `split`.
const UNITS: [(&str, u64); 14] = [
    ("", 1),
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
];

/// Parses a size such as `12GiB`, `800 MB` or `1234`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let refused =
        || format!("{text:?} is no size; write a number of bytes or a unit, such as 12GiB or 800MB");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let (_, bytes) = UNITS.iter().find(|(known, _)| *known == unit).ok_or_else(refused)?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(*bytes).ok_or_else(refused);
    }
    let number: f64 = number.parse().map_err(|_| refused())?;
    let size = number * *bytes as f64;
    // Beyond 2^53 a float may be another number than the one that was written.
    if size < (1u64 << 53) as f64 { Ok(size as u64) } else { Err(refused()) }
}

/// Parses bits per weight: a positive number.
pub(crate) fn parse_bits(text: &str) -> Result<f64, String> {
    let bits: Option<f64> = text.parse().ok().filter(|bits: &f64| bits.is_finite() && *bits > 0.0);
    bits.ok_or_else(|| format!("{text:?} is no number of bits; write a number such as 4.6"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, size) in [
            ("1234", 1234),
            ("12GiB", 12 << 30),
            ("12 gib", 12 << 30),
            ("1.5MB", 1_500_000),
            ("0.5K", 512),
            ("7B", 7),
            ("3T", 3 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
        for wrong in
            ["", "GiB", "-1", "1.2.3GB", "12 bits", "1e3", "99999999TiB", "NaN", "20000000000000000000"]
        {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_bits("4.6"), Ok(4.6));
        for wrong in ["", "0", "-4", "NaN", "inf", "four"] {
            assert!(parse_bits(wrong).is_err(), "{wrong}");
        }
    }
}
