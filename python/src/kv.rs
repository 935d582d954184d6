//! Paged KV caches: the operators `append_kv` and `gather_kv` of Python's `microscale.ops`.

use microscale::formats::kv::{KvOrder, KvShape};
use microscale::{KvCache, KvCacheMut, KvFormat, Shape};
use pyo3::prelude::*;

use crate::array::{Array, Kind, with_type};
use crate::errors::{error, of_tensors};
use crate::interface::array_of;
use crate::workers::work;

/// The words of the order of vectors in a page, as in FlashInfer.
pub(crate) const ORDERS: [&str; 2] = ["NHD", "HND"];

/// Objects of a cache: codes of K and of V and, for NVFP4, their block scales.
type Parts<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

/// A cache in arrays `[pages, page_size, heads, width]` or `[pages, heads, page_size, width]`. The
/// width is `head_dim` in FP8. In NVFP4 codes have `head_dim` / 2 and block scales `head_dim` / 16.
struct Cache {
    /// Codes of K and of V, followed by their block scales in NVFP4.
    parts: Vec<Array>,
    shape: KvShape,
    format: KvFormat,
}

impl Cache {
    /// Finds the arrays by a function, and checks their shapes.
    fn by(
        py: Python<'_>,
        (key_codes, value_codes, key_scales, value_scales): &Parts<'_>,
        order: &str,
        hadamard: u32,
        array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>,
    ) -> PyResult<Self> {
        let mut parts = vec![array_of(key_codes, "key_cache")?, array_of(value_codes, "value_cache")?];
        let format = match (key_scales, value_scales) {
            (None, None) => KvFormat::Fp8,
            (Some(of_keys), Some(of_values)) => {
                parts.push(array_of(of_keys, "key_block_scales")?);
                parts.push(array_of(of_values, "value_block_scales")?);
                KvFormat::Nvfp4
            }
            _ => {
                return Err(error(py, "block scales are missing for K or for V; pass both, or none for FP8"));
            }
        };
        let order = match order {
            "NHD" => KvOrder::Nhd,
            "HND" => KvOrder::Hnd,
            found => {
                return Err(error(py, format!("kv_layout is {found:?}; pass one of {}", ORDERS.join(", "))));
            }
        };
        let found = parts[0].dims();
        let &[pages, first, second, width] = found else {
            return Err(error(py, format!("key_cache has shape {found:?} and must have four dimensions")));
        };
        let (page_size, heads) = if order == KvOrder::Nhd { (first, second) } else { (second, first) };
        // Elements that share a byte of codes.
        let packed = if format == KvFormat::Fp8 { 1 } else { 2 };
        let head_dim = width.saturating_mul(packed);
        let dimension = |count: usize| {
            u32::try_from(count)
                .map_err(|_| error(py, format!("key_cache has a dimension of {count}; pass fewer")))
        };
        let [pages, page_size, heads, head_dim] =
            [dimension(pages)?, dimension(page_size)?, dimension(heads)?, dimension(head_dim)?];
        let mut shape = KvShape { hadamard, ..KvShape::new(order, pages, page_size, heads, head_dim) };
        for (i, array) in parts.iter().enumerate() {
            let (last, elements) = if i < 2 { (width, packed) } else { (head_dim as usize / 16, 16) };
            let (what, found, expected) =
                (array.what(), array.dims(), [parts[0].dims()[0], first, second, last]);
            if found != expected {
                return Err(error(py, format!("{what} has shape {found:?} and must have {expected:?}")));
            }
            let stride = (array.entry_stride(py, Kind::Bytes)? as u64).saturating_mul(elements as u64);
            if i == 0 {
                shape.page_stride = stride;
            } else if pages > 1 && stride != shape.page_stride {
                return Err(error(
                    py,
                    format!("{what} has other gaps between pages than key_cache; pass contiguous arrays"),
                ));
            }
        }
        Ok(Self { parts, shape, format })
    }
}

