//! The layout of paged KV caches, as FlashInfer and vLLM store them.
//!
//! A cache has pages of `page_size` tokens, and a token has `heads` vectors of `head_dim` elements.
//! A slot names a token's place: page · `page_size` + place in the page. Codes and block scales are
//! two arrays with the same order. NVFP4 has `head_dim` / 2 bytes of codes and `head_dim` / 16
//! block scales per vector, and FP8 `head_dim` bytes. Each of K and V has a global scale, a
//! multiplier.
//!
//! NVFP4 uses the numerics of [`Arithmetic::TRANSFORMER_ENGINE`](crate::nvfp4::Arithmetic) with the
//! divisor 1 / scale.

use crate::activations::hadamard;

/// The order of vectors in a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum KvOrder {
    /// `[pages, page_size, heads, head_dim]`
    #[default]
    Nhd = 0,
    /// `[pages, heads, page_size, head_dim]`
    Hnd = 1,
}

/// The shape of a paged cache of K or of V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct KvShape {
    /// Elements from a page's start to the next's: 2 · `page_size` · `heads` · `head_dim` where K
    /// and V alternate, otherwise half of that.
    pub page_stride: u64,
    /// Pages.
    pub pages: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Heads of K and V.
    pub heads: u32,
    /// Elements of a head's vector: a multiple of 16.
    pub head_dim: u32,
    /// The order of vectors in a page.
    pub order: KvOrder,
    /// Width of the Hadamard transform of K: a power of two from 16 to 128 that divides `head_dim`,
    /// or 0 for none.
    ///
    /// The caller transforms queries in the same way, or undoes the transform of K.
    pub hadamard: u32,
}

impl KvShape {
    /// Returns the shape of a cache without gaps between pages.
    pub const fn new(order: KvOrder, pages: u32, page_size: u32, heads: u32, head_dim: u32) -> Self {
        let page_stride = (page_size as u64 * heads as u64).saturating_mul(head_dim as u64);
        Self { page_stride, pages, page_size, heads, head_dim, order, hadamard: 0 }
    }

    /// Returns the number of slots.
    #[inline(always)]
    pub const fn slots(&self) -> u64 {
        self.pages as u64 * self.page_size as u64
    }

    /// Returns the offset of a head's vector, in elements.
    ///
    /// `page` and `place` are the slot divided by `page_size`: the quotient and the remainder.
    #[inline(always)]
    pub const fn offset(&self, page: u32, place: u32, head: u32) -> u64 {
        let vector = match self.order {
            KvOrder::Nhd => place as u64 * self.heads as u64 + head as u64,
            KvOrder::Hnd => head as u64 * self.page_size as u64 + place as u64,
        };
        page as u64 * self.page_stride + vector * self.head_dim as u64
    }

    /// Returns the number of elements that the cache spans, or `None` on overflow.
    pub const fn span(&self) -> Option<u64> {
        let Some(page) = (self.page_size as u64 * self.heads as u64).checked_mul(self.head_dim as u64) else {
            return None;
        };
        match (self.pages as u64).checked_sub(1) {
            None => Some(0),
            Some(others) => match others.checked_mul(self.page_stride) {
                Some(others) => others.checked_add(page),
                None => None,
            },
        }
    }

    /// Applies the Hadamard transform to a head's vector of K, if there is one.
    pub fn transform(&self, vector: &mut [f32]) {
        if self.hadamard != 0 {
            vector.chunks_exact_mut(self.hadamard as usize).for_each(hadamard);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn vectors_of_both_orders_do_not_overlap() {
        for order in [KvOrder::Nhd, KvOrder::Hnd] {
            let stacked = KvShape { page_stride: 2 * 4 * 3 * 16, ..KvShape::new(order, 5, 4, 3, 16) };
            for shape in [stacked, KvShape::new(order, 5, 4, 3, 16)] {
                let mut seen = BTreeSet::new();
                for (page, place, head) in (0..5).flat_map(|page| (0..12).map(move |i| (page, i / 3, i % 3)))
                {
                    let offset = shape.offset(page, place, head);
                    assert!(offset.is_multiple_of(16) && seen.insert(offset));
                }
                assert_eq!(seen.last().unwrap() + 16, shape.span().unwrap());
            }
        }
        assert_eq!(KvShape::new(KvOrder::Nhd, u32::MAX, u32::MAX, u32::MAX, 16).span(), None);
    }
}
