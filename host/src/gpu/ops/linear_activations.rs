//! Activations of products: values, FP4 and FP8.

use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::nvfp4::Direction;
use microscale_kernels_abi::activations::COLUMN_LIMIT;
use microscale_kernels_abi::gemm::fp4::Fp4Params;
use microscale_kernels_abi::{ApplyGlobal, GlobalSlot};

use crate::error::{Error, OperandFault, Result};
use crate::gpu::launch::arguments::{apply_direction, limited, scale_grid};
use crate::gpu::memory::tensor::DeviceTensor;
use crate::gpu::memory::tensor_view::{DeviceTensorView, GLOBAL_WORDS};
use crate::gpu::memory::view::DeviceView;
use crate::shape::{QuantizedShape, Shape};

const ACTIVATIONS: &str = "the activations";
const ACTIVATION_CODES: &str = "the codes of the activations";
const ACTIVATION_SCALES: &str = "the scales of the activations";
const SLOTS: &str = "the global scales of the activations";

/// Rows of FP4 activations of a product, with linear or swizzled scales: `[tokens, K]`, or with
/// experts' weights `[pairs, K]` if each pair has its own row.
///
/// A tensor has one global scale, or none. [`Self::global_slots`] gives one per expert, and
/// [`Self::token_scales`] one per row.
#[derive(Clone, Copy, Debug)]
pub struct Fp4Activations<'a> {
    rows: DeviceTensorView<'a>,
    globals: Globals<'a>,
}

/// The global scales of FP4 activations.
#[derive(Clone, Copy, Debug)]
enum Globals<'a> {
    /// One for all, or none.
    OfTensor,
    ByExpert(Direction, DeviceView<'a, u32>),
    /// A multiplier for each row.
    ByToken(DeviceView<'a, f32>),
}

impl<'a> Fp4Activations<'a> {
    /// Applies a global scale per expert instead of one for all rows: the rows of an expert were
    /// quantized with its global scale.
    ///
    /// Slots lie as in
    /// [`DeviceExpertsView::with_global_slots`](crate::gpu::DeviceExpertsView::with_global_slots).
    #[must_use]
    pub fn global_slots(self, direction: Direction, slots: impl Into<DeviceView<'a, u32>>) -> Self {
        Self { globals: Globals::ByExpert(direction, slots.into()), ..self }
    }

    /// Applies a global scale per row instead of one for all: a multiplier, `[tokens]` or
    /// `[pairs]`, as [`Gpu::quantize_activations_on`](crate::gpu::Gpu::quantize_activations_on)
    /// writes them with [`ActivationScale::PerToken`](crate::ActivationScale::PerToken). FlashInfer
    /// calls this `per_token_activation`.
    ///
    /// The plan must have been made after
    /// [`global_scale_per_token`](crate::gpu::Linear::global_scale_per_token).
    #[must_use]
    pub fn token_scales(self, multipliers: impl Into<DeviceView<'a, f32>>) -> Self {
        Self { globals: Globals::ByToken(multipliers.into()), ..self }
    }

    /// The direction of the global scales, or `None` if there are none.
    fn direction(&self) -> Option<Direction> {
        match self.globals {
            Globals::OfTensor => self.rows.direction(),
            Globals::ByExpert(direction, _) => Some(direction),
            Globals::ByToken(_) => None,
        }
    }

    /// Checks `rows` rows for the weights of `experts` experts.
    ///
    /// # Errors
    /// [`OperandFault::Formats`] and [`OperandFault::Activations`] if activations and weights
    /// differ in format or columns, [`Error::NoGlobalScale`] for slots if the format has no global
    /// scales, [`OperandFault::TokenScales`] unless rows have a global scale each exactly if
    /// `per_token`, and [`Error::Length`] for too few rows, slots or scales.
    fn check(&self, rows: usize, weights: QuantizedShape, experts: usize, per_token: bool) -> Result<()> {
        let x = self.rows.shape();
        if x.format != weights.format {
            let fault = OperandFault::Formats { matrix: weights.format, vector: x.format };
            return Err(Error::Operands(fault));
        }
        if x.cols != weights.cols {
            let fault = OperandFault::Activations { weights: weights.cols, activations: x.cols };
            return Err(Error::Operands(fault));
        }
        Shape::new(rows, x.cols).check(ACTIVATIONS, x.rows.saturating_mul(x.cols))?;
        let different = |what| Err(Error::Operands(OperandFault::TokenScales { what }));
        match self.globals {
            Globals::ByToken(_) if !per_token => different(
                "the activations have a global scale per token; call global_scale_per_token before plan",
            ),
            Globals::OfTensor | Globals::ByExpert(..) if per_token => different(
                "the activations have no global scale per token; pass token_scales, or plan without global_scale_per_token",
            ),
            Globals::OfTensor => Ok(()),
            _ if !self.rows.format().has_global_scale() => {
                Err(Error::NoGlobalScale { format: self.rows.format() })
            }
            Globals::ByExpert(_, slots) => Shape::new(experts, GLOBAL_WORDS).check(SLOTS, slots.len()),
            Globals::ByToken(scales) => Shape::new(rows, 1).check(SLOTS, scales.len()),
        }
    }

    /// The parameters of the kernels that read `rows` rows for a product with the weights of
    /// `experts` experts.
    pub(in crate::gpu) fn params(
        &self,
        rows: usize,
        experts: usize,
        alpha: f32,
        weights: ApplyGlobal,
    ) -> Fp4Params {
        let x = self.rows.shape();
        // With a global scale per token, factors are applied after the product.
        let per_token = matches!(self.globals, Globals::ByToken(_));
        let (alpha, weights) = if per_token { (1.0, ApplyGlobal::Absent) } else { (alpha, weights) };
        Fp4Params {
            scales: scale_grid(x).0,
            eights: rows as u64 * (x.blocks_per_row() * x.format.block() / 8) as u64,
            alpha,
            matrices: experts as u32,
            activation_slots: if let Globals::ByExpert(..) = self.globals { experts as u32 } else { 1 },
            weights,
            activations: apply_direction(self.direction()).0,
            reserved: 0,
        }
    }

    /// The addresses of codes, scales, slots, and global scales by token.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    fn read(self, stream: &'a CudaStream) -> Result<([u64; 4], [SyncOnDrop<'a>; 4])> {
        let ([codes, scales, global], [codes_read, scales_read, global_read]) = self.rows.read(stream)?;
        let ([slots, token_scales], slots_read) = match self.globals {
            Globals::ByExpert(_, slots) => {
                let (slots, read) = slots.read(stream, SLOTS, align_of::<GlobalSlot>())?;
                ([slots, 0], read)
            }
            Globals::ByToken(scales) => {
                let (scales, read) = scales.read(stream, SLOTS, 1)?;
                ([global, scales], read)
            }
            Globals::OfTensor => ([global, 0], SyncOnDrop::Record(None)),
        };
        Ok(([codes, scales, slots, token_scales], [codes_read, scales_read, global_read, slots_read]))
    }
}

