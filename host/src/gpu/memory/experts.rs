//! Mixtures of experts in device memory: weights, and the routing of tokens to experts.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use microscale_formats::GlobalScale;
use microscale_formats::nvfp4::Direction;
use microscale_kernels_abi::experts::Sorted;

use crate::error::{Error, OperandFault, Result};
use crate::experts::shape_of;
use crate::gpu::memory::experts_view::{DeviceExpertsView, SLOTS, stacked};
use crate::gpu::memory::tensor_view::GLOBAL_WORDS;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::runtime::driver::doing;
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

/// Words of [`Sorted`].
pub(in crate::gpu) const SORTED_WORDS: usize = size_of::<Sorted>() / size_of::<u32>();

/// The weights of a mixture's experts in device memory.
///
/// Matrices of one shape and format, one after another: NVFP4 or MXFP4 with linear scales. In NVFP4
/// every expert has a global scale, or no expert has one.
pub struct DeviceExperts {
    shape: QuantizedShape,
    count: usize,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
    /// One slot of a global scale per expert.
    slots: CudaSlice<u32>,
    direction: Option<Direction>,
}

/// Shows the shape only: the bytes are in device memory.
impl fmt::Debug for DeviceExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut experts = f.debug_struct("DeviceExperts");
        experts.field("count", &self.count).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl DeviceExperts {
    /// Copies the experts' weights to the device, and waits for the copies.
    ///
    /// # Errors
    /// [`Error::Operands`] with [`OperandFault::Experts`] if there are no experts or too many, or
    /// if they differ in format, shape or direction of the global scale; with
    /// [`OperandFault::Weights`] for other formats, and with [`OperandFault::Layout`] for swizzled
    /// scales. [`Error::Gpu`] when memory is short.
    pub fn from_host<'a>(
        stream: &Arc<CudaStream>,
        experts: impl IntoIterator<Item = impl Into<QuantizedView<'a>>>,
    ) -> Result<Self> {
        let experts: Vec<QuantizedView<'a>> = experts.into_iter().map(Into::into).collect();
        let shape = shape_of(&experts)?;
        let fault = |what| Err(Error::Operands(OperandFault::Experts { what }));
        let direction = |expert: &QuantizedView<'_>| expert.global_scale().map(GlobalScale::direction);
        let of_first = direction(&experts[0]);
        if experts.iter().any(|expert| direction(expert) != of_first) {
            return fault("with global scales of one direction, or none");
        }
        let (of_codes, of_scales) = stacked(shape, experts.len())?.bytes()?;
        let (codes, scales) = shape.bytes()?;
        let allocating = doing("allocating experts' weights");
        // cudarc allocates no empty buffers.
        let zeros = |bytes: usize| stream.alloc_zeros::<u8>(bytes.max(1)).map_err(&allocating);
        let mut all = Self {
            shape,
            count: experts.len(),
            codes: zeros(of_codes)?,
            scales: zeros(of_scales)?,
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

    /// Takes the codes and block scales of `count` experts that are in device memory.
    ///
    /// Each buffer holds the experts one after another. Slots for global scales are allocated on
    /// the stream; [`Self::with_global_scales`] sets them. The block scales are not checked, as for
    /// [`DeviceExpertsView::from_parts`].
    ///
    /// # Errors
    /// As for [`DeviceExpertsView::from_parts`], and [`Error::Gpu`].
    pub fn from_parts(
        stream: &Arc<CudaStream>,
        shape: QuantizedShape,
        count: usize,
        codes: CudaSlice<u8>,
        scales: CudaSlice<u8>,
    ) -> Result<Self> {
        let all = stacked(shape, count)?;
        // Weights without elements have one byte of each: cudarc allocates no empty buffers.
        if all.bytes()? != (0, 0) {
            all.check(codes.len(), scales.len())?;
        }
        let slots = stream.alloc_zeros(count * GLOBAL_WORDS).map_err(doing("allocating global scales"))?;
        Ok(Self { shape, count, codes, scales, slots, direction: None })
    }

    /// Returns the codes, the scales and the slots of the global scales.
    ///
    /// The slots are as [`DeviceExpertsView::with_global_slots`] takes them.
    pub fn into_parts(self) -> (CudaSlice<u8>, CudaSlice<u8>, CudaSlice<u32>) {
        (self.codes, self.scales, self.slots)
    }

    /// The same experts with global scales: one number per expert, in device memory.
    ///
    /// Enqueues a copy of each number and returns. The numbers are not checked: they should be [in
    /// range](GlobalScale::in_range).
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`] if the format has none, [`Error::Length`] with fewer numbers than
    /// experts, and [`Error::Gpu`].
    pub fn with_global_scales<'a>(
        mut self,
        stream: &Arc<CudaStream>,
        direction: Direction,
        values: impl Into<DeviceView<'a, f32>>,
    ) -> Result<Self> {
        let values = values.into();
        if !self.shape.format.has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.shape.format });
        }
        Shape::new(self.count, 1).check(SLOTS, values.len())?;
        DeviceViewMut::from(&mut self.slots).spread(stream, SLOTS, values, [self.count, GLOBAL_WORDS])?;
        Ok(Self { direction: Some(direction), ..self })
    }

    /// A view of all experts.
    pub fn view(&self) -> DeviceExpertsView<'_> {
        let [codes, scales] = [&self.codes, &self.scales].map(DeviceView::from);
        let slots = self.direction.map(|direction| (direction, (&self.slots).into()));
        DeviceExpertsView::of_experts((self.shape, self.count), codes, scales, slots)
    }

    /// The shape of an expert's weights: M rows, K columns.
    pub fn shape(&self) -> QuantizedShape {
        self.shape
    }

    /// The number of experts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The direction of the global scales, or `None` if there are none.
    pub fn direction(&self) -> Option<Direction> {
        self.direction
    }
}

impl<'a> From<&'a DeviceExperts> for DeviceExpertsView<'a> {
    fn from(experts: &'a DeviceExperts) -> Self {
        experts.view()
    }
}

/// Pairs of a token and an expert in device memory, sorted by expert.
///
/// [`Gpu::route_on`](crate::gpu::Gpu::route_on) sorts them.
pub struct DeviceRouting {
    pub(in crate::gpu) experts: usize,
    /// Capacity in pairs, number of pairs, and experts per token.
    pub(in crate::gpu) room: usize,
    pub(in crate::gpu) pairs: usize,
    pub(in crate::gpu) top_k: usize,
    /// The end of each expert's sorted pairs, then each sorted pair's token and number.
    pub(in crate::gpu) ends: CudaSlice<u32>,
    pub(in crate::gpu) tokens: CudaSlice<u32>,
    pub(in crate::gpu) order: CudaSlice<u32>,
    /// `Sorted` in device memory: the pairs that the lists were made from.
    pub(in crate::gpu) sorted: CudaSlice<u32>,
}

impl fmt::Debug for DeviceRouting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut routing = f.debug_struct("DeviceRouting");
        routing.field("experts", &self.experts).field("pairs", &self.pairs).finish_non_exhaustive()
    }
}

impl DeviceRouting {
    /// Allocates a routing for up to `pairs` pairs and `experts` experts, without pairs.
    ///
    /// # Errors
    /// [`Error::Gpu`] when memory is short.
    pub fn zeros(stream: &Arc<CudaStream>, experts: usize, pairs: usize) -> Result<Self> {
        let zeros = |count: usize| stream.alloc_zeros(count.max(1)).map_err(doing("allocating a routing"));
        let [ends, tokens, order] = [zeros(experts)?, zeros(pairs)?, zeros(pairs)?];
        let sorted = zeros(SORTED_WORDS)?;
        Ok(Self { experts, room: pairs, pairs: 0, top_k: 1, ends, tokens, order, sorted })
    }

    /// The number of pairs, including pairs of no expert.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// For each expert, the number of sorted pairs up to and including its last one.
    pub fn ends(&self) -> &CudaSlice<u32> {
        &self.ends
    }

    /// The original number of each sorted pair: token · `top_k` + i.
    ///
    /// Entries after the last expert's pairs are unspecified.
    pub fn order(&self) -> &CudaSlice<u32> {
        &self.order
    }
}
