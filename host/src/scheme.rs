//! The requested numerics: a format's [`Scheme`], the [`Numerics`] that names it, and the NaN
//! policy.

use microscale_formats::{
    ComparisonFormat, Format, GlobalScale, NegativeZero, ScaleRule, Ties, Words, mx, nvfp4, words,
};

use crate::element::Element;

/// How NaN and infinities are treated. The report counts them under every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NonFinite {
    /// Refuse the input. The error names the first one's row and column.
    #[default]
    Error,
    /// Make the block NaN: codes 0 and the NaN scale byte, 255 or NVFP4's 0x7F.
    Propagate,
    /// Replace ±Inf by the largest finite value of the input's dtype, and NaN by 0.
    Saturate,
}

impl NonFinite {
    /// Returns the replacement of a value of dtype `T` before its block is quantized.
    pub(crate) fn replaced<T: Element>(self, value: f32) -> f32 {
        match self {
            Self::Saturate if value.is_nan() => 0.0,
            Self::Saturate => value.clamp(-T::MAX, T::MAX),
            Self::Error | Self::Propagate => value,
        }
    }
}

/// Named numerics: the choices of one library.
///
/// Errors that some of these libraries make next to powers of two or at extreme exponents are not
/// reproduced. docs/compatibility.md in the repository lists them.
///
/// Numerics parse from and print as their names:
///
/// ```
/// use microscale::Numerics;
///
/// let numerics: Numerics = "compressed-tensors".parse()?;
/// assert_eq!(numerics, Numerics::CompressedTensors);
/// assert_eq!(numerics.to_string(), "compressed-tensors");
/// let error = "llama".parse::<Numerics>().unwrap_err();
/// assert!(error.to_string().starts_with("unknown numerics; there are ocp, torchao, "));
/// # Ok::<(), microscale::UnknownWord>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Numerics {
    /// OCP MX v1.0, torchao's default for the MX formats: floor, ties to even, −0 preserved.
    Ocp,
    /// torchao: OCP's MX formats, and NVFP4 with a multiplier.
    Torchao,
    /// compressed-tensors (vLLM's llm-compressor).
    CompressedTensors,
    /// NVIDIA ModelOpt.
    Modelopt,
    /// NVIDIA Transformer Engine, and FlashInfer with exact math: NVFP4 with a divisor.
    TransformerEngine,
    /// ggml (llama.cpp): floor, ties toward zero, no −0.
    Ggml,
    /// bitsandbytes: NF4.
    Bitsandbytes,
}

impl Numerics {
    /// Returns the default numerics of a format.
    ///
    /// They are OCP's for the MX formats, and for NVFP4 the ones that loaders of checkpoints
    /// expect.
    pub const fn default_for(format: Format) -> Self {
        match format {
            Format::Mxfp4 | Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => Self::Ocp,
            Format::Nvfp4 => Self::CompressedTensors,
            Format::Comparison(format) => Self::of_comparison(format),
        }
    }

    /// Returns the numerics of a comparison format, which has only one.
    const fn of_comparison(format: ComparisonFormat) -> Self {
        match format {
            ComparisonFormat::Mxfp4E3m0 => Self::Ocp,
            ComparisonFormat::Nf4 => Self::Bitsandbytes,
        }
    }

    /// Returns the MXFP4 arithmetic, if the library has one. This is the table of MXFP4's numerics.
    ///
    /// The constants of [`nvfp4::Arithmetic`] are the table for NVFP4.
    pub const fn mxfp4(self) -> Option<mx::Arithmetic> {
        let (scale_rule, ties, negative_zero) = match self {
            Self::Ocp | Self::Torchao => (ScaleRule::Floor, Ties::Even, NegativeZero::Keep),
            Self::CompressedTensors => (ScaleRule::Even, Ties::Even, NegativeZero::DropInput),
            Self::Modelopt => (ScaleRule::Rceil, Ties::Zero, NegativeZero::Force),
            Self::Ggml => (ScaleRule::Floor, Ties::Zero, NegativeZero::Drop),
            Self::TransformerEngine | Self::Bitsandbytes => return None,
        };
        Some(mx::Arithmetic { scale_rule, ties, negative_zero })
    }

    /// Returns the NVFP4 arithmetic, if the library has one.
    pub const fn nvfp4(self) -> Option<nvfp4::Arithmetic> {
        match self {
            Self::Torchao => Some(nvfp4::Arithmetic::TORCHAO),
            Self::CompressedTensors => Some(nvfp4::Arithmetic::COMPRESSED_TENSORS),
            Self::Modelopt => Some(nvfp4::Arithmetic::MODELOPT),
            Self::TransformerEngine => Some(nvfp4::Arithmetic::TRANSFORMER_ENGINE),
            Self::Ocp | Self::Ggml | Self::Bitsandbytes => None,
        }
    }

