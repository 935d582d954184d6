//! The values of ggml's Q8_0, which is read and not written: blocks of 32 codes of eight bits, each after its scale in
//! f16. A value is its code times the scale, which f32 has exactly.

use std::ops::Range;

use half::f16;
use rayon::prelude::*;

/// Elements of a block.
const ELEMENTS: usize = 32;

/// Bytes of a block: the scale's, and a code an element.
const BYTES: usize = 2 + ELEMENTS;

/// Blocks that a thread takes at once: some 64 KiB.
const TOGETHER: usize = 2048;

/// The values of some elements, given all blocks; `None` beyond them.
pub(crate) fn values(blocks: &[u8], elements: Range<usize>) -> Option<Vec<f32>> {
    let first = elements.start / ELEMENTS;
    let blocks = blocks.get(first * BYTES..elements.end.div_ceil(ELEMENTS) * BYTES)?;
    let mut values = vec![0.0; blocks.len() / BYTES * ELEMENTS];
    let parts = values.par_chunks_mut(TOGETHER * ELEMENTS).zip(blocks.par_chunks(TOGETHER * BYTES));
    parts.for_each(|(values, blocks)| {
        let blocks = blocks.as_chunks::<BYTES>().0.iter();
        for (values, [low, high, codes @ ..]) in values.chunks_exact_mut(ELEMENTS).zip(blocks) {
            let scale = f16::from_le_bytes([*low, *high]).to_f32();
            for (value, code) in values.iter_mut().zip(codes) {
                let product = f32::from(*code as i8) * scale;
                *value = if product.is_nan() { f32::NAN } else { product };
            }
        }
    });
    values.truncate(elements.end - first * ELEMENTS);
    values.drain(..elements.start - first * ELEMENTS);
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_elements_are_those_of_their_blocks() {
        let mut random = fastrand::Rng::with_seed(8);
        let scale = |block: usize| f16::from_f32(block as f32 / 64.0);
        let blocks: Vec<[u8; BYTES]> = (0..5000)
            .map(|block| {
                let mut bytes = std::array::from_fn(|_| random.u8(..));
                bytes[..2].copy_from_slice(&scale(block).to_le_bytes());
                bytes
            })
            .collect();
        let expected: Vec<f32> = (0..blocks.len() * ELEMENTS)
            .map(|i| f32::from(blocks[i / ELEMENTS][2 + i % ELEMENTS] as i8) * scale(i / ELEMENTS).to_f32())
            .collect();
        let bytes = blocks.as_flattened();
        for range in [0..expected.len(), 0..0, 5..9, 31..33, 64..160_000, 7777..123_457] {
            assert_eq!(values(bytes, range.clone()).unwrap(), expected[range]);
        }
        assert_eq!(values(bytes, 0..expected.len() + 1), None);
    }
}
