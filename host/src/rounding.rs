//! Rounding of activations: an option of products on CPUs.

use microscale_formats::words;

/// How a product with quantized weights rounds activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationRounding {
    /// As they are. Nothing is rounded before the products are added.
    #[default]
    Exact,
    /// Rounded to INT8, 32 at a time with one f32 scale. On CPUs only.
    ///
    /// [`microscale_formats::int8`] defines the arithmetic and bounds its error.
    Int8,
}

words!(ActivationRounding, "rounding of activations" {
    Self::Exact = "exact",
    Self::Int8 = "int8",
});
