//! The rule that loops over blocks follow: a recipe with the tensor's global scale put in.

use std::sync::Arc;

use microscale_formats::nvfp4::{self, GlobalScale, Quantizer};
use microscale_formats::search::Scales;
use microscale_formats::{E2m1, E4m3, E5m2, Search};

use super::blocks::Mx;
use super::groups::nvfp4::NvFactors;
use super::thresholds::Thresholds;
use super::vector::Vector;
use crate::element::{Dtype, Element};
use crate::recipe::Recipe;
use crate::scheme::{Global, NonFinite, Scheme};

/// The rule by which blocks are quantized.
#[derive(Clone)]
pub(super) struct Rule {
    pub(super) kind: Kind,
    /// E2M1's, for values of 16 bits.
    pub(super) thresholds: Arc<Thresholds>,
    pub(super) non_finite: NonFinite,
    /// If scales are searched.
    pub(super) searching: Option<Box<Searching>>,
}

/// The search for scales.
#[derive(Clone)]
pub(super) struct Searching {
    pub(super) search: Search,
    /// NVFP4's, worked out once.
    pub(super) factors: Factors,
}

/// The factors of NVFP4's codes, for each scale byte.
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
    /// NVFP4's arithmetic, with the factors that follow from it.
    Nvfp4(Quantizer, Box<NvFactors>),
}

impl Kind {
    /// That of a recipe for values of a dtype, and the global scale to store. `computed` gives the one that
    /// an arithmetic takes from the tensor.
    pub(super) fn of(
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
                let factors = NvFactors::new(&quantizer, global_scale, dtype);
                (Self::Nvfp4(quantizer, Box::new(factors)), global)
            }
        }
    }

    /// The thresholds that 16-bit values are compared with.
    #[inline(always)]
    pub(super) fn thresholds<T: Element, V: Vector>(&self) -> Arc<Thresholds> {
        match self {
            Self::Mxfp4(mx) => Thresholds::mxfp4::<T, V>(mx.arithmetic.ties),
            Self::Nvfp4(quantizer, _) => Thresholds::nvfp4::<T, V>(quantizer),
            Self::Mxfp8E4m3(_) | Self::Mxfp8E5m2(_) => Thresholds::none(),
        }
    }
}

impl Rule {
    /// The rule of a recipe: its arithmetic, what 16-bit values are compared with for that, and the tensor's
    /// global scale.
    pub(super) fn new(
        recipe: &Recipe,
        kind: Kind,
        thresholds: Arc<Thresholds>,
        global: Option<GlobalScale>,
    ) -> Self {
        let searching = (recipe.search != Search::None)
            .then(|| Box::new(Searching { search: recipe.search, factors: Factors::new(global) }));
        Self { kind, thresholds, non_finite: recipe.non_finite, searching }
    }
}
