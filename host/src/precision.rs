//! The precision of activations: an option of products on CPUs.

use microscale_formats::words;

/// The precision of activations in a product with quantized weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationPrecision {
    /// As they are. Nothing is rounded before the products are added.
    #[default]
    Exact,
    /// Rounded to INT8, 32 at a time with one f32 scale. On CPUs only.
    ///
    /// [`microscale_formats::int8`] defines the arithmetic and bounds its error.
    Int8,
}

words!(ActivationPrecision, "precision of activations" {
    Self::Exact = "exact",
    Self::Int8 = "int8",
});