/// The shape of rows of K and V, `[tokens, heads, head_dim]`. Rows may be apart.
fn rows_of(py: Python<'_>, [keys, values]: [&Array; 2], shape: &KvShape) -> PyResult<Shape> {
    let found = keys.dims();
    let expected = [*found.first().unwrap_or(&0), shape.heads as usize, shape.head_dim as usize];
    for array in [keys, values] {
        let (what, found) = (array.what(), array.dims());
        if found != expected {
            return Err(error(py, format!("{what} has shape {found:?} and must have {expected:?}")));
        }
    }
    let kind = keys.kind();
    let stride = keys.entry_stride(py, kind)?;
    if values.entry_stride(py, kind)? != stride && expected[0] > 1 {
        return Err(error(py, "key and value have other gaps between rows; pass contiguous arrays"));
    }
    Ok(Shape::new(expected[0], expected[1] * expected[2]).with_row_stride(stride))
}

/// Checks slots: one per row or, with the lengths of sequences, the pages of each sequence.
fn require_slots(
    py: Python<'_>,
    slots: &Array,
    lengths: Option<&Array>,
    rows: Shape,
    shape: &KvShape,
) -> PyResult<()> {
    slots.require(py, if slots.kind() == Kind::Longs { Kind::Longs } else { Kind::Indices })?;
    let found = slots.dims();
    let Some(lengths) = lengths else {
        return match found {
            [count] if *count == rows.rows => Ok(()),
            _ => Err(error(py, format!("slots have shape {found:?} and must have [{}]", rows.rows))),
        };
    };
    lengths.require(py, Kind::Indices)?;
    let of_lengths = lengths.dims();
    match (found, of_lengths) {
        ([sequences, pages], [count])
            if sequences == count
                && sequences.saturating_mul(*pages).saturating_mul(shape.page_size as usize) == rows.rows =>
        {
            Ok(())
        }
        _ => Err(error(
            py,
            format!(
                "page tables have shape {found:?} and lengths {of_lengths:?}; pass [sequences, pages] and [sequences]"
            ),
        )),
    }
}

/// The slots of rows on the host. Rows of sequences from their lengths on have none.
fn slots_of(py: Python<'_>, slots: &Array, lengths: Option<&Array>, shape: &KvShape) -> PyResult<Vec<i64>> {
    let numbers: Vec<i64> = match slots.kind() {
        Kind::Longs => slots.longs(py)?.to_vec(),
        _ => slots.indices(py)?.iter().map(|slot| i64::from(slot.cast_signed())).collect(),
    };
    let Some(lengths) = lengths else { return Ok(numbers) };
    let (lengths, page_size) = (lengths.indices(py)?, shape.page_size as usize);
    let per_sequence = numbers.len() / lengths.len().max(1) * page_size;
    let slot = |row: usize| {
        let (sequence, row_of) = (row / per_sequence, row % per_sequence);
        let page = numbers[row / page_size];
        if page < 0 || row_of >= lengths[sequence] as usize {
            return -1;
        }
        page.saturating_mul(page_size as i64).saturating_add((row_of % page_size) as i64)
    };
    Ok((0..numbers.len() * page_size).map(slot).collect())
}

/// Quantizes rows of K and V and puts them into slots of a cache.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
pub(crate) fn append_kv<'py>(
    py: Python<'py>,
    keys: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
    parts: Parts<'py>,
    slots: &Bound<'py, PyAny>,
    scales: [f32; 2],
    order: &str,
    hadamard: u32,
) -> PyResult<()> {
    let (keys, values, slots) =
        (array_of(keys, "key")?, array_of(values, "value")?, array_of(slots, "slot_mapping")?);
    let Cache { mut parts, shape, format } = Cache::by(py, &parts, order, hadamard, array_of)?;
    let rows = rows_of(py, [&keys, &values], &shape)?;
    require_slots(py, &slots, None, rows, &shape)?;
    let slots_of_rows = slots_of(py, &slots, None, &shape)?;
    let mut others = vec![&keys, &values, &slots];
    for part in &parts {
        part.require_output(py, Kind::Bytes, &others)?;
        others.push(part);
    }
    let memory = parts.iter_mut().map(|part| part.output::<u8>(py, Kind::Bytes, &[]));
    let mut memory = memory.collect::<PyResult<Vec<_>>>()?.into_iter();
    let mut next = || memory.next().unwrap_or_default();
    let cache =
        KvCacheMut { key_codes: next(), value_codes: next(), key_scales: next(), value_scales: next() };
    let done = with_type!(keys, T => {
        let (keys, values) = (keys.values::<T>(), values.values::<T>());
        work(py, || microscale::append_kv(&shape, format, keys, values, rows, &slots_of_rows, scales, cache))
    })?;
    done.map_err(|why| of_tensors(py, why))
}

