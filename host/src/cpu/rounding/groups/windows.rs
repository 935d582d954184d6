//! Reading a piece: a window after another, in several places in turn, each asked for before it is
//! needed.

use crate::cpu::memory::prefetch::prefetch;

/// Bytes of the values of a window: they stay in the first-level cache from the scales to the codes.
pub(in crate::cpu) const WINDOW: usize = 2048;

/// Places of a piece that are worked at in turn, a window each: processors read ahead in each, and there is
/// more time for it.
pub(in crate::cpu) const STREAMS: usize = 2;

/// Asks for the memory of the window after this one.
#[inline(always)]
pub(in crate::cpu) fn prefetch_next_window<T>(behind: &T) {
    prefetch(std::ptr::from_ref(behind).cast::<u8>().wrapping_add(WINDOW), size_of::<T>());
}

/// Four parts of as many chunks, side by side, and what is left. Memory is read at four places at once, as
/// [`STREAMS`] says.
#[inline(always)]
pub(in crate::cpu) fn four_streams<C>(chunks: &[C]) -> (impl Iterator<Item = [&C; 4]>, &[C]) {
    let part = chunks.len() / 4;
    let (a, rest) = chunks.split_at(part);
    let (b, rest) = rest.split_at(part);
    let (c, rest) = rest.split_at(part);
    let (d, rest) = rest.split_at(part);
    (a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| [a, b, c, d]), rest)
}
