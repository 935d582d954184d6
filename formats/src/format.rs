//! The formats and the facts of each: [`Format`] and the descriptor [`Facts`].
//!
//! Code that treats all formats alike reads its facts here: block size, bits per code, meaning of a
//! scale's bytes, use of a global scale. The formats' own modules turn values into blocks: [`mx`],
//! [`nvfp4`].

use crate::comparison::ComparisonFormat;
use crate::facts::{BlockShape, ElementType, Facts, GlobalScaleUse};
use crate::scale::ScaleType;
use crate::{mx, nvfp4};

/// A microscaling format.
///
/// Formats parse from and print as their names:
///
/// ```
/// use microscale_formats::Format;
///
/// let format: Format = "nvfp4".parse()?;
/// assert_eq!((format, format.to_string().as_str()), (Format::Nvfp4, "nvfp4"));
/// # Ok::<(), microscale_formats::UnknownWord>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// Blocks of 32 E2M1 elements with an E8M0 scale (OCP MX v1.0).
    #[default]
    Mxfp4,
    /// Blocks of 16 E2M1 elements with an E4M3 scale, under a global scale (NVIDIA).
    Nvfp4,
    /// Blocks of 32 E4M3 elements with an E8M0 scale (OCP MX v1.0).
    Mxfp8E4m3,
    /// Blocks of 32 E5M2 elements with an E8M0 scale (OCP MX v1.0).
    Mxfp8E5m2,
    /// A format that others are compared with, on CPUs only.
    Comparison(ComparisonFormat),
}

const MXFP4: Facts = Facts {
    word: "mxfp4",
    block: BlockShape::row_of(mx::BLOCK),
    element: ElementType::E2m1,
    scale: ScaleType::E8m0,
    global_scale: GlobalScaleUse::None,
};

const NVFP4: Facts = Facts {
    word: "nvfp4",
    block: BlockShape::row_of(nvfp4::BLOCK),
    element: ElementType::E2m1,
    scale: ScaleType::E4m3,
    global_scale: GlobalScaleUse::UnderBlockScales,
};

const MXFP8_E4M3: Facts = Facts { word: "mxfp8-e4m3", element: ElementType::E4m3, ..MXFP4 };

const MXFP8_E5M2: Facts = Facts { word: "mxfp8-e5m2", element: ElementType::E5m2, ..MXFP4 };

impl Format {
    /// The formats that kernels compute: all except those for comparison.
    pub const WITH_KERNELS: [Self; 4] = [Self::Mxfp4, Self::Nvfp4, Self::Mxfp8E4m3, Self::Mxfp8E5m2];

    /// The formats whose tensors are multiplied: those for which [`Self::is_multiplied`] is true.
    pub const MULTIPLIED: [Self; 2] = [Self::Nvfp4, Self::Mxfp4];

    /// Every format.
    pub const ALL: [Self; Self::WITH_KERNELS.len() + ComparisonFormat::ALL.len()] = {
        let mut all = [Self::Mxfp4; Self::WITH_KERNELS.len() + ComparisonFormat::ALL.len()];
        let (kernels, comparisons) = all.split_at_mut(Self::WITH_KERNELS.len());
        kernels.copy_from_slice(&Self::WITH_KERNELS);
        let mut i = 0;
        while i < comparisons.len() {
            comparisons[i] = Self::Comparison(ComparisonFormat::ALL[i]);
            i += 1;
        }
        all
    };

    /// Returns the format's facts.
    #[inline]
    pub const fn facts(self) -> Facts {
        match self {
            Self::Mxfp4 => MXFP4,
            Self::Nvfp4 => NVFP4,
            Self::Mxfp8E4m3 => MXFP8_E4M3,
            Self::Mxfp8E5m2 => MXFP8_E5M2,
            Self::Comparison(format) => format.facts(),
        }
    }

    /// Returns the number of elements that share a scale.
    #[inline]
    pub const fn block(self) -> usize {
        self.facts().block.elements()
    }

    /// Returns the bits of an element's code.
    #[inline]
    pub const fn bits(self) -> usize {
        self.facts().element.bits()
    }

    /// Returns the bytes of packed codes in a block.
    #[inline]
    pub const fn block_bytes(self) -> usize {
        self.block() * self.bits() / 8
    }

    /// Returns the bytes of a block scale.
    #[inline]
    pub const fn scale_bytes(self) -> usize {
        self.facts().scale.bytes()
    }

    /// Returns whether a tensor can have a global scale.
    #[inline]
    pub const fn has_global_scale(self) -> bool {
        matches!(self.facts().global_scale, GlobalScaleUse::UnderBlockScales)
    }

    /// Returns whether block scales can be [searched](crate::search).
    ///
    /// True for formats with E2M1 elements, whose rounding the search is written for.
    #[inline]
    pub const fn is_searched(self) -> bool {
        matches!(self.facts().element, ElementType::E2m1)
    }

    /// Returns whether tensors can be multiplied ([`dot`](crate::dot),
    /// [`weights`](crate::weights)).
    ///
    /// True for formats with E2M1 elements.
    #[inline]
    pub const fn is_multiplied(self) -> bool {
        matches!(self.facts().element, ElementType::E2m1)
    }

    /// Returns whether the bits of a scale are NaN. A NaN scale makes its whole block NaN.
    #[inline]
    pub fn is_nan_scale(self, scale: impl Into<u16>) -> bool {
        self.facts().scale.is_nan(scale.into())
    }

    /// Returns whether `scale` is a valid block scale. See [`ScaleType`].
    #[inline]
    pub fn is_scale(self, scale: impl Into<u16>) -> bool {
        self.facts().scale.is_scale(scale.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_consistent() {
        for format in Format::ALL {
            let facts = format.facts();
            let same = Format::ALL.iter().filter(|other| other.facts().word == facts.word);
            assert_eq!(same.count(), 1, "{format}");
            assert!(matches!(format.bits(), 4 | 8), "{format}");
            assert_eq!(Format::MULTIPLIED.contains(&format), format.is_multiplied(), "{format}");
            // A block's codes fill whole bytes, and a block lies in one row of the matrix.
            assert_eq!((format.block() * format.bits() % 8, facts.block.rows), (0, 1), "{format}");
            let values = || (0..1 << format.bits()).map(|code| facts.element.decode(code as u8));
            let largest = values().filter(|value| value.is_finite()).fold(0.0, f32::max);
            assert_eq!(largest, facts.element.largest(), "{format}");
        }
    }
}
