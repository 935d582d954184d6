//! Reads a run window by window, from two streams in turn, with prefetch.

use crate::cpu::memory::prefetch::prefetch;

/// Bytes of a window's values. They stay in the L1 cache between scales and codes.
pub(in crate::cpu) const WINDOW: usize = 2048;

/// Streams of windows that a run is read from in turn.
///
/// The hardware prefetches each of them, and has twice the time for it.
pub(in crate::cpu) const STREAMS: usize = 2;

/// Prefetches the memory at the same offset in the next window.
#[inline(always)]
pub(in crate::cpu) fn prefetch_next_window<T>(value: &T) {
    prefetch(std::ptr::from_ref(value).cast::<u8>().wrapping_add(WINDOW), size_of::<T>());
}

/// Splits chunks into four parts of equal length, read side by side, and a remainder.
///
/// Memory is read as four streams, see [`STREAMS`].
#[inline(always)]
pub(in crate::cpu) fn four_streams<C>(chunks: &[C]) -> (impl Iterator<Item = [&C; 4]>, &[C]) {
    let part = chunks.len() / 4;
    let (a, rest) = chunks.split_at(part);
    let (b, rest) = rest.split_at(part);
    let (c, rest) = rest.split_at(part);
    let (d, rest) = rest.split_at(part);
    (a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| [a, b, c, d]), rest)
}
