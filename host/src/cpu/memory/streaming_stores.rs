//! Writing past the caches, for output too large for them: memory is not read first, and nothing else is
//! driven out.

/// Outputs from this many bytes on are written past the caches: more than most have, and what reads such an
/// output begins at its other end.
pub(in crate::cpu) const FROM: usize = 32 << 20;

/// Copies, past the caches where the processor can. Before another thread may read, [`finish`] is called.
#[inline(always)]
pub(in crate::cpu) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy of the same length");
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128};
        // SAFETY: any sixteen bytes are a vector of sixteen bytes.
        let (head, vectors, tail) = unsafe { to.align_to_mut::<__m128i>() };
        let (from_head, rest) = from.split_at(head.len());
        let (from_vectors, from_tail) = rest.as_chunks::<16>();
        head.copy_from_slice(from_head);
        for (from, to) in from_vectors.iter().zip(vectors) {
            // SAFETY: SSE2 is part of x86-64; sixteen bytes are read without a demand on alignment, and
            // written where `align_to_mut` has aligned them.
            unsafe { write(to, _mm_loadu_si128(from.as_ptr().cast())) };
        }
        tail.copy_from_slice(from_tail);
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// # Safety
/// `to` is valid for writes and aligned.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn write(to: *mut std::arch::x86_64::__m128i, vector: std::arch::x86_64::__m128i) {
    // SAFETY: as the caller promises; SSE2 is part of x86-64. Miri has only the other instruction.
    unsafe {
        #[cfg(not(miri))]
        std::arch::x86_64::_mm_stream_si128(to, vector);
        #[cfg(miri)]
        to.write(vector);
    }
}

/// Ends a thread's copies: what follows is seen after them.
#[inline(always)]
pub(in crate::cpu) fn finish() {
    // Miri, which does not have the instruction, has no need of it.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE, which has the instruction, is part of x86-64.
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
