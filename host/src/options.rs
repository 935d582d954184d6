//! Options of quantization besides the recipe: the importance of errors, and the CPU's instruction
//! set.

use crate::cpu::Isa;

/// Options for quantizing one matrix.
///
/// By default all errors have equal weight, and the CPU uses its best instruction set. Importance
/// weights the errors of the search in [`Recipe::search`](crate::Recipe::search).
///
/// ```
/// use microscale::{QuantizeOptions, Recipe, Search, Shape, quantize_with};
///
/// let values: Vec<f32> = (0..2 * 48).map(|i| (i as f32 * 0.37).sin()).collect();
/// let squares = vec![0.5; 48]; // the mean square of each column's activations
/// let recipe = Recipe { search: Search::Full, ..Recipe::default() };
/// let options = QuantizeOptions::new().importance(&squares);
/// let quantized = quantize_with(&values, Shape::new(2, 48), &recipe, options)?;
/// assert_eq!(quantized.tensor.cols(), 48);
/// # Ok::<(), microscale::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct QuantizeOptions<'a> {
    pub(crate) importance: Importance<'a>,
    isa: Option<Isa>,
}

/// The importance of errors in a search for scales.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Importance<'a> {
    /// All errors have equal weight.
    #[default]
    Equal,
    /// One weight per column.
    Columns(&'a [f32]),
    /// One Hessian per block of columns.
    Hessians(&'a [f32]),
}

impl<'a> QuantizeOptions<'a> {
    /// Returns the default options.
    pub const fn new() -> Self {
        Self { importance: Importance::Equal, isa: None }
    }

    /// Weights errors by column in the search for scales. Replaces a Hessian.
    ///
    /// Pass one number per column, such as the mean square of the column's activations. Quantizing
    /// returns [`Error::Importance`](crate::Error::Importance) if the number of weights is wrong,
    /// or if one is negative or not finite.
    #[must_use]
    pub const fn importance(self, columns: &'a [f32]) -> Self {
        Self { importance: Importance::Columns(columns), ..self }
    }

    /// Searches scales by the error in a layer's output. Replaces importance by column.
    ///
    /// The error is rᵀHr, where r is the block minus its dequantized codes and H the block's
    /// Hessian. Only CPUs support this.
    ///
    /// `hessian` is `[blocks in a row, N, N]`, row by row, where N is the format's block: 16 for
    /// NVFP4 and 32 for MXFP4. All rows share it. Block j is the j-th diagonal block of XᵀX, where
    /// X are the layer's inputs `[tokens, columns]`, in any unit. Rows and columns after the
    /// matrix's last column are ignored. With [`Search::Full`](crate::Search::Full) the result is
    /// the least error of all scales, in the arithmetic of [`microscale_formats::hessian`]. Other
    /// searches try fewer scales.
    ///
    /// Quantizing returns these errors:
    ///
    /// - [`Error::HessianWithoutSearch`](crate::Error::HessianWithoutSearch) if the recipe has no
    ///   search, and [`Error::NoSearch`](crate::Error::NoSearch) if the format has none.
    /// - [`Error::HessianLength`](crate::Error::HessianLength) if the number of entries is wrong.
    /// - [`Error::HessianEntry`](crate::Error::HessianEntry) if an entry is not finite, not
    ///   symmetric (beyond 1/256 of the geometric mean of its diagonal entries), or negative on the
    ///   diagonal.
    /// - [`Error::HessianOnGpu`](crate::Error::HessianOnGpu) on a GPU.
    #[must_use]
    pub const fn hessian(self, hessian: &'a [f32]) -> Self {
        Self { importance: Importance::Hessians(hessian), ..self }
    }

    /// Selects the CPU's instruction set, for tests and comparisons.
    ///
    /// All instruction sets give the same bytes. GPUs ignore this option.
    #[must_use]
    pub const fn isa(self, isa: Isa) -> Self {
        Self { isa: Some(isa), ..self }
    }

    /// Returns the instruction set to use.
    pub(crate) fn chosen_isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::best)
    }
}
