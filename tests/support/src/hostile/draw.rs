//! Draws choices and numbers from a fuzzer's bytes. After the last byte, every choice is the first
//! one.

use arbitrary::Unstructured;

/// The unread rest of an input.
pub(super) struct Draw<'a>(Unstructured<'a>);

/// Sizes for headers: some fit together, some overflow.
const SIZES: &[u64] = &[
    1,
    4,
    32,
    16,
    64,
    2,
    0,
    3,
    8,
    17,
    128,
    1 << 20,
    1 << 31,
    1 << 32,
    (1 << 32) - 1,
    1 << 53,
    1 << 58,
    1 << 61,
    1 << 63,
    i64::MAX as u64,
    u64::MAX,
    u64::MAX - 7,
];

impl<'a> Draw<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    /// Returns a number below a bound.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0.int_in_range(0..=bound.saturating_sub(1)).unwrap_or(0)
    }

    /// Returns true once in `times` calls on average.
    pub(super) fn once_in(&mut self, times: u8) -> bool {
        self.byte() % times == times - 1
    }

    /// Returns one element of a list.
    pub(super) fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// Returns a size, mostly a sensible one.
    pub(super) fn size(&mut self) -> u64 {
        match self.below(8) {
            7 => self.0.arbitrary().unwrap_or(0),
            5 | 6 => self.one_of(SIZES),
            _ => self.one_of(&SIZES[..5]),
        }
    }

    /// Returns raw bytes. The first byte gives their number.
    pub(super) fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte());
        self.take(length)
    }

    /// Takes at most `length` raw bytes.
    pub(super) fn take(&mut self, length: usize) -> &'a [u8] {
        let length = length.min(self.0.len());
        self.0.bytes(length).unwrap_or_default()
    }

    /// Returns `length` bytes, repeating the input if it is too short.
    pub(super) fn fill(&mut self, length: usize) -> Vec<u8> {
        let taken = self.take(length);
        let pattern = if taken.is_empty() { &[0][..] } else { taken };
        pattern.iter().copied().cycle().take(length).collect()
    }

    /// Returns the rest of the input.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        self.take(usize::MAX)
    }

    /// Returns text of a few arbitrary bytes.
    pub(super) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    /// Overwrites parts of a text with words, a few times.
    pub(super) fn damage(&mut self, text: &mut Vec<u8>, words: &[&str]) {
        for _ in 0..self.below(4) {
            let (at, replaced) = (self.below(text.len() + 1), self.below(12));
            let word = if self.once_in(4) { self.bytes() } else { self.one_of(words).as_bytes() };
            let end = (at + replaced).min(text.len());
            text.splice(at..end, word.iter().copied());
        }
    }
}