/// Dequantizes slots of a cache to rows of K and V: a slot per row or, with `lengths`, the pages of
/// sequences. Rows without a slot stay as they are.
#[pyfunction]
#[pyo3(signature = (parts, slots, lengths, scales, order, keys, values))]
#[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
pub(crate) fn gather_kv<'py>(
    py: Python<'py>,
    parts: Parts<'py>,
    slots: &Bound<'py, PyAny>,
    lengths: Option<&Bound<'py, PyAny>>,
    scales: [f32; 2],
    order: &str,
    keys: &Bound<'py, PyAny>,
    values: &Bound<'py, PyAny>,
) -> PyResult<()> {
    let Cache { parts, shape, format } = Cache::by(py, &parts, order, 0, array_of)?;
    let slots = array_of(slots, "slots")?;
    let lengths = lengths.map(|lengths| array_of(lengths, "lengths")).transpose()?;
    let (mut keys, mut values) = (array_of(keys, "key")?, array_of(values, "value")?);
    let rows = rows_of(py, [&keys, &values], &shape)?;
    require_slots(py, &slots, lengths.as_ref(), rows, &shape)?;
    let slots_of_rows = slots_of(py, &slots, lengths.as_ref(), &shape)?;
    let kind = keys.kind();
    let mut others: Vec<_> = parts.iter().chain([&slots]).chain(&lengths).collect();
    keys.require_output(py, kind, &others)?;
    others.push(&keys);
    values.require_output(py, kind, &others)?;
    let bytes = |i: usize| parts.get(i).map_or(&[][..], Array::spanned_bytes);
    let cache =
        KvCache { key_codes: bytes(0), value_codes: bytes(1), key_scales: bytes(2), value_scales: bytes(3) };
    let done = with_type!(keys, T => {
        let keys: &mut [T] = keys.output(py, kind, &[])?;
        let values: &mut [T] = values.output(py, kind, &[])?;
        work(py, || microscale::gather_kv(&shape, format, cache, &slots_of_rows, scales, keys, values, rows))
    })?;
    done.map_err(|why| of_tensors(py, why))
}

#[cfg(feature = "cuda")]
pub(crate) use on_gpu::{gpu_append_kv, gpu_gather_kv};

#[cfg(feature = "cuda")]
mod on_gpu {
    use half::{bf16, f16};
    use microscale::gpu::{DeviceKvCache, DeviceKvCacheMut, DeviceKvScales, DeviceSlots};

    use super::*;
    use crate::errors::type_error;
    use crate::gpu::{Work, indices, integers, spanned, spanned_mut, view, view_mut};
    use crate::interface::array_anywhere;

