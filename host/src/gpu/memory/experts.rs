//! Mixtures of experts in device memory: their weights, and which tokens are whose.

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

/// The weights of a mixture's experts in device memory: matrices of one shape and format, NVFP4 or MXFP4 with linear scales, one after
/// the other, and of NVFP4 a global scale each or none at all.
pub struct DeviceExperts {
    shape: QuantizedShape,
    count: usize,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
    /// A slot of a global scale an expert.
    slots: CudaSlice<u32>,
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
        // There are no empty buffers.
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

    /// From the codes and block scales of so many experts, one after the other, that are in device memory. Slots for global scales are
    /// allocated on the stream; there are no global scales but by [`Self::with_global_scales`]. Nobody looks at the block scales, as of
    /// [`DeviceExpertsView::from_parts`].
    ///
    /// # Errors
    /// As of [`DeviceExpertsView::from_parts`], and [`Error::Gpu`].
    pub fn from_parts(
        stream: &Arc<CudaStream>,
        shape: QuantizedShape,
        count: usize,
        codes: CudaSlice<u8>,
        scales: CudaSlice<u8>,
    ) -> Result<Self> {
        let all = stacked(shape, count)?;
        // Without elements there is a byte of each, for there are no empty buffers.
        if all.bytes()? != (0, 0) {
            all.check(codes.len(), scales.len())?;
        }
        let slots = stream.alloc_zeros(count * GLOBAL_WORDS).map_err(doing("allocating global scales"))?;
        Ok(Self { shape, count, codes, scales, slots, direction: None })
    }

    /// Codes, scales and the slots of global scales ([`DeviceExpertsView::with_global_slots`]), taken apart.
    pub fn into_parts(self) -> (CudaSlice<u8>, CudaSlice<u8>, CudaSlice<u32>) {
        (self.codes, self.scales, self.slots)
    }

    /// The same experts under global scales, a number each in device memory. Enqueues a copy of each and returns. Nobody looks at the
    /// numbers: they should be [in range](GlobalScale::in_range).
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`] if the format has none, [`Error::Length`] with fewer numbers than experts, and [`Error::Gpu`].
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

    /// A view of all of them.
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

    /// The direction of their global scales; none if they have none.
    pub fn direction(&self) -> Option<Direction> {
        self.direction
    }
}

impl<'a> From<&'a DeviceExperts> for DeviceExpertsView<'a> {
    fn from(experts: &'a DeviceExperts) -> Self {
        experts.view()
    }
}

/// Pairs of a token and an expert in device memory, sorted by expert by [`Gpu::route_on`](super::Gpu::route_on).
pub struct DeviceRouting {
    pub(in crate::gpu) experts: usize,
    /// Pairs that it has room for, those that it holds, and of how many experts a token is.
    pub(in crate::gpu) room: usize,
    pub(in crate::gpu) pairs: usize,
    pub(in crate::gpu) top_k: usize,
    /// Where each expert's sorted pairs end; and of each sorted pair the token and the pair's number.
    pub(in crate::gpu) ends: CudaSlice<u32>,
    pub(in crate::gpu) tokens: CudaSlice<u32>,
    pub(in crate::gpu) order: CudaSlice<u32>,
    /// The pairs that these are of (`Sorted`), as the GPU knows it.
    pub(in crate::gpu) sorted: CudaSlice<u32>,
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
        let sorted = zeros(SORTED_WORDS)?;
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
