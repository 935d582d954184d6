//! The factor and the scales of a recipe as kernels on GPUs take them.

use std::sync::Arc;

use microscale_formats::nvfp4::{Quantizer, Scaling};
use microscale_formats::search::gptq::BlockBounds;
use microscale_formats::{E4m3, E8m0, Format, GlobalScale, mx, nvfp4};
use rayon::prelude::*;

use super::block::BlockFactor;
use super::factor::GptqFactor;
use crate::error::Result;
use crate::gptq::Copies;
use crate::scheme::Scheme;

/// A factor as kernels take it, by position, padding included.
#[doc(hidden)]
#[derive(Debug)]
pub struct FactorOperands {
    /// Rⱼₖ / Rₖₖ in tiles of eight columns, one after the other: tile t has rows 0 to 8t + 7.
    pub feedback: Vec<f32>,
    /// Rₖₖ.
    pub pivots: Vec<f32>,
    /// The bounds of the errors of each block.
    pub bounds: Vec<BlockBounds>,
    /// The block of the column at each position.
    pub block_at: Vec<u32>,
    /// The position of each column.
    pub position_of: Vec<u32>,
    /// The divisor of the Hessian.
    pub unit: f64,
}

/// The factors and the scalings of all scale bytes.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct ScaleFactors {
    /// Multiplies the values of codes. 0 for NaN.
    pub factors: [f32; 256],
    /// Scales elements into the range of E2M1. 0 for NaN.
    pub scalings: [f32; 256],
    /// Whether elements are divided by their scaling, not multiplied.
    pub divides: bool,
}

impl ScaleFactors {
    /// The scales of MXFP4 or NVFP4 with a global scale.
    ///
    /// # Panics
    /// If the scheme has another format.
    pub fn of(scheme: Scheme, global: Option<GlobalScale>) -> Self {
        let mut scales = Self { factors: [0.0; 256], scalings: [0.0; 256], divides: false };
        match scheme {
            Scheme::Nvfp4(arithmetic, _) => {
                let quantizer = Quantizer::new(arithmetic, global.map_or(1.0, GlobalScale::value));
                for byte in 0..E4m3::NAN.to_bits() {
                    let scaling = &mut scales.scalings[usize::from(byte)];
                    match quantizer.scaling(E4m3::from_bits(byte)) {
                        Scaling::Multiply(factor) => *scaling = factor,
                        Scaling::Divide(divisor) => (*scaling, scales.divides) = (divisor, true),
                    }
                    let scale = E4m3::from_bits(byte);
                    scales.factors[usize::from(byte)] =
                        global.map_or(scale.to_f32(), |global| global.factor(scale));
                }
            }
            Scheme::Mxfp4(_) => {
                for byte in 0..E8m0::NAN.to_bits() {
                    scales.factors[usize::from(byte)] = E8m0::from_bits(byte).to_f32();
                    scales.scalings[usize::from(byte)] = E8m0::from_bits(byte).reciprocal();
                }
            }
            _ => unreachable!("checked by `check_format`"),
        }
        scales
    }
}

impl GptqFactor {
    /// Returns the factor as kernels take it.
    #[doc(hidden)]
    pub fn operands(&self) -> FactorOperands {
        let positions = self.order.len();
        let mut position_of = vec![0; positions];
        for (position, column) in self.order.columns().iter().enumerate() {
            position_of[*column] = position as u32;
        }
        FactorOperands {
            feedback: self.feedback.0.iter().flatten().flatten().copied().collect(),
            pivots: self.pivots.clone(),
            bounds: match self.format {
                Format::Mxfp4 => self.bounds::<{ mx::BLOCK }>(),
                _ => self.bounds::<{ nvfp4::BLOCK }>(),
            },
            block_at: (0..positions).map(|position| self.order.block_at(position) as u32).collect(),
            position_of,
            unit: self.unit,
        }
    }

    fn bounds<const N: usize>(&self) -> Vec<BlockBounds> {
        let blocks = (0..self.order.len() / N).into_par_iter();
        blocks.map(|block| BlockFactor::<N>::of(self, block * N).bounds).collect()
    }

    /// Checks that a quantized matrix has this factor's format and columns.
    ///
    /// # Errors
    /// [`Error::Gptq`](crate::Error::Gptq).
    pub(crate) fn check_quantized(&self, format: Format, cols: usize) -> Result<()> {
        self.require(cols, format)
    }

    /// Returns the divisor of the Hessian.
    pub(crate) fn unit(&self) -> f64 {
        self.unit
    }

    /// Returns the factor's copies in the memories of devices.
    pub(crate) fn copies(&self) -> &Arc<Copies> {
        &self.copies
    }
}
