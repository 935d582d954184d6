//! Paged KV caches in device memory.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_formats::kv::KvShape;

use crate::element::{Dtype, Element};
use crate::error::{ActivationFault, Error, Result};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::memory::kv::{DeviceKvCache, DeviceKvCacheMut, DeviceKvScales, DeviceSlots};
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::kv::KvFormat;
use crate::shape::Shape;

impl Gpu {
    /// Quantizes rows of K and V in device memory, and puts them into slots of a paged cache.
    ///
    /// `rows` is the shape of `keys` and of `values`: tokens of `heads` · `head_dim` elements in
    /// f16 or bf16. Gives the bytes of [`append_kv`](crate::append_kv()). Enqueues one kernel and
    /// returns. Allocates nothing and does not wait. If two rows have one slot, either may stay.
    ///
    /// # Errors
    /// As for [`append_kv`](crate::append_kv()), but for slots, which only the GPU sees;
    /// [`ActivationFault::Dtype`] for f32, and [`Error::Gpu`].
    #[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
    pub fn append_kv_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        shape: &KvShape,
        format: KvFormat,
        keys: DeviceView<'_, T>,
        values: DeviceView<'_, T>,
        rows: Shape,
        slots: DeviceSlots<'_>,
        scales: DeviceKvScales<'_>,
        cache: DeviceKvCacheMut<'_>,
    ) -> Result<()> {
        cache.as_view().check(format, shape, &scales)?;
        let tables = matches!(slots, DeviceSlots::Tables { .. });
        if tables {
            return Err(Error::Activations(ActivationFault::Cache { what: "a slot per row to append" }));
        }
        check_rows::<T>(shape, [keys.len(), values.len()], rows, &slots, &scales)?;
        if rows.rows == 0 {
            return Ok(());
        }
        launch::append_kv(&self.kernels, stream, shape, format, [keys, values], rows, slots, scales, cache)
    }

    /// Dequantizes slots of a paged cache in device memory to rows of K and V.
    ///
    /// `rows` is the shape of `keys` and of `values`. Rows that are skipped stay as they are. Gives
    /// the values of [`gather_kv`](crate::gather_kv()). Enqueues one kernel and returns. Allocates
    /// nothing and does not wait.
    ///
    /// # Errors
    /// As for [`Self::append_kv_on`].
    #[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
    pub fn gather_kv_on<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        shape: &KvShape,
        format: KvFormat,
        cache: DeviceKvCache<'_>,
        slots: DeviceSlots<'_>,
        scales: DeviceKvScales<'_>,
        keys: DeviceViewMut<'_, T>,
        values: DeviceViewMut<'_, T>,
        rows: Shape,
    ) -> Result<()> {
        cache.check(format, shape, &scales)?;
        check_rows::<T>(shape, [keys.len(), values.len()], rows, &slots, &scales)?;
        if rows.rows == 0 {
            return Ok(());
        }
        launch::gather_kv(&self.kernels, stream, shape, format, cache, slots, scales, [keys, values], rows)
    }
}

/// Checks rows, slots and scales against each other.
fn check_rows<T: Element>(
    shape: &KvShape,
    lengths: [usize; 2],
    rows: Shape,
    slots: &DeviceSlots<'_>,
    scales: &DeviceKvScales<'_>,
) -> Result<()> {
    let fault = |fault| Err(Error::Activations(fault));
    let count = |what, expected, found| fault(ActivationFault::Count { what, expected, found });
    if T::DTYPE == Dtype::F32 {
        return fault(ActivationFault::Dtype);
    }
    rows.check("the keys", lengths[0])?;
    rows.check("the values", lengths[1])?;
    let columns = shape.heads as usize * shape.head_dim as usize;
    if rows.cols != columns {
        return count("columns of K and V", columns, rows.cols);
    }
    const LIMIT: u64 = 1 << 30;
    let pieces = columns.div_ceil(1024).saturating_mul(rows.rows);
    if pieces as u64 >= LIMIT {
        return fault(ActivationFault::Limit { what: "pieces of rows", found: pieces, limit: LIMIT });
    }
    match slots {
        DeviceSlots::Rows(slots) if slots.len() != rows.rows => {
            return count("slots", rows.rows, slots.len());
        }
        DeviceSlots::Tables { tables, lengths } => {
            let sequences = lengths.len();
            if sequences == 0
                || !rows.rows.is_multiple_of(sequences)
                || !tables.len().is_multiple_of(sequences)
                || tables.is_empty()
            {
                return fault(ActivationFault::Cache { what: "a page table and a length for each sequence" });
            }
        }
        DeviceSlots::Rows(_) => {}
    }
    match scales {
        DeviceKvScales::Device(scales) if scales.len() != 2 => count("given scales", 2, scales.len()),
        _ => Ok(()),
    }
}
