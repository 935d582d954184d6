//! What quantizing takes beside the recipe: the importance of errors, and the instruction set of a CPU.

use crate::cpu::Isa;

/// Options for quantizing one matrix. By default all errors count alike, and the CPU's best instruction set
/// does the work. The search for scales itself, which they weigh, is [`Recipe::search`](crate::Recipe::search).
///
/// ```
/// use microscale::{QuantizeOptions, Recipe, Search, Shape, quantize_with};
///
/// let values: Vec<f32> = (0..2 * 48).map(|i| (i as f32 * 0.37).sin()).collect();
/// let squares = vec![0.5; 48]; // the mean square of the activations that each column meets
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
    /// All errors count alike.
    #[default]
    Equal,
    /// A number for each column.
    Columns(&'a [f32]),
    /// A Hessian for each block of columns.
    Hessians(&'a [f32]),
}

impl<'a> QuantizeOptions<'a> {
    /// The default options.
    pub const fn new() -> Self {
        Self { importance: Importance::Equal, isa: None }
    }

    /// Weights errors by column in the search for scales: one number for each column, such as the mean square
    /// of the activations that it meets. Replaces a Hessian.
    ///
    /// Quantizing gives [`Error::Importance`](crate::Error::Importance) if there are not as many numbers as
    /// columns, or one is negative or not finite.
    #[must_use]
    pub const fn importance(self, columns: &'a [f32]) -> Self {
        Self { importance: Importance::Columns(columns), ..self }
    }

    /// Searches scales by the error that they make in what a layer computes: rᵀHr, with r what the codes of a
    /// scale leave of a block and H the block's Hessian. Replaces importance by column. CPUs do this, GPUs
    /// refuse it.
    ///
    /// `hessian` is `[blocks in a row, N, N]`, row by row, with N the format's block: 16 for NVFP4 and 32 for
    /// MXFP4. It is shared by all rows. Block j is the j-th of the diagonal blocks of XᵀX, with X the inputs
    /// `[tokens, columns]` that the layer meets, in any unit. Rows and columns behind the last column of the
    /// matrix are ignored. With [`Search::Full`](crate::Search::Full) the result is the least error that any
    /// scale has, in the arithmetic of [`microscale_formats::hessian`]; the other searches look at fewer
    /// scales.
    ///
    /// Quantizing gives [`Error::HessianWithoutSearch`](crate::Error::HessianWithoutSearch) if the recipe has
    /// no search and [`Error::NoSearch`](crate::Error::NoSearch) if the format has none;
    /// [`Error::HessianLength`](crate::Error::HessianLength) and
    /// [`Error::HessianEntry`](crate::Error::HessianEntry) if there are not as many entries as needed, or one
    /// is not finite, not symmetric (beyond 1/256 of the geometric mean of its diagonal entries), or negative
    /// on the diagonal; [`Error::HessianOnGpu`](crate::Error::HessianOnGpu) on a GPU.
    #[must_use]
    pub const fn hessian(self, hessian: &'a [f32]) -> Self {
        Self { importance: Importance::Hessians(hessian), ..self }
    }

    /// Has a CPU use a chosen instruction set, for tests and comparisons: all give the same bytes. GPUs ignore
    /// it.
    #[must_use]
    pub const fn isa(self, isa: Isa) -> Self {
        Self { isa: Some(isa), ..self }
    }

    /// The instruction set to use.
    pub(crate) fn chosen_isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::best)
    }
}