impl<'a> From<DeviceTensorView<'a>> for Fp4Activations<'a> {
    fn from(rows: DeviceTensorView<'a>) -> Self {
        Self { rows, globals: Globals::OfTensor }
    }
}

impl<'a> From<&'a DeviceTensor> for Fp4Activations<'a> {
    fn from(tensor: &'a DeviceTensor) -> Self {
        DeviceTensorView::from(tensor).into()
    }
}

/// Activations of a W4A8 product, `[N, K]` without gaps.
#[derive(Clone, Copy, Debug)]
pub enum Fp8Activations<'a, T> {
    /// Values in f16 or bf16. They are quantized first, as
    /// [`quantize_activations`](crate::quantize_activations()) does.
    Values(DeviceView<'a, T>),
    /// E4M3 codes and f32 scales, which multiply codes: `[N]`, or per group `[N, K / 128]`, rounded
    /// up. Codes start on 8 bytes.
    Quantized {
        /// Codes.
        codes: DeviceView<'a, u8>,
        /// Scales.
        scales: DeviceView<'a, f32>,
    },
}

/// Activations of any kind.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) enum Activations<'a, T> {
    Values(DeviceView<'a, T>),
    Fp4(Fp4Activations<'a>),
    Fp8(Fp8Activations<'a, T>),
}

impl<'a, T> Activations<'a, T> {
    /// Checks `rows` rows for `experts` matrices of weights; in FP8, with `token_scales` scales per
    /// row, and in FP4 with one or none.
    ///
    /// # Errors
    /// [`OperandFault::Formats`] and [`OperandFault::Activations`] if activations and weights
    /// differ in format or columns, [`Error::NoGlobalScale`], [`OperandFault::TokenScales`],
    /// [`OperandFault::Limit`] for more columns than are quantized, and [`Error::Length`].
    pub(in crate::gpu) fn check(
        &self,
        rows: usize,
        weights: QuantizedShape,
        experts: usize,
        token_scales: usize,
    ) -> Result<()> {
        let cols = weights.cols;
        match self {
            Self::Values(values) => Shape::new(rows, cols).check(ACTIVATIONS, values.len()),
            Self::Fp4(x) => x.check(rows, weights, experts, token_scales > 0),
            Self::Fp8(Fp8Activations::Values(values)) => {
                limited("columns of unquantized activations", cols, COLUMN_LIMIT)?;
                Shape::new(rows, cols).check(ACTIVATIONS, values.len())
            }
            Self::Fp8(Fp8Activations::Quantized { codes, scales }) => {
                Shape::new(rows, cols).check(ACTIVATION_CODES, codes.len())?;
                Shape::new(rows, token_scales).check(ACTIVATION_SCALES, scales.len())
            }
        }
    }

    /// The addresses of values, of codes and scales, or of codes, scales, slots of global scales
    /// and global scales by token, and guards.
    ///
    /// The caller enqueues the work on `stream` that reads them before it drops the guards.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    pub(in crate::gpu) fn read(self, stream: &'a CudaStream) -> Result<([u64; 4], [SyncOnDrop<'a>; 4])> {
        let none = || SyncOnDrop::Record(None);
        match self {
            Self::Values(values) | Self::Fp8(Fp8Activations::Values(values)) => {
                let (values, read) = values.read(stream, ACTIVATIONS, 1)?;
                Ok(([values, 0, 0, 0], [read, none(), none(), none()]))
            }
            Self::Fp4(x) => x.read(stream),
            Self::Fp8(Fp8Activations::Quantized { codes, scales }) => {
                let (codes, codes_read) = codes.read(stream, ACTIVATION_CODES, 8)?;
                let (scales, scales_read) = scales.read(stream, ACTIVATION_SCALES, 1)?;
                Ok(([codes, scales, 0, 0], [codes_read, scales_read, none(), none()]))
            }
        }
    }
}
