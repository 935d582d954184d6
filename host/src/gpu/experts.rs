//! Mixtures of experts in device memory: their weights, and which tokens are whose.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use microscale_formats::nvfp4::Direction;
use microscale_formats::{GlobalScale, ScaleLayout};
use microscale_kernels_abi::experts::{EXPERT_LIMIT, Sorted};

use super::driver::doing;
use super::tensor_view::GLOBAL_WORDS;
use crate::error::{Error, OperandFault, Result};
use crate::shape::QuantizedShape;
use crate::view::QuantizedView;

/// The weights of a mixture's experts in device memory: matrices of one shape and format, NVFP4 or MXFP4 with linear scales, one after
/// the other, and of NVFP4 a global scale each or none at all.
pub struct DeviceExperts {
    shape: QuantizedShape,
    count: usize,
    pub(super) codes: CudaSlice<u8>,
    pub(super) scales: CudaSlice<u8>,
    /// A slot of a global scale an expert.
    pub(super) slots: CudaSlice<u32>,
    direction: Option<Direction>,
}

/// Shows the shape. The bytes are the GPU's.
impl fmt::Debug for DeviceExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut experts = f.debug_struct("DeviceExperts");
        experts.field("count", &self.count).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl DeviceExperts {
    /// Copies experts' weights over, and waits for the copies.
    ///
    /// # Errors
    /// [`Error::Operands`] with [`OperandFault::Experts`] if they are none, or more than there may be, or not alike in format, shape and
    /// the direction of their global scales, with [`OperandFault::Weights`] for other formats and [`OperandFault::Layout`] for swizzled
    /// scales; [`Error::Gpu`] when memory is short.
    pub fn from_host<'a>(
        stream: &Arc<CudaStream>,
        experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    ) -> Result<Self> {
        let experts: Vec<QuantizedView<'a>> = experts.into_iter().map(Into::into).collect();
        let fault = |fault| Err(Error::Operands(fault));
        let Some(first) = experts.first().filter(|_| (experts.len() as u64) < EXPERT_LIMIT) else {
            return fault(OperandFault::Experts { what: "as many as 1 to 65535" });
        };
        let direction = |expert: &QuantizedView<'_>| expert.global_scale().map(GlobalScale::direction);
        let (shape, of_first) = (first.shape(), direction(first));
        if !shape.format.is_multiplied() {
            return fault(OperandFault::Weights { found: shape.format });
        }
        if shape.scale_layout != ScaleLayout::Linear {
            return fault(OperandFault::Layout { what: "weights" });
        }
        if experts.iter().any(|expert| expert.shape() != shape) {
            return fault(OperandFault::Experts { what: "of one format and shape" });
        }
        if experts.iter().any(|expert| direction(expert) != of_first) {
            return fault(OperandFault::Experts { what: "with global scales of one direction, or none" });
        }
        let (codes, scales) = shape.bytes()?;
        let allocating = doing("allocating experts' weights");
        // There are no empty buffers.
        let room = |bytes: usize| {
            let all = bytes.checked_mul(experts.len());
            all.ok_or(Error::TooLarge { rows: shape.rows, cols: shape.cols, row_stride: shape.cols })
        };
        let zeros = |bytes: usize| stream.alloc_zeros::<u8>(bytes.max(1)).map_err(&allocating);
        let mut all = Self {
            shape,
            count: experts.len(),
            codes: zeros(room(codes)?)?,
            scales: zeros(room(scales)?)?,
            slots: stream.alloc_zeros(experts.len() * GLOBAL_WORDS).map_err(&allocating)?,
            direction: of_first,
        };
        let copying = doing("copying experts' weights over");
        let mut slots = vec![0; experts.len() * GLOBAL_WORDS];
        for (i, expert) in experts.iter().enumerate() {
            if scales > 0 {
                let (to_codes, to_scales) = (i * codes..(i + 1) * codes, i * scales..(i + 1) * scales);
                stream.memcpy_htod(expert.codes(), &mut all.codes.slice_mut(to_codes)).map_err(&copying)?;
                stream
                    .memcpy_htod(expert.scales(), &mut all.scales.slice_mut(to_scales))
                    .map_err(&copying)?;
            }
            slots[i * GLOBAL_WORDS] = expert.global_scale().map_or(0, |scale| scale.value().to_bits());
        }
        stream.memcpy_htod(&slots, &mut all.slots).map_err(&copying)?;
        stream.synchronize().map_err(&copying)?;
        Ok(all)
    }

    /// The shape of an expert's weights: M rows, K columns.
    pub fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// The number of experts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The direction of their global scales; none if they have none.
    pub fn direction(&self) -> Option<Direction> {
        self.direction
    }
}

/// Pairs of a token and an expert in device memory, sorted by expert by [`Gpu::route_on`](super::Gpu::route_on).
pub struct DeviceRouting {
    pub(super) experts: usize,
    /// Pairs that it has room for, those that it holds, and of how many experts a token is.
    pub(super) room: usize,
    pub(super) pairs: usize,
    pub(super) top_k: usize,
    /// Where each expert's sorted pairs end; and of each sorted pair the token and the pair's number.
    pub(super) ends: CudaSlice<u32>,
    pub(super) tokens: CudaSlice<u32>,
    pub(super) order: CudaSlice<u32>,
    /// The pairs that these are of ([`Sorted`]), as the GPU knows it.
    pub(super) sorted: CudaSlice<u32>,
}

impl fmt::Debug for DeviceRouting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut routing = f.debug_struct("DeviceRouting");
        routing.field("experts", &self.experts).field("pairs", &self.pairs).finish_non_exhaustive()
    }
}

impl DeviceRouting {
    /// Room for as many pairs as given of as many experts. It holds none.
    ///
    /// # Errors
    /// [`Error::Gpu`] when memory is short.
    pub fn zeros(stream: &Arc<CudaStream>, experts: usize, pairs: usize) -> Result<Self> {
        let zeros = |count: usize| stream.alloc_zeros(count.max(1)).map_err(doing("allocating a routing"));
        let [ends, tokens, order] = [zeros(experts)?, zeros(pairs)?, zeros(pairs)?];
        let sorted = zeros(size_of::<Sorted>() / size_of::<u32>())?;
        Ok(Self { experts, room: pairs, pairs: 0, top_k: 1, ends, tokens, order, sorted })
    }

    /// The number of pairs that it holds, those of no expert included.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// The number of sorted pairs up to each expert's last one.
    pub fn ends(&self) -> &CudaSlice<u32> {
        &self.ends
    }

    /// The number that each sorted pair had before: token · `top_k` + i. Numbers behind the last expert's say nothing.
    pub fn order(&self) -> &CudaSlice<u32> {
        &self.order
    }
}

/// The order of the rows of activations and of results of a product with experts' weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertRows {
    /// A row of activations a token, and results sorted by expert: the first product of a layer.
    Gathered,
    /// Both sorted by expert.
    Sorted,
    /// Activations sorted by expert, and results in the order of pairs, a token's one after the other: the last product of a layer. Rows
    /// of pairs of no expert are left as they are.
    Scattered,
}
