//! Values of all lanes of a warp, and lane-wise functions on them.

/// Lanes in a warp.
pub(crate) const LANES: usize = 32;
/// A register of up to 32 bits, zero-extended, in every lane.
pub(crate) type Words = [u32; LANES];
/// A 64-bit register in every lane.
pub(crate) type Longs = [u64; LANES];

/// A lane-wise function, applied to all 32 lanes.
///
/// The names give the result and then the sources: `W` is a word, `L` a long, `P` a predicate.
/// Inactive lanes are computed from whatever they hold, and their results are dropped. The loops
/// therefore have no branches.
#[derive(Clone, Copy)]
#[allow(clippy::upper_case_acronyms, reason = "no acronyms: a letter an operand")]
pub(crate) enum LaneFunction {
    WW(fn(&Words) -> Words),
    WWW(fn(&Words, &Words) -> Words),
    WWWW(fn(&Words, &Words, &Words) -> Words),
    WWWWW(fn(&Words, &Words, &Words, &Words) -> Words),
    LL(fn(&Longs) -> Longs),
    LLL(fn(&Longs, &Longs) -> Longs),
    LLLL(fn(&Longs, &Longs, &Longs) -> Longs),
    LW(fn(&Words) -> Longs),
    WL(fn(&Longs) -> Words),
    LWW(fn(&Words, &Words) -> Longs),
    LWWL(fn(&Words, &Words, &Longs) -> Longs),
    LLW(fn(&Longs, &Words) -> Longs),
    LLWW(fn(&Longs, &Words, &Words) -> Longs),
    LLLWW(fn(&Longs, &Longs, &Words, &Words) -> Longs),
    LLLW(fn(&Longs, &Longs, &Words) -> Longs),
    PWW(fn(&Words, &Words) -> u32),
    PLL(fn(&Longs, &Longs) -> u32),
}

/// The type of an instruction's operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    /// 8, 16, 32 or 64 bits.
    B8,
    B16,
    B32,
    B64,
    /// 32 bits, with float constants.
    F32,
    /// 64 bits, with float constants.
    F64,
}

impl Type {
    /// Returns the width in bits.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::B8 => 8,
            Self::B16 => 16,
            Self::B32 | Self::F32 => 32,
            Self::B64 | Self::F64 => 64,
        }
    }
}

/// An instruction that computes a register from registers.
#[derive(Clone, Copy)]
pub(crate) struct Pure {
    pub(crate) shape: LaneFunction,
    /// The result's type, followed by the sources' types. A predicate result has none.
    pub(crate) types: &'static [Type],
}

/// Makes a [`Pure`] from a function of one lane's values.
///
/// Arguments: `lanes!(WWW, |a, b| expression; B32 B32 B32)`.
macro_rules! lanes {
    (@ $shape:ident, $start:expr, |$($x:ident),+| $value:expr, $types:expr) => {
        $crate::lanes::Pure {
            shape: $crate::lanes::LaneFunction::$shape(|$($x),+| {
                let mut result = [$start; $crate::lanes::LANES];
                for (lane, r) in result.iter_mut().enumerate() {
                    $(let $x = $x[lane];)+
                    *r = $value;
                }
                result
            }),
            types: $types,
        }
    };
    (PWW, |$a:ident, $b:ident| $value:expr; $($type:ident)+) => { lanes!(@p PWW, |$a, $b| $value, $($type)+) };
    (PLL, |$a:ident, $b:ident| $value:expr; $($type:ident)+) => { lanes!(@p PLL, |$a, $b| $value, $($type)+) };
    (@p $shape:ident, |$a:ident, $b:ident| $value:expr, $($type:ident)+) => {
        $crate::lanes::Pure {
            shape: $crate::lanes::LaneFunction::$shape(|$a, $b| {
                let mut mask = 0u32;
                for lane in 0..$crate::lanes::LANES {
                    let ($a, $b) = ($a[lane], $b[lane]);
                    mask |= u32::from($value) << lane;
                }
                mask
            }),
            types: &[$($crate::lanes::Type::$type),+],
        }
    };
    (WW, $($rest:tt)+) => { lanes!(@w WW, $($rest)+) };
    (WWW, $($rest:tt)+) => { lanes!(@w WWW, $($rest)+) };
    (WWWW, $($rest:tt)+) => { lanes!(@w WWWW, $($rest)+) };
    (WWWWW, $($rest:tt)+) => { lanes!(@w WWWWW, $($rest)+) };
    (WL, $($rest:tt)+) => { lanes!(@w WL, $($rest)+) };
    (@w $shape:ident, |$($x:ident),+| $value:expr; $($type:ident)+) => {
        lanes!(@ $shape, 0u32, |$($x),+| $value, &[$($crate::lanes::Type::$type),+])
    };
    ($shape:ident, |$($x:ident),+| $value:expr; $($type:ident)+) => {
        lanes!(@ $shape, 0u64, |$($x),+| $value, &[$($crate::lanes::Type::$type),+])
    };
}

pub(crate) use lanes;
