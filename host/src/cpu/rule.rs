//! What the loops over blocks need to know: a recipe with the tensor's global scale put in, and the way back.

use std::marker::PhantomData;
use std::sync::Arc;

use microscale_formats::facts::ElementType;
use microscale_formats::nvfp4::{self, GlobalScale, Quantizer};
use microscale_formats::search::Scales;
use microscale_formats::{BlockEvents, E2m1, E4m3, E5m2, E8m0, ScaleRule, ScaleType, Search, mx};

use super::groups::NvFactors;
use super::isa::Isa;
use super::thresholds::Thresholds;
use super::values::Values;
use super::vector::Vector;
use crate::element::{Dtype, Element};
use crate::recipe::{Format, Global, NonFinite, Recipe, Scheme};
use crate::tensor::QuantizedTensor;

/// How blocks are quantized.
#[derive(Clone)]
pub(super) struct Rule {
    pub(super) kind: Kind,
    /// E2M1's, for values of 16 bits.
    pub(super) thresholds: Arc<Thresholds>,
    pub(super) non_finite: NonFinite,
    /// If scales are searched.
    pub(super) searching: Option<Box<Searching>>,
}

/// How scales are searched.
#[derive(Clone)]
pub(super) struct Searching {
    pub(super) search: Search,
    /// NVFP4's, worked out once.
    pub(super) factors: Factors,
}

/// What NVFP4's codes are multiplied with, for each scale byte.
#[derive(Clone)]
pub(super) struct Factors([f32; 128]);

impl Factors {
    fn new(global: Option<GlobalScale>) -> Self {
        Self(std::array::from_fn(|byte| global.factor(byte as u8)))
    }
}

impl Scales for Factors {
    const FIRST: u8 = <Option<GlobalScale> as Scales>::FIRST;
    const LAST: u8 = <Option<GlobalScale> as Scales>::LAST;
    const UNHALVED: u8 = <Option<GlobalScale> as Scales>::UNHALVED;
    const OCTAVE: u8 = <Option<GlobalScale> as Scales>::OCTAVE;

    #[inline(always)]
    fn factor(&self, byte: u8) -> f32 {
        self.0[usize::from(byte & 127)]
    }
}

/// The arithmetic of each format.
#[derive(Clone)]
pub(super) enum Kind {
    Mxfp4(Mx<E2m1>),
    Mxfp8E4m3(Mx<E4m3>),
    Mxfp8E5m2(Mx<E5m2>),
    /// With the factors that follow.
    Nvfp4(Quantizer, Box<NvFactors>),
}

impl Kind {
    fn nvfp4(arithmetic: nvfp4::Arithmetic, global_scale: f32, dtype: Dtype) -> Self {
        let quantizer = Quantizer::new(arithmetic, global_scale);
        Self::Nvfp4(quantizer, Box::new(NvFactors::new(&quantizer, global_scale, dtype)))
    }

    /// What 16-bit values are compared with.
    #[inline(always)]
    pub(super) fn thresholds<T: Element, V: Vector>(&self) -> Arc<Thresholds> {
        match self {
            Self::Mxfp4(mx) => Thresholds::mxfp4::<T, V>(mx.arithmetic.ties),
            Self::Nvfp4(quantizer, _) => Thresholds::nvfp4::<T, V>(quantizer),
            Self::Mxfp8E4m3(_) | Self::Mxfp8E5m2(_) => Thresholds::none(),
        }
    }
}

/// An MX format's arithmetic.
pub(super) struct Mx<E> {
    pub(super) arithmetic: mx::Arithmetic,
    element: PhantomData<E>,
}

impl<E> Clone for Mx<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Mx<E> {}

impl<E> Mx<E> {
    fn new(arithmetic: mx::Arithmetic) -> Self {
        Self { arithmetic, element: PhantomData }
    }

    fn with_rule(scale_rule: ScaleRule) -> Self {
        Self::new(mx::Arithmetic { scale_rule, ..Default::default() })
    }
}

