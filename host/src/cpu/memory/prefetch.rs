//! Software prefetch. Hardware prefetchers stop at the end of a page.

/// Prefetches `bytes` bytes from an address on. The address may be invalid.
#[inline(always)]
pub(in crate::cpu) fn prefetch(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in (0..bytes).step_by(64) {
            // SAFETY: SSE is part of x86-64, and a prefetch accesses no memory and faults at no
            // address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.cast::<i8>().wrapping_add(line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes);
}

/// Prefetches the memory that follows these values, of the same size.
#[inline(always)]
pub(in crate::cpu) fn prefetch_following<T>(values: &[T]) {
    prefetch(values.as_ptr_range().end.cast(), size_of_val(values));
}
