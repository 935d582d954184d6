//! Activations of many tokens, in the order in which they are multiplied.

use microscale_formats::dot::CHUNK;
use microscale_formats::weights::SEGMENT;
use rayon::prelude::*;

use super::vector::Lanes;
use crate::element::Element;
use crate::elements::{Elements, by_dtype};

/// Tokens of a tile.
pub(super) const TOKENS: usize = 8;

/// As many f32 as a vector has lanes, where no vector is in two cache lines.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Aligned(pub(super) Lanes<f32>);

/// The activations of a token in a word of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// One of them, as an f32.
    Single,
    /// Two of them in bf16, the first one below the other.
    Pair,
}

impl Word {
    /// Activations in a word.
    pub(super) const fn elements(self) -> usize {
        match self {
            Self::Single => 1,
            Self::Pair => 2,
        }
    }
}

/// Activations by tile of tokens, word and token. Rows are filled up with zeros to whole chunks, and the last
/// tile to a power of two of tokens.
pub(super) struct Arranged {
    word: Word,
    cols: usize,
    tokens: usize,
    words: Vec<u32>,
}

impl Arranged {
    pub(super) fn of(word: Word, activations: Elements<'_>, cols: usize, tokens: usize) -> Self {
        let cols_of_words = cols.next_multiple_of(CHUNK);
        let whole = tokens / TOKENS * TOKENS;
        let places = whole + places(tokens - whole);
        let mut words = vec![0; cols_of_words / word.elements() * places];
        let tile_words = (cols_of_words / word.elements() * TOKENS).max(1);
        words.par_chunks_mut(tile_words).enumerate().for_each(|(tile, words)| {
            let first = tile * TOKENS;
            let tokens = (tokens - first).min(TOKENS);
            let activations = activations.part(first * cols, tokens * cols);
            match (word, activations) {
                (Word::Pair, Elements::Bf16(activations)) => {
                    arrange(words, tokens, activations, cols, |pair: &[half::bf16; 2]| {
                        u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16
                    });
                }
                _ => by_dtype!(Elements, activations => {
                    arrange(words, tokens, activations, cols, |[x]: &[_; 1]| x.to_f32().to_bits());
                }),
            }
        });
        Self { word, cols: cols_of_words, tokens, words }
    }

    /// The contents of a word, by which x86 has instructions of its own.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn word(&self) -> Word {
        self.word
    }

    /// The elements of each segment of a row.
    pub(super) fn segments(&self) -> impl Iterator<Item = usize> + use<> {
        let cols = self.cols;
        (0..cols).step_by(SEGMENT).map(move |first| (cols - first).min(SEGMENT))
    }

    /// A tile's words of a segment and those after it.
    pub(super) fn part(&self, tile: usize, segment: usize) -> &[u32] {
        let first = tile * TOKENS;
        let places = places((self.tokens - first).min(TOKENS));
        let words = self.cols / self.word.elements();
        &self.words[first * words..][..words * places][segment * SEGMENT / self.word.elements() * places..]
    }
}

/// The room that some tokens of a tile take.
const fn places(tokens: usize) -> usize {
    if tokens == 0 { 0 } else { tokens.next_power_of_two() }
}

/// Puts each token's words behind each other, `places` apart.
fn arrange<T: Element, const N: usize>(
    words: &mut [u32],
    tokens: usize,
    activations: &[T],
    cols: usize,
    word: impl Fn(&[T; N]) -> u32,
) {
    let places = places(tokens);
    for (token, row) in activations.chunks(cols).enumerate() {
        let places = words.chunks_exact_mut(places).map(|words| &mut words[token]);
        let (whole, rest) = row.as_chunks::<N>();
        let mut last = [T::default(); N];
        last[..rest.len()].copy_from_slice(rest);
        let rest = if rest.is_empty() { None } else { Some(&last) };
        for (to, of) in places.zip(whole.iter().chain(rest)) {
            *to = word(of);
        }
    }
}
