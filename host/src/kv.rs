//! Paged KV caches in FP8 and NVFP4: formats, borrowed parts, and checks.

use microscale_formats::kv::KvShape;

use crate::error::{ActivationFault, Error, Result};

/// The format of a KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// NVFP4 in FlashInfer's layout: `head_dim` / 2 bytes of codes per vector, and `head_dim` / 16
    /// block scales, in linear order.
    #[default]
    Nvfp4,
    /// FP8 (E4M3): `head_dim` bytes per vector.
    Fp8,
}

/// The memory of a cache of K and V. Block scales are empty in FP8.
#[derive(Debug)]
pub struct KvCacheMut<'a> {
    /// Codes of K.
    pub key_codes: &'a mut [u8],
    /// Codes of V.
    pub value_codes: &'a mut [u8],
    /// Block scales of K.
    pub key_scales: &'a mut [u8],
    /// Block scales of V.
    pub value_scales: &'a mut [u8],
}

/// The memory of a cache of K and V, to read.
#[derive(Clone, Copy, Debug)]
pub struct KvCache<'a> {
    /// Codes of K.
    pub key_codes: &'a [u8],
    /// Codes of V.
    pub value_codes: &'a [u8],
    /// Block scales of K.
    pub key_scales: &'a [u8],
    /// Block scales of V.
    pub value_scales: &'a [u8],
}

impl KvFormat {
    /// Returns the bytes of codes and the number of block scales of `elements` elements.
    pub const fn bytes(self, elements: usize) -> [usize; 2] {
        match self {
            Self::Nvfp4 => [elements / 2, elements / microscale_formats::nvfp4::BLOCK],
            Self::Fp8 => [elements, 0],
        }
    }

    /// Checks a cache's shape, the lengths of its codes and scales, and the scales of K and V.
    pub(crate) fn check(
        self,
        shape: &KvShape,
        lengths: [[usize; 2]; 2],
        scales: Option<[f32; 2]>,
    ) -> Result<()> {
        let fault = |fault| Err(Error::Activations(fault));
        let KvShape { page_stride, page_size, heads, head_dim, hadamard, .. } = *shape;
        let widths = [0, 16, 32, 64, 128];
        if page_size == 0 || heads == 0 || head_dim == 0 || !head_dim.is_multiple_of(16) {
            return fault(ActivationFault::Cache {
                what: "pages, heads and a head_dim that is a multiple of 16",
            });
        }
        if !widths.contains(&hadamard) || hadamard != 0 && !head_dim.is_multiple_of(hadamard) {
            return fault(ActivationFault::Cache {
                what: "a Hadamard transform of 16, 32, 64 or 128 elements that divides head_dim",
            });
        }
        let row = u64::from(heads) * u64::from(head_dim);
        let page = row.checked_mul(u64::from(page_size));
        if page.is_none_or(|page| page_stride < page || !page_stride.is_multiple_of(16)) || row >= 1 << 31 {
            return fault(ActivationFault::Cache { what: "a page stride of whole pages and blocks" });
        }
        let span = shape.span().and_then(|span| usize::try_from(span).ok());
        let Some(span) = span.filter(|_| shape.slots() < 1 << 32) else {
            return fault(ActivationFault::Cache { what: "fewer than 2³² slots" });
        };
        let expected = self.bytes(span);
        for found in lengths {
            for (what, (found, expected)) in ["bytes of a cache's codes", "block scales of a cache"]
                .into_iter()
                .zip(found.into_iter().zip(expected))
            {
                if found < expected {
                    return fault(ActivationFault::Count { what, expected, found });
                }
            }
        }
        for (index, scale) in scales.into_iter().flatten().enumerate() {
            // The divisor 1 / scale must be normal, too.
            if !(scale > 0.0 && scale.is_normal() && (1.0 / scale).is_normal()) {
                return fault(ActivationFault::Scale { index, scale });
            }
        }
        Ok(())
    }
}

/// Checks slots: each is negative, to be skipped, or in the cache.
pub(crate) fn check_slots(shape: &KvShape, slots: &[i64]) -> Result<()> {
    let slots_of_cache = shape.slots();
    match slots.iter().position(|slot| *slot >= 0 && slot.unsigned_abs() >= slots_of_cache) {
        None => Ok(()),
        Some(row) => {
            let fault = ActivationFault::Slot { row, slot: slots[row], slots: slots_of_cache };
            Err(Error::Activations(fault))
        }
    }
}
