//! Quantizing activations: row operations, formats, inputs and outputs.

use microscale_formats::activations::{GROUP, RmsNorm};
use microscale_formats::{ActivationLayout, GlobalScale, Glu, ScaleRule, nvfp4};

use crate::element::Element;
use crate::error::{ActivationFault, Error, Result};
use crate::shape::Shape;

/// How activations are quantized: a row operation, a format, and the layout of block scales.
///
/// The operation's results are rounded to the dtype of the input before they are quantized. So a
/// fused quantizer gives the bytes of two separate ones. The arithmetic is documented in
/// [`microscale_formats::activations`].
///
/// ```
/// use half::bf16;
/// use microscale::formats::activations::RmsNorm;
/// use microscale::{
///     ActivationFormat, ActivationInput, ActivationRecipe, ActivationScale, RowOperation, Shape,
///     quantize_activations,
/// };
///
/// let recipe = ActivationRecipe {
///     operation: RowOperation::RmsNorm(RmsNorm::llama(1e-6)),
///     ..ActivationRecipe::new(ActivationFormat::Nvfp4(ActivationScale::PerToken))
/// };
/// let (x, weights) = ([bf16::ONE; 3 * 64], [bf16::ONE; 64]);
/// let input = ActivationInput::new(&x, Shape::new(3, 64));
/// let input = ActivationInput { weights: Some(&weights), ..input };
/// let quantized = quantize_activations(input, &recipe)?;
/// assert_eq!((quantized.codes.len(), quantized.scales.len()), (3 * 32, 3 * 4));
/// assert_eq!(quantized.f32_scales.len(), 3);
/// # Ok::<(), microscale::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationRecipe {
    /// The operation that computes a row.
    pub operation: RowOperation,
    /// The format, and the source of its scales.
    pub format: ActivationFormat,
    /// The layout of block scales. FP8 has none.
    pub layout: ActivationLayout,
}

/// The operation that computes a row before it is quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowOperation {
    /// None.
    None,
    /// A gate: rows of 2·K values become rows of K.
    Glu(Glu, GluOrder),
    /// RMSNorm, after adding the residual if there is one.
    RmsNorm(RmsNorm),
}

/// The order of the two halves of a gate's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GluOrder {
    /// K gates, then K values of `up`: vLLM's and FlashInfer's order.
    #[default]
    Halves,
    /// Gate and `up` alternate: gpt-oss' order.
    Interleaved,
}

/// The format of quantized activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ActivationFormat {
    /// FP8 (E4M3) under f32 scales. Codes are `[rows, K]`.
    Fp8(Fp8Scale),
    /// MXFP8 with E4M3 elements.
    Mxfp8(ScaleRule),
    /// MXFP4 with ties to even.
    Mxfp4(ScaleRule),
    /// NVFP4 with the numerics of Transformer Engine, which are FlashInfer's with exact math.
    Nvfp4(ActivationScale),
}

/// The source of FP8's scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fp8Scale {
    /// One scale, or one per expert: [`ActivationInput::scales`].
    Given,
    /// From each row's amax.
    PerToken,
    /// From the amax of all rows, which are no experts'.
    PerTensor,
    /// From the amax of each 128 columns of a row.
    PerGroup {
        /// Rounds scales up to powers of two.
        power_of_two: bool,
    },
}

/// The source of NVFP4's global scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationScale {
    /// One global scale, or one per expert, in this direction: [`ActivationInput::scales`]. A
    /// multiplier s stands for the divisor 1 / s, rounded to f32.
    Given(nvfp4::Direction),
    /// From each row's amax, as if the row were a tensor. Written as a multiplier.
    PerToken,
}

/// The rows to quantize.
#[derive(Debug)]
pub struct ActivationInput<'a, T> {
    /// The values.
    pub values: &'a [T],
    /// Their shape: rows of K columns, or of 2·K for a gate.
    pub shape: Shape,
    /// Added in f32 before RMSNorm. The sum, rounded to T, replaces it. Rows without gaps.
    pub residual: Option<&'a mut [T]>,
    /// RMSNorm's weights, one per column. None stands for ones.
    pub weights: Option<&'a [T]>,
    /// Given scales: one, or one per expert.
    pub scales: &'a [f32],
    /// Rows by expert, or `None` for a single matrix.
    pub experts: Option<ActivationExperts<'a>>,
}

/// Rows by expert.
#[derive(Clone, Copy, Debug)]
pub enum ActivationExperts<'a> {
    /// Rows sorted by expert.
    Sorted {
        /// Each expert's first row, and the number of rows at the end: `[experts + 1]`.
        offsets: &'a [u32],
        /// The same for rows of scales: `[experts + 1]`. Experts start at whole tiles.
        scale_offsets: &'a [u32],
    },
    /// `[experts, rows, columns]`, where each expert's first rows exist.
    Masked {
        /// Each expert's number of rows that exist: `[experts]`.
        counts: &'a [u32],
    },
}