    /// Returns the scheme of a format, or `None` if the library does not have the format.
    ///
    /// NVFP4's global scale is computed from amax.
    pub fn scheme(self, format: Format) -> Option<Scheme> {
        let is_ocp = matches!(self, Self::Ocp | Self::Torchao);
        match format {
            Format::Mxfp4 => self.mxfp4().map(Scheme::Mxfp4),
            Format::Nvfp4 => self.nvfp4().map(|arithmetic| Scheme::Nvfp4(arithmetic, Global::FromAmax)),
            Format::Mxfp8E4m3 => is_ocp.then_some(Scheme::Mxfp8E4m3(ScaleRule::Floor)),
            Format::Mxfp8E5m2 => is_ocp.then_some(Scheme::Mxfp8E5m2(ScaleRule::Floor)),
            Format::Comparison(format) => {
                (self == Self::of_comparison(format)).then_some(Scheme::Comparison(format))
            }
        }
    }
}

/// The source of NVFP4's global scale.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Global {
    /// Computed from the tensor's amax, in a first pass over the values.
    #[default]
    FromAmax,
    /// Given. Its direction must match the arithmetic.
    Given(GlobalScale),
    /// Absent. Block scales apply as under a global scale of 1.
    Absent,
}

/// A format with everything that determines the bytes of its blocks, given finite values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// MXFP4.
    Mxfp4(mx::Arithmetic),
    /// NVFP4.
    Nvfp4(nvfp4::Arithmetic, Global),
    /// MXFP8 with E4M3 elements. Ties go to even and −0 is preserved, as in every implementation.
    Mxfp8E4m3(ScaleRule),
    /// MXFP8 with E5M2 elements. Ties go to even and −0 is preserved, as in every implementation.
    Mxfp8E5m2(ScaleRule),
    /// A format for comparison, with its only arithmetic.
    Comparison(ComparisonFormat),
}

impl Scheme {
    /// Returns the format.
    pub const fn format(&self) -> Format {
        match self {
            Self::Mxfp4(_) => Format::Mxfp4,
            Self::Nvfp4(..) => Format::Nvfp4,
            Self::Mxfp8E4m3(_) => Format::Mxfp8E4m3,
            Self::Mxfp8E5m2(_) => Format::Mxfp8E5m2,
            Self::Comparison(format) => Format::Comparison(*format),
        }
    }

    /// Returns the scale rule, if the scheme offers a choice.
    pub const fn scale_rule_mut(&mut self) -> Option<&mut ScaleRule> {
        match self {
            Self::Mxfp4(arithmetic) => Some(&mut arithmetic.scale_rule),
            Self::Mxfp8E4m3(rule) | Self::Mxfp8E5m2(rule) => Some(rule),
            Self::Nvfp4(..) | Self::Comparison(_) => None,
        }
    }

    /// Returns the arithmetic of MXFP4, the only scheme with a choice of ties and signs of zeros.
    pub const fn mxfp4_mut(&mut self) -> Option<&mut mx::Arithmetic> {
        match self {
            Self::Mxfp4(arithmetic) => Some(arithmetic),
            _ => None,
        }
    }

    /// Returns the arithmetic that computes the global scale from amax.
    ///
    /// `None` if there is no global scale, or if it is given.
    pub const fn global_from_amax(&self) -> Option<nvfp4::Arithmetic> {
        match self {
            Self::Nvfp4(arithmetic, Global::FromAmax) => Some(*arithmetic),
            _ => None,
        }
    }

    /// Returns the name of the numerics, if they have one.
    pub fn numerics(&self) -> Option<Numerics> {
        let without_global = match *self {
            Self::Nvfp4(arithmetic, _) => Self::Nvfp4(arithmetic, Global::FromAmax),
            scheme => scheme,
        };
        let mut numerics = Numerics::WORDS.iter().map(|(_, numerics)| *numerics);
        numerics.find(|numerics| numerics.scheme(self.format()) == Some(without_global))
    }
}

impl Default for Scheme {
    fn default() -> Self {
        Self::Mxfp4(mx::Arithmetic::default())
    }
}

words!(NonFinite, "treatment of NaN and infinities" { Self::Error = "error", Self::Propagate = "propagate", Self::Saturate = "saturate" });
words!(Numerics, "numerics" {
    Self::Ocp = "ocp",
    Self::Torchao = "torchao",
    Self::CompressedTensors = "compressed-tensors",
    Self::Modelopt = "modelopt",
    Self::TransformerEngine = "transformer-engine",
    Self::Ggml = "ggml",
    Self::Bitsandbytes = "bitsandbytes",
});
