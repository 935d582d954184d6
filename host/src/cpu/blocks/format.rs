//! The reference implementation of each format's blocks.

use std::marker::PhantomData;

use microscale_formats::nvfp4::{self, Quantizer};
use microscale_formats::{BlockEvents, ScaleRule, mx};

use crate::element::Element;

/// A format with blocks of `N` elements.
pub(in crate::cpu) trait BlockFormat<const N: usize> {
    /// Quantizes a block by the reference. Returns its scale byte.
    fn quantize_block<T: Element>(&self, values: &[f32; N], codes: &mut [u8]) -> (u8, BlockEvents);
}

impl<E: mx::Element> BlockFormat<{ mx::BLOCK }> for Mx<E> {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        let (scale, events) = mx::quantize_block::<E>(values, &self.arithmetic, codes);
        (scale.to_bits(), events)
    }
}

impl BlockFormat<{ nvfp4::BLOCK }> for Quantizer {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        let (scale, events) = self.quantize_block(values, |x| T::from_f32(x).to_f32(), codes);
        (scale.to_bits(), events)
    }
}

/// An MX format: an element type and its arithmetic.
pub(in crate::cpu) struct Mx<E> {
    pub(in crate::cpu) arithmetic: mx::Arithmetic,
    element: PhantomData<E>,
}

impl<E> Clone for Mx<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Mx<E> {}

impl<E> Mx<E> {
    pub(in crate::cpu) fn new(arithmetic: mx::Arithmetic) -> Self {
        Self { arithmetic, element: PhantomData }
    }

    pub(in crate::cpu) fn with_rule(scale_rule: ScaleRule) -> Self {
        Self::new(mx::Arithmetic { scale_rule, ..Default::default() })
    }
}
