//! Asking for memory before it is read. Processors read ahead by themselves, but not past a page.

/// Asks for some bytes from an address on, which need not be anybody's.
#[inline(always)]
pub(in crate::cpu) fn prefetch(start: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in (0..bytes).step_by(64) {
            // SAFETY: prefetching is no access and cannot fail, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.cast::<i8>().wrapping_add(line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, bytes);
}

/// Asks for what comes after these values, as much as they are.
#[inline(always)]
pub(in crate::cpu) fn prefetch_following<T>(values: &[T]) {
    prefetch(values.as_ptr_range().end.cast(), size_of_val(values));
}