impl<'a, T> ActivationInput<'a, T> {
    /// Rows of one matrix, without residual, weights or given scales.
    pub const fn new(values: &'a [T], shape: Shape) -> Self {
        Self { values, shape, residual: None, weights: None, scales: &[], experts: None }
    }
}

/// Quantized activations.
///
/// Codes are `[rows, bytes]`: 4-bit codes two per byte, with the lower index in the low nibble, and
/// block formats padded with zeros to whole blocks. FP8 codes are `[rows, K]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizedActivations {
    /// Codes.
    pub codes: Vec<u8>,
    /// Block scales in the recipe's layout, with padding. Empty for FP8.
    pub scales: Vec<u8>,
    /// Computed scales that multiply codes: NVFP4's and FP8's per token, `[rows]`, FP8's per
    /// tensor, `[1]`, or FP8's per group, `[rows, groups]`. Otherwise empty.
    pub f32_scales: Vec<f32>,
}

impl ActivationRecipe {
    /// A recipe without an operation, with linear scales.
    pub const fn new(format: ActivationFormat) -> Self {
        Self { operation: RowOperation::None, format, layout: ActivationLayout::Linear }
    }

    /// Returns the columns that are quantized, given the columns of the input.
    pub(crate) const fn columns(&self, input: usize) -> usize {
        match self.operation {
            RowOperation::Glu(..) => input / 2,
            RowOperation::None | RowOperation::RmsNorm(_) => input,
        }
    }

    /// Returns the number of bytes of codes, bytes of scales, and f32 scales of an output with
    /// `rows` rows of codes, `scale_rows` rows of scales and `columns` columns; `None` on overflow.
    ///
    /// `scale_rows` is `rows` without experts.
    pub fn lengths(&self, rows: usize, scale_rows: usize, columns: usize) -> Option<[usize; 3]> {
        let blocks = columns.div_ceil(self.format.block());
        let scales = match self.format {
            ActivationFormat::Fp8(_) => 0,
            _ => self.layout.bytes(scale_rows, blocks)?,
        };
        let of_tensor = usize::from(self.format == ActivationFormat::Fp8(Fp8Scale::PerTensor));
        let f32_scales = rows.checked_mul(self.format.f32_scales(columns))?.checked_add(of_tensor)?;
        Some([rows.checked_mul(self.format.row_bytes(columns))?, scales, f32_scales])
    }
}

impl ActivationFormat {
    /// Returns the columns per block scale; 1 for FP8, which has no block scales.
    pub const fn block(&self) -> usize {
        match self {
            Self::Fp8(_) => 1,
            Self::Mxfp8(_) | Self::Mxfp4(_) => microscale_formats::mx::BLOCK,
            Self::Nvfp4(_) => nvfp4::BLOCK,
        }
    }

    /// Returns the bytes of a row's codes.
    pub const fn row_bytes(&self, columns: usize) -> usize {
        let padded = columns.next_multiple_of(self.block());
        match self {
            Self::Fp8(_) | Self::Mxfp8(_) => padded,
            Self::Mxfp4(_) | Self::Nvfp4(_) => padded / 2,
        }
    }

    /// Returns the number of f32 scales that are computed for a row.
    pub(crate) const fn f32_scales(&self, columns: usize) -> usize {
        match self {
            Self::Fp8(Fp8Scale::PerGroup { .. }) => columns.div_ceil(GROUP),
            Self::Fp8(Fp8Scale::PerToken) | Self::Nvfp4(ActivationScale::PerToken) => 1,
            _ => 0,
        }
    }

    /// Returns whether scales are given: [`ActivationInput::scales`].
    pub const fn takes_scales(&self) -> bool {
        matches!(self, Self::Fp8(Fp8Scale::Given) | Self::Nvfp4(ActivationScale::Given(_)))
    }
}

/// The sizes of an input, checked against a recipe.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivationSizes {
    /// Rows of values and codes.
    pub(crate) rows: usize,
    /// Rows of scales, without padding to tiles; of an expert for masked experts.
    pub(crate) scale_rows: usize,
    /// Columns of the output.
    pub(crate) columns: usize,
    /// Experts; 1 without any.
    pub(crate) experts: usize,
}

/// The lengths of an input's parts.
pub(crate) struct ActivationParts {
    pub(crate) shape: Shape,
    pub(crate) residual: Option<usize>,
    pub(crate) weights: Option<usize>,
    pub(crate) scales: usize,
    /// Experts, if there are any.
    pub(crate) experts: Option<usize>,
}

