//! The parameters of quantizing: a recipe, combined with the tensor's global scale.

use std::sync::Arc;

use microscale_formats::nvfp4::{self, GlobalScale, Quantizer};
use microscale_formats::search::Scales;
use microscale_formats::{E2m1, E4m3, E5m2, Search};

use super::groups::nvfp4::Nvfp4Factors;
use super::thresholds::Thresholds;
use crate::cpu::blocks::format::Mx;
use crate::cpu::simd::Vector;
use crate::element::{Dtype, Element};
use crate::recipe::Recipe;
use crate::scheme::{Global, NonFinite, Scheme};

/// The parameters of quantizing a run of blocks.
#[derive(Clone)]
pub(in crate::cpu) struct QuantizeParams {
    pub(in crate::cpu) format: FormatParams,
    /// The thresholds of E2M1, for 16-bit values.
    pub(in crate::cpu) thresholds: Arc<Thresholds>,
    pub(in crate::cpu) non_finite: NonFinite,
    /// Present if scales are searched.
    pub(in crate::cpu) searching: Option<Box<SearchParams>>,
}

/// The parameters of a search for scales.
#[derive(Clone)]
pub(in crate::cpu) struct SearchParams {
    pub(in crate::cpu) search: Search,
    /// The factors of NVFP4, computed once.
    pub(in crate::cpu) factors: ScaleFactors,
}

/// The factor of NVFP4 codes under each scale byte.
#[derive(Clone)]
pub(in crate::cpu) struct ScaleFactors([f32; 128]);

impl ScaleFactors {
    fn new(global: Option<GlobalScale>) -> Self {
        Self(std::array::from_fn(|byte| global.factor(byte as u8)))
    }
}

impl Scales for ScaleFactors {
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
pub(in crate::cpu) enum FormatParams {
    Mxfp4(Mx<E2m1>),
    Mxfp8E4m3(Mx<E4m3>),
    Mxfp8E5m2(Mx<E5m2>),
    /// NVFP4, with the factors of each scale byte.
    Nvfp4(Quantizer, Box<Nvfp4Factors>),
}

impl FormatParams {
    /// The arithmetic of a recipe, and the global scale to store.
    ///
    /// `computed` returns the global scale that the arithmetic derives from the tensor.
    pub(in crate::cpu) fn of(
        recipe: &Recipe,
        dtype: Dtype,
        computed: impl FnOnce(&nvfp4::Arithmetic) -> GlobalScale,
    ) -> (Self, Option<GlobalScale>) {
        match recipe.scheme {
            Scheme::Mxfp4(arithmetic) => (Self::Mxfp4(Mx::new(arithmetic)), None),
            Scheme::Mxfp8E4m3(rule) => (Self::Mxfp8E4m3(Mx::with_rule(rule)), None),
            Scheme::Mxfp8E5m2(rule) => (Self::Mxfp8E5m2(Mx::with_rule(rule)), None),
            Scheme::Comparison(_) => unreachable!("quantized by its definition, which needs no rule"),
            Scheme::Nvfp4(arithmetic, global) => {
                let global = match global {
                    Global::FromAmax => Some(computed(&arithmetic)),
                    Global::Given(given) => Some(given),
                    Global::Absent => None,
                };
                let global_scale = global.map_or(1.0, GlobalScale::value);
                let quantizer = Quantizer::new(arithmetic, global_scale);
                let factors = Nvfp4Factors::new(&quantizer, global_scale, dtype);
                (Self::Nvfp4(quantizer, Box::new(factors)), global)
            }
        }
    }

    /// The thresholds of 16-bit values.
    #[inline(always)]
    pub(in crate::cpu) fn thresholds<T: Element, V: Vector>(&self, simd: V) -> Arc<Thresholds> {
        match self {
            Self::Mxfp4(mx) => Thresholds::mxfp4::<T, V>(simd, mx.arithmetic.ties),
            Self::Nvfp4(quantizer, _) => Thresholds::nvfp4::<T, V>(simd, quantizer),
            Self::Mxfp8E4m3(_) | Self::Mxfp8E5m2(_) => Thresholds::none(),
        }
    }
}

impl QuantizeParams {
    /// Combines a recipe with its arithmetic, its thresholds and the tensor's global scale.
    pub(in crate::cpu) fn new(
        recipe: &Recipe,
        format: FormatParams,
        thresholds: Arc<Thresholds>,
        global: Option<GlobalScale>,
    ) -> Self {
        let searching = (recipe.search != Search::None)
            .then(|| Box::new(SearchParams { search: recipe.search, factors: ScaleFactors::new(global) }));
        Self { format, thresholds, non_finite: recipe.non_finite, searching }
    }
}