    /// [`append_kv`] on a GPU, with scales `[2]` there. Enqueues on the stream and returns.
    #[pyfunction]
    #[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
    pub(crate) fn gpu_append_kv<'py>(
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
        parts: Parts<'py>,
        slots: &Bound<'py, PyAny>,
        scales: &Bound<'py, PyAny>,
        order: &str,
        hadamard: u32,
        stream: usize,
    ) -> PyResult<()> {
        let there = |object: &Bound<'_, PyAny>, what| array_anywhere(object, what, Some(stream));
        let (keys, values, slots, scales) = (
            there(keys, "key")?,
            there(values, "value")?,
            there(slots, "slot_mapping")?,
            there(scales, "scales")?,
        );
        let Cache { mut parts, shape, format } = Cache::by(py, &parts, order, hadamard, there)?;
        let rows = rows_of(py, [&keys, &values], &shape)?;
        require_slots(py, &slots, None, rows, &shape)?;
        scales.require(py, Kind::F32)?;
        let inputs = [&keys, &values, &slots, &scales];
        for (i, part) in parts.iter().enumerate() {
            part.require_writable(py, &inputs)?;
            if let Some(other) = parts[..i].iter().find(|other| !part.entries_apart(other)) {
                let (what, other) = (part.what(), other.what());
                return Err(error(
                    py,
                    format!("{what} shares memory with {other}; pass arrays of their own"),
                ));
            }
        }
        let all: Vec<_> = inputs.into_iter().chain(&parts).collect();
        let work = Work::with(py, &all, stream)?;
        let mut memory = parts.iter_mut().map(spanned_mut);
        let at = keys.address();
        let mut next = || memory.next().unwrap_or_else(|| crate::gpu::empty_mut(at));
        let cache = DeviceKvCacheMut {
            key_codes: next(),
            value_codes: next(),
            key_scales: next(),
            value_scales: next(),
        };
        let (slots, scales) =
            (DeviceSlots::Rows(integers(&slots)), DeviceKvScales::Device(view::<f32>(&scales)));
        /// The call for a dtype.
        macro_rules! append {
            ($T:ty) => {{
                let (keys, values) = (view::<$T>(&keys), view::<$T>(&values));
                work.enqueue(py, |gpu, stream| {
                    gpu.append_kv_on(stream, &shape, format, keys, values, rows, slots, scales, cache)
                })
            }};
        }
        match keys.kind() {
            Kind::F16 => append!(f16),
            Kind::Bf16 => append!(bf16),
            _ => Err(no_halves(&keys)),
        }
    }

    /// [`gather_kv`] on a GPU, with scales `[2]` there. Enqueues on the stream and returns.
    #[pyfunction]
    #[pyo3(signature = (parts, slots, lengths, scales, order, keys, values, stream))]
    #[expect(clippy::too_many_arguments, reason = "K and V come in pairs")]
    pub(crate) fn gpu_gather_kv<'py>(
        py: Python<'py>,
        parts: Parts<'py>,
        slots: &Bound<'py, PyAny>,
        lengths: Option<&Bound<'py, PyAny>>,
        scales: &Bound<'py, PyAny>,
        order: &str,
        keys: &Bound<'py, PyAny>,
        values: &Bound<'py, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        let there = |object: &Bound<'_, PyAny>, what| array_anywhere(object, what, Some(stream));
        let Cache { parts, shape, format } = Cache::by(py, &parts, order, 0, there)?;
        let (slots, scales) = (there(slots, "slots")?, there(scales, "scales")?);
        let lengths = lengths.map(|lengths| there(lengths, "lengths")).transpose()?;
        let (mut keys, mut values) = (there(keys, "key")?, there(values, "value")?);
        let rows = rows_of(py, [&keys, &values], &shape)?;
        require_slots(py, &slots, lengths.as_ref(), rows, &shape)?;
        scales.require(py, Kind::F32)?;
        let kind = keys.kind();
        let mut others: Vec<_> = parts.iter().chain([&slots, &scales]).chain(&lengths).collect();
        keys.require_output(py, kind, &others)?;
        others.push(&keys);
        values.require_output(py, kind, &others)?;
        others.push(&values);
        let work = Work::with(py, &others, stream)?;
        let at = slots.address();
        let part = |i: usize| parts.get(i).map_or_else(|| crate::gpu::empty(at), spanned);
        let cache = DeviceKvCache {
            key_codes: part(0),
            value_codes: part(1),
            key_scales: part(2),
            value_scales: part(3),
        };
        let of_rows = match &lengths {
            None => DeviceSlots::Rows(integers(&slots)),
            Some(lengths) => DeviceSlots::Tables { tables: integers(&slots), lengths: indices(lengths) },
        };
        let scales = DeviceKvScales::Device(view::<f32>(&scales));
        /// The call for a dtype.
        macro_rules! gather {
            ($T:ty) => {{
                let (keys, values) = (view_mut::<$T>(&mut keys), view_mut::<$T>(&mut values));
                work.enqueue(py, |gpu, stream| {
                    gpu.gather_kv_on(stream, &shape, format, cache, of_rows, scales, keys, values, rows)
                })
            }};
        }
        match kind {
            Kind::F16 => gather!(f16),
            Kind::Bf16 => gather!(bf16),
            _ => Err(no_halves(&keys)),
        }
    }

    /// The error for K and V in another dtype than GPUs read and write.
    fn no_halves(keys: &Array) -> PyErr {
        let name = keys.name();
        type_error(format!(
            "key is {name} and GPUs have caches of float16 and bfloat16; cast it, or use the CPU"
        ))
    }
}