impl ActivationRecipe {
    /// Checks an input's parts but for the values' length.
    pub(crate) fn check(&self, parts: &ActivationParts) -> Result<usize> {
        let ActivationParts { shape, residual, weights, scales, experts } = *parts;
        let fault = |fault| Err(Error::Activations(fault));
        if matches!(self.operation, RowOperation::Glu(..)) && !shape.cols.is_multiple_of(2) {
            return fault(ActivationFault::OddColumns { columns: shape.cols });
        }
        let columns = self.columns(shape.cols);
        let normalizes = match self.operation {
            RowOperation::RmsNorm(norm) => {
                if !(norm.epsilon.is_normal() && norm.epsilon > 0.0) {
                    return fault(ActivationFault::Epsilon { epsilon: norm.epsilon });
                }
                true
            }
            RowOperation::None | RowOperation::Glu(..) => false,
        };
        if !normalizes && (residual.is_some() || weights.is_some()) {
            return fault(ActivationFault::NotNormalized);
        }
        if experts.is_some() && self.format == ActivationFormat::Fp8(Fp8Scale::PerTensor) {
            return fault(ActivationFault::Experts { what: "scales that are given, per token or per group" });
        }
        if let Some(found) = weights.filter(|found| *found != columns) {
            return fault(ActivationFault::Count { what: "weights", expected: columns, found });
        }
        let expected = shape.rows.saturating_mul(columns);
        if let Some(found) = residual.filter(|found| *found != expected) {
            return fault(ActivationFault::Count { what: "residuals", expected, found });
        }
        let expected = if self.format.takes_scales() { experts.unwrap_or(1) } else { 0 };
        if scales != expected {
            return fault(ActivationFault::Count { what: "given scales", expected, found: scales });
        }
        Ok(columns)
    }
}

impl ActivationRecipe {
    /// Checks a given scale.
    pub(crate) fn check_scale(&self, index: usize, scale: f32) -> Result<()> {
        let fine = match self.format {
            ActivationFormat::Nvfp4(ActivationScale::Given(direction)) => {
                GlobalScale::of(direction, scale).in_range()
            }
            _ => scale.is_normal() && scale > 0.0,
        };
        if fine { Ok(()) } else { Err(Error::Activations(ActivationFault::Scale { index, scale })) }
    }
}

impl<T: Element> ActivationInput<'_, T> {
    /// Checks the input against a recipe.
    pub(crate) fn check(&self, recipe: &ActivationRecipe) -> Result<ActivationSizes> {
        self.shape.check("the activations", self.values.len())?;
        let columns = recipe.check(&ActivationParts {
            shape: self.shape,
            residual: self.residual.as_ref().map(|residual| residual.len()),
            weights: self.weights.map(<[T]>::len),
            scales: self.scales.len(),
            experts: self.experts.map(|experts| experts.count()),
        })?;
        for (index, scale) in self.scales.iter().enumerate() {
            recipe.check_scale(index, *scale)?;
        }
        let rows = self.shape.rows;
        let fault = |what| Err(Error::Activations(ActivationFault::Experts { what }));
        let (scale_rows, experts) = match self.experts {
            None => (rows, 1),
            Some(ActivationExperts::Masked { counts }) => {
                if counts.is_empty() || !rows.is_multiple_of(counts.len()) {
                    return fault("a count for each expert, and rows that they divide");
                }
                let scale_rows = rows / counts.len();
                if counts.iter().any(|count| *count as usize > scale_rows) {
                    return fault("counts of at most an expert's rows");
                }
                (scale_rows, counts.len())
            }
            Some(ActivationExperts::Sorted { offsets, scale_offsets }) => {
                let tile = if recipe.format.block() == 1 { 1 } else { recipe.layout.tile_rows() };
                let ordered = |offsets: &[u32]| offsets.first() == Some(&0) && offsets.is_sorted();
                if !ordered(offsets) || !ordered(scale_offsets) || offsets.len() != scale_offsets.len() {
                    return fault("two lists of the same length, which start with 0 and do not decrease");
                }
                let rows_of = |of: &[u32], i: usize| (of[i + 1] - of[i]) as usize;
                let experts = offsets.len() - 1;
                let fits = |i| {
                    let room = rows_of(scale_offsets, i);
                    room.is_multiple_of(tile) && room >= rows_of(offsets, i)
                };
                if offsets[experts] as usize != rows || !(0..experts).all(fits) {
                    return fault(
                        "offsets that end with the number of rows, and rows of scales in whole tiles for each expert",
                    );
                }
                (scale_offsets[experts] as usize, experts)
            }
        };
        Ok(ActivationSizes { rows, scale_rows, columns, experts })
    }
}

impl ActivationExperts<'_> {
    /// Returns the number of experts.
    pub(crate) const fn count(&self) -> usize {
        match self {
            Self::Sorted { offsets, .. } => offsets.len().saturating_sub(1),
            Self::Masked { counts } => counts.len(),
        }
    }
}

impl ActivationSizes {
    /// Returns the lengths of the output.
    pub(crate) fn lengths(&self, recipe: &ActivationRecipe, masked: bool) -> Result<[usize; 3]> {
        let Self { rows, scale_rows, columns, experts } = *self;
        let scale_rows = if masked {
            recipe.layout.padded_rows(scale_rows).checked_mul(experts)
        } else {
            Some(scale_rows)
        };
        let lengths = scale_rows.and_then(|scale_rows| recipe.lengths(rows, scale_rows, columns));
        lengths.ok_or(Error::TooLarge { rows, cols: columns, row_stride: columns })
    }
}
