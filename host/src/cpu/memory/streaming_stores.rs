//! Streaming stores, for output larger than the caches.
//!
//! They do not read the memory first, and they evict nothing.

/// Outputs of this many bytes or more bypass the caches.
///
/// Most last-level caches hold less. A later reader starts at the beginning of the output, which
/// the caches would have evicted by then.
pub(in crate::cpu) const FROM: usize = 32 << 20;

/// Copies with streaming stores where the CPU has them.
///
/// Call [`finish`] before another thread reads the copy.
#[inline(always)]
pub(in crate::cpu) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy of the same length");
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128};
        // SAFETY: every bit pattern of sixteen bytes is a valid `__m128i`.
        let (head, vectors, tail) = unsafe { to.align_to_mut::<__m128i>() };
        let (from_head, rest) = from.split_at(head.len());
        let (from_vectors, from_tail) = rest.as_chunks::<16>();
        head.copy_from_slice(from_head);
        for (from, to) in from_vectors.iter().zip(vectors) {
            // SAFETY: SSE2 is part of x86-64. `from` has the 16 bytes that are read; they need not
            // be aligned. `align_to_mut` aligned `to`.
            unsafe { write(to, _mm_loadu_si128(from.as_ptr().cast())) };
        }
        tail.copy_from_slice(from_tail);
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// Stores sixteen bytes past the caches.
///
/// # Safety
/// `to` is valid for writes and aligned to 16 bytes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn write(to: *mut std::arch::x86_64::__m128i, vector: std::arch::x86_64::__m128i) {
    // SAFETY: the caller promises that `to` is valid and aligned, and SSE2 is part of x86-64. Miri
    // does not implement the streaming store.
    unsafe {
        #[cfg(not(miri))]
        std::arch::x86_64::_mm_stream_si128(to, vector);
        #[cfg(miri)]
        to.write(vector);
    }
}

/// Orders this thread's streaming stores before everything that follows.
#[inline(always)]
pub(in crate::cpu) fn finish() {
    // Miri does not implement the fence, and needs none after ordinary stores.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_start_and_length() {
        let from: Vec<u8> = (0..200).collect();
        let lens = if cfg!(miri) { 40 } else { 150 };
        for (start, len) in (0..20).flat_map(|start| (0..lens).map(move |len| (start, len))) {
            let mut to = [255; 200];
            super::copy(&from[start / 2..][..len], &mut to[start..][..len]);
            super::finish();
            assert_eq!(to[start..][..len], from[start / 2..][..len]);
            assert!(to[..start].iter().chain(&to[start + len..]).all(|byte| *byte == 255));
        }
    }
}
