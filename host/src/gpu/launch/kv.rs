//! The launches of paged KV caches.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};
use microscale_formats::kv::KvShape;
use microscale_kernels_abi::Divider32;
use microscale_kernels_abi::activations::{KV_THREADS, KvAction, KvParams, Output, kv_kernel};

use crate::element::Element;
use crate::error::{ActivationFault, Error, Result};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::memory::kv::{DeviceIntegers, DeviceKvCache, DeviceKvCacheMut, DeviceKvScales, DeviceSlots};
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::runtime::kernels::Kernels;
use crate::kv::KvFormat;
use crate::shape::Shape;

/// Alignment of codes.
const CODES_ALIGNMENT: usize = 8;

/// Addresses of slots, lengths and scales, with their guards.
struct Lists<'a> {
    slots: (CUdeviceptr, SyncOnDrop<'a>),
    lengths: Option<(CUdeviceptr, SyncOnDrop<'a>)>,
    scales: Option<(CUdeviceptr, SyncOnDrop<'a>)>,
}

impl<'a> Lists<'a> {
    /// Reads the lists, and completes the parameters.
    fn read(
        params: &mut KvParams,
        stream: &'a CudaStream,
        slots: DeviceSlots<'a>,
        scales: DeviceKvScales<'a>,
    ) -> Result<Self> {
        let (integers, lengths) = match slots {
            DeviceSlots::Rows(slots) => (slots, None),
            DeviceSlots::Tables { tables, lengths } => {
                let sequences = lengths.len();
                params.table_pages = (tables.len() / sequences) as u32;
                params.sequence = Divider32::new(params.rows / sequences as u32);
                (tables, Some(lengths))
            }
        };
        params.wide = u32::from(matches!(integers, DeviceIntegers::I64(_)));
        let slots = match integers {
            DeviceIntegers::I32(slots) => slots.read(stream, "the slots", 1)?,
            DeviceIntegers::I64(slots) => slots.read(stream, "the slots", 1)?,
        };
        let lengths = lengths.map(|lengths| lengths.read(stream, "the lengths", 1)).transpose()?;
        let scales = match scales {
            DeviceKvScales::Host(scales) => {
                params.given = scales;
                None
            }
            DeviceKvScales::Device(scales) => Some(scales.read(stream, "the scales", 1)?),
        };
        Ok(Self { slots, lengths, scales })
    }
}

/// The launch of an action for rows of a dtype.
fn launch<T: Element>(action: KvAction, format: KvFormat, params: &KvParams) -> Result<Launch> {
    let output = match format {
        KvFormat::Nvfp4 => Output::Nvfp4,
        KvFormat::Fp8 => Output::Fp8,
    };
    let kernel = kv_kernel(action, output, T::DTYPE).ok_or(Error::Activations(ActivationFault::Dtype))?;
    Ok(Launch {
        kernel,
        thread_blocks: params.thread_blocks(),
        threads: KV_THREADS,
        shared: 0,
        cluster: 1,
        programmatic: false,
    })
}

/// Parameters of rows at two addresses.
fn params_of(shape: &KvShape, rows: Shape, addresses: [CUdeviceptr; 2]) -> KvParams {
    let mut params = KvParams::new(*shape, rows.rows as u32);
    params.row_stride = rows.row_stride as u64;
    let stride = if rows.rows > 1 { rows.row_stride as u64 * 2 } else { 0 };
    params.aligned = u32::from((addresses[0] | addresses[1] | stride).is_multiple_of(16));
    params
}

/// Enqueues appending. The caller has checked that everything fits together.
#[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
pub(in crate::gpu) fn append_kv<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    shape: &KvShape,
    format: KvFormat,
    [keys, values]: [DeviceView<'_, T>; 2],
    rows: Shape,
    slots: DeviceSlots<'_>,
    scales: DeviceKvScales<'_>,
    mut cache: DeviceKvCacheMut<'_>,
) -> Result<()> {
    let (keys, _keys) = keys.read(stream, "the keys", 1)?;
    let (values, _values) = values.read(stream, "the values", 1)?;
    let mut params = params_of(shape, rows, [keys, values]);
    let lists = Lists::read(&mut params, stream, slots, scales)?;
    let (key_codes, _key_codes) = cache.key_codes.write(stream, "the codes of K", CODES_ALIGNMENT)?;
    let (value_codes, _value_codes) = cache.value_codes.write(stream, "the codes of V", CODES_ALIGNMENT)?;
    let (key_scales, _key_scales) = cache.key_scales.write(stream, "the block scales of K", 1)?;
    let (value_scales, _value_scales) = cache.value_scales.write(stream, "the block scales of V", 1)?;
    let scales = lists.scales.as_ref().map_or(0, |(address, _)| *address);
    let mut arguments: [*mut c_void; 9] = [
        argument(&keys),
        argument(&values),
        argument(&key_codes),
        argument(&value_codes),
        argument(&key_scales),
        argument(&value_scales),
        argument(&lists.slots.0),
        argument(&scales),
        argument(&params),
    ];
    let launch = launch::<T>(KvAction::Append, format, &params)?;
    // SAFETY: the arguments are the kernel's, in order, and live until the call returns. The caller
    // checked rows, slots and the cache against the shape; the kernel skips slots that are not in
    // the cache. The guards, held past the launch, keep the memory and order its uses.
    unsafe { enqueue(kernels, stream, &launch, &mut arguments, "appending to a KV cache") }
}

/// Enqueues gathering. The caller has checked that everything fits together.
#[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
pub(in crate::gpu) fn gather_kv<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    shape: &KvShape,
    format: KvFormat,
    cache: DeviceKvCache<'_>,
    slots: DeviceSlots<'_>,
    scales: DeviceKvScales<'_>,
    [mut keys, mut values]: [DeviceViewMut<'_, T>; 2],
    rows: Shape,
) -> Result<()> {
    let (keys, _keys) = keys.write(stream, "the keys", 1)?;
    let (values, _values) = values.write(stream, "the values", 1)?;
    let mut params = params_of(shape, rows, [keys, values]);
    let lists = Lists::read(&mut params, stream, slots, scales)?;
    let (key_codes, _key_codes) = cache.key_codes.read(stream, "the codes of K", CODES_ALIGNMENT)?;
    let (value_codes, _value_codes) = cache.value_codes.read(stream, "the codes of V", CODES_ALIGNMENT)?;
    let (key_scales, _key_scales) = cache.key_scales.read(stream, "the block scales of K", 1)?;
    let (value_scales, _value_scales) = cache.value_scales.read(stream, "the block scales of V", 1)?;
    let lengths = lists.lengths.as_ref().map_or(0, |(address, _)| *address);
    let scales = lists.scales.as_ref().map_or(0, |(address, _)| *address);
    let mut arguments: [*mut c_void; 10] = [
        argument(&keys),
        argument(&values),
        argument(&key_codes),
        argument(&value_codes),
        argument(&key_scales),
        argument(&value_scales),
        argument(&lists.slots.0),
        argument(&lengths),
        argument(&scales),
        argument(&params),
    ];
    let launch = launch::<T>(KvAction::Gather, format, &params)?;
    // SAFETY: as in `append_kv`; the kernel also skips pages that are not in the cache, and reads
    // no entry past a table's pages.
    unsafe { enqueue(kernels, stream, &launch, &mut arguments, "gathering from a KV cache") }
}
