//! KV caches in device memory.

use crate::error::Result;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::kv::KvFormat;
use microscale_formats::kv::KvShape;

/// The memory of a paged cache of K and V, to write. Block scales are empty in FP8.
///
/// Where pages of K and V alternate in one array, the views of K and V reach into each other.
/// Operations write the vectors of each, and nothing in the gaps between its pages.
#[derive(Debug)]
pub struct DeviceKvCacheMut<'a> {
    /// Codes of K, on 8 bytes.
    pub key_codes: DeviceViewMut<'a, u8>,
    /// Codes of V, on 8 bytes.
    pub value_codes: DeviceViewMut<'a, u8>,
    /// Block scales of K.
    pub key_scales: DeviceViewMut<'a, u8>,
    /// Block scales of V.
    pub value_scales: DeviceViewMut<'a, u8>,
}

/// The memory of a paged cache of K and V, to read.
#[derive(Clone, Copy, Debug)]
pub struct DeviceKvCache<'a> {
    /// Codes of K, on 8 bytes.
    pub key_codes: DeviceView<'a, u8>,
    /// Codes of V, on 8 bytes.
    pub value_codes: DeviceView<'a, u8>,
    /// Block scales of K.
    pub key_scales: DeviceView<'a, u8>,
    /// Block scales of V.
    pub value_scales: DeviceView<'a, u8>,
}

/// Integers of 32 or 64 bits in device memory.
#[derive(Clone, Copy, Debug)]
pub enum DeviceIntegers<'a> {
    /// Of 32 bits.
    I32(DeviceView<'a, i32>),
    /// Of 64 bits.
    I64(DeviceView<'a, i64>),
}

impl DeviceIntegers<'_> {
    /// The number of integers.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(integers) => integers.len(),
            Self::I64(integers) => integers.len(),
        }
    }

    /// Returns whether there are no integers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The slots of rows.
#[derive(Clone, Copy, Debug)]
pub enum DeviceSlots<'a> {
    /// A slot per row: `[rows]`. Rows whose slot is negative or not in the cache are skipped.
    Rows(DeviceIntegers<'a>),
    /// The page tables of sequences of equally many rows: `[sequences, pages]`. Row `i` of a
    /// sequence has place `i % page_size` in the page that entry `i / page_size` names. Rows from
    /// the sequence's length on are skipped.
    Tables {
        /// The page tables.
        tables: DeviceIntegers<'a>,
        /// The number of rows of each sequence that exist: `[sequences]`.
        lengths: DeviceView<'a, u32>,
    },
}

/// The global scales of K and of V, which multiply codes.
#[derive(Clone, Copy, Debug)]
pub enum DeviceKvScales<'a> {
    /// On the host.
    Host([f32; 2]),
    /// Two numbers in device memory, which the kernel does not check.
    Device(DeviceView<'a, f32>),
}

impl DeviceKvCacheMut<'_> {
    /// A view for reading.
    pub fn as_view(&self) -> DeviceKvCache<'_> {
        DeviceKvCache {
            key_codes: self.key_codes.as_view(),
            value_codes: self.value_codes.as_view(),
            key_scales: self.key_scales.as_view(),
            value_scales: self.value_scales.as_view(),
        }
    }
}

impl DeviceKvCache<'_> {
    /// Checks the cache against a shape.
    pub(in crate::gpu) fn check(
        &self,
        format: KvFormat,
        shape: &KvShape,
        scales: &DeviceKvScales<'_>,
    ) -> Result<()> {
        let Self { key_codes, value_codes, key_scales, value_scales } = self;
        let lengths = [[key_codes.len(), key_scales.len()], [value_codes.len(), value_scales.len()]];
        format.check(shape, lengths, scales.on_host())
    }
}

impl DeviceKvScales<'_> {
    /// The scales, if the host knows them.
    const fn on_host(&self) -> Option<[f32; 2]> {
        match self {
            Self::Host(scales) => Some(*scales),
            Self::Device(_) => None,
        }
    }
}