impl Rule {
    /// The rule of a recipe, for values of a dtype on an instruction set, and the global scale to store. `computed` gives the one that an arithmetic takes
    /// from the tensor.
    pub(super) fn new<T: Element, E>(
        recipe: &Recipe,
        isa: Isa,
        computed: impl FnOnce(&nvfp4::Arithmetic) -> Result<GlobalScale, E>,
    ) -> Result<(Self, Option<GlobalScale>), E> {
        let (kind, global) = match recipe.scheme {
            Scheme::Mxfp4(arithmetic) => (Kind::Mxfp4(Mx::new(arithmetic)), None),
            Scheme::Mxfp8E4m3(rule) => (Kind::Mxfp8E4m3(Mx::with_rule(rule)), None),
            Scheme::Mxfp8E5m2(rule) => (Kind::Mxfp8E5m2(Mx::with_rule(rule)), None),
            Scheme::Comparison(_) => unreachable!("quantized by its definition, which needs no rule"),
            Scheme::Nvfp4(arithmetic, global) => {
                let global = match global {
                    Global::FromAmax => Some(computed(&arithmetic)?),
                    Global::Given(given) => Some(given),
                    Global::Absent => None,
                };
                (Kind::nvfp4(arithmetic, global.map_or(1.0, GlobalScale::value), T::DTYPE), global)
            }
        };
        let thresholds = isa.thresholds::<T>(&kind);
        let searching = (recipe.search != Search::None)
            .then(|| Box::new(Searching { search: recipe.search, factors: Factors::new(global) }));
        Ok((Self { kind, thresholds, non_finite: recipe.non_finite, searching }, global))
    }
}

/// A format's blocks of `N` elements, by their definition.
pub(super) trait Blocks<const N: usize> {
    /// Quantizes a block to its scale byte and codes. See `microscale_formats`.
    fn quantize_block<T: Element>(&self, values: &[f32; N], codes: &mut [u8]) -> (u8, BlockEvents);
}

impl<E: mx::Element> Blocks<{ mx::BLOCK }> for Mx<E> {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        let (scale, events) = mx::quantize_block::<E>(values, &self.arithmetic, codes);
        (scale.to_bits(), events)
    }
}

impl Blocks<{ nvfp4::BLOCK }> for Quantizer {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        let (scale, events) = self.quantize_block(values, |x| T::from_f32(x).to_f32(), codes);
        (scale.to_bits(), events)
    }
}

/// How blocks are dequantized.
pub(crate) struct Decoder {
    pub(super) format: Format,
    scale_type: ScaleType,
    global_scale: Option<GlobalScale>,
    /// Of E2M1, if values have 16 bits.
    pub(super) values: Option<Arc<Values>>,
    /// Whether values are written past the caches.
    pub(super) streams: bool,
}

impl Decoder {
    /// For the blocks of a tensor, and values of a dtype.
    pub(crate) fn of<T: Element>(tensor: &QuantizedTensor) -> Self {
        let (format, global_scale) = (tensor.format(), tensor.global_scale());
        let scale_type = format.facts().scale;
        let mut decoder = Self { format, scale_type, global_scale, values: None, streams: false };
        if T::DTYPE != Dtype::F32 && format.facts().element == ElementType::E2m1 {
            decoder.values = Some(Values::of::<T>(&decoder));
        }
        decoder
    }

    /// Values are written past the caches.
    pub(super) fn streaming(self, streams: bool) -> Self {
        Self { streams, ..self }
    }

    /// What the elements of a block are multiplied with; `None` for a NaN scale.
    #[inline(always)]
    pub(crate) fn factor(&self, scale: impl Into<u16>) -> Option<f32> {
        let scale = scale.into();
        if self.scale_type.is_nan(scale) {
            return None;
        }
        Some(match (self.scale_type, self.global_scale) {
            (ScaleType::E4m3, Some(global)) => global.factor(E4m3::from_bits(scale as u8)),
            (scale_type, _) => scale_type.value(scale),
        })
    }

    /// The values of a block of `N`, by the definition.
    pub(super) fn block<const N: usize>(&self, scale: u8, codes: &[u8]) -> [f32; N] {
        let mut values = [0.0; N];
        let e8m0 = E8m0::from_bits(scale);
        match self.format {
            Format::Mxfp4 => values.copy_from_slice(&mx::dequantize_block::<E2m1>(e8m0, codes)),
            Format::Mxfp8E4m3 => values.copy_from_slice(&mx::dequantize_block::<E4m3>(e8m0, codes)),
            Format::Mxfp8E5m2 => values.copy_from_slice(&mx::dequantize_block::<E5m2>(e8m0, codes)),
            Format::Nvfp4 => {
                let scale = E4m3::from_bits(scale);
                values.copy_from_slice(&nvfp4::dequantize_block(scale, self.global_scale, codes));
            }
            Format::Comparison(format) => {
                (format.definition().dequantize_block)(scale.into(), codes, &mut values);
            }
        }
        values
    }
}
