//! ggml's Q8_0: blocks of 32 elements, an f16 scale followed by 8-bit codes.
//!
//! A value is code times scale, which is exact in f32. Blocks are made like ggml's reference
//! `quantize_row_q8_0_ref`: the scale is amax / 127, and the codes are the values times the inverse
//! of the unrounded f32 scale. Ties round away from 0.

use std::ops::Range;

use half::f16;
use microscale::Element;
use rayon::prelude::*;

/// Elements per block.
const ELEMENTS: usize = 32;

/// Bytes per block: the scale and one byte per element.
const BYTES: usize = 2 + ELEMENTS;

/// Blocks per task, about 64 KiB.
const BLOCKS_PER_TASK: usize = 2048;

/// Name parts of tensors that llama.cpp (llama-cpp-python 0.3.36) never quantizes: small tensors,
/// position tables, and tensors that no block product reads.
const UNQUANTIZED: &[&str] = &[
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "position_embd",
    "token_types",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_",
    "attn_rel_b.weight",
    "sam.",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "codebook",
    "code_embd",
];

/// Returns whether a tensor may be Q8_0: llama.cpp quantizes its name, and its rows are whole
/// blocks.
pub(crate) fn accepts(name: &str, shape: &[usize]) -> bool {
    let rows_fit = matches!(shape, [.., _, columns] if columns.is_multiple_of(ELEMENTS)) && shape.len() <= 3;
    rows_fit && name.ends_with("weight") && !UNQUANTIZED.iter().any(|part| name.contains(part))
}

/// Quantizes values, a whole number of blocks.
///
/// Returns the index of the first value that Q8_0 cannot represent: NaN, or a value whose block has
/// an amax of at least 8,321,040, so that its scale overflows f16.
pub(crate) fn blocks<T: Element>(values: &[T]) -> Result<Vec<u8>, usize> {
    let mut bytes = vec![0; values.len() / ELEMENTS * BYTES];
    let values = values.as_chunks::<ELEMENTS>().0.par_iter().with_min_len(BLOCKS_PER_TASK);
    let blocks = values.zip(bytes.as_chunks_mut::<BYTES>().0).enumerate();
    let unheld = blocks.filter_map(|(place, (values, block))| {
        encode(&values.map(Element::to_f32), block).err().map(|at| place * ELEMENTS + at)
    });
    let unheld = unheld.min();
    unheld.map_or(Ok(bytes), Err)
}

/// Encodes one block. Returns the index of the first value that Q8_0 cannot represent.
fn encode(values: &[f32; ELEMENTS], block: &mut [u8; BYTES]) -> Result<(), usize> {
    let amax = values.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    let scale = amax / 127.0;
    let half = f16::from_f32(scale);
    let unheld = |value: &f32| value.is_nan() || !half.is_finite() && value.abs() == amax;
    if let Some(place) = values.iter().position(unheld) {
        return Err(place);
    }
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    block[..2].copy_from_slice(&half.to_le_bytes());
    for (code, value) in block[2..].iter_mut().zip(values) {
        // The product overflows f32 only if the f16 scale is 0, and then the codes do not matter.
        *code = (value * inverse).round() as i8 as u8;
    }
    Ok(())
}

/// Dequantizes a range of elements; `None` if `blocks` has fewer.
pub(crate) fn values(blocks: &[u8], elements: Range<usize>) -> Option<Vec<f32>> {
    let first = elements.start / ELEMENTS;
    let blocks = blocks.get(first * BYTES..elements.end.div_ceil(ELEMENTS) * BYTES)?;
    let mut values = vec![0.0; blocks.len() / BYTES * ELEMENTS];
    let parts =
        values.par_chunks_mut(BLOCKS_PER_TASK * ELEMENTS).zip(blocks.par_chunks(BLOCKS_PER_TASK * BYTES));
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

    /// gguf-py's blocks of gguf-py's values.
    #[test]
    fn blocks_equal_those_of_gguf_py() {
        let golden =
            safetensors::SafeTensors::deserialize(include_bytes!("../../golden/q8_0.safetensors")).unwrap();
        let data = |name: &str| golden.tensor(name).unwrap().data().to_vec();
        let bits: Vec<u32> =
            data("values").as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        // Repeated so that several threads get blocks.
        let made = blocks(&values.repeat(8)).unwrap();
        let expected = data("blocks").repeat(8);
        let (made, expected) = (made.as_chunks::<BYTES>().0, expected.as_chunks::<BYTES>().0);
        assert!(made.len() == expected.len() && made.len() > 2 * BLOCKS_PER_TASK);
        for (place, (made, expected)) in made.iter().zip(expected).enumerate() {
            assert_eq!(made, expected, "block {place}");
        }
    }

    #[test]
    fn unrepresentable_values_are_refused_with_their_index() {
        let good = vec![1.0f32; 200_000 / ELEMENTS * ELEMENTS];
        assert!(blocks(&good).is_ok() && blocks::<f32>(&[]).is_ok_and(|blocks| blocks.is_empty()));
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 8_321_040.0] {
            let mut values = good.clone();
            values[150_003] = wrong;
            values[190_000] = wrong;
            assert_eq!(blocks(&values), Err(150_003), "{wrong}");
        }
        let largest = blocks(&[f32::from_bits(8_321_040f32.to_bits() - 1); ELEMENTS]).unwrap();
        assert_eq!(f16::from_le_bytes([largest[0], largest[1]]), f16::MAX);
    }

    #[test]
    fn names_decide_like_llama_cpp() {
        for (name, shape, taken) in [
            ("token_embd.weight", &[8, 64][..], true),
            ("blk.0.ffn_up_exps.weight", &[2, 8, 32], true),
            ("output.weight", &[8, 48], false),
            ("blk.0.attn_norm.weight", &[64], false),
            ("blk.0.ffn_gate_inp.weight", &[8, 64], false),
            ("position_embd.weight", &[8, 64], false),
            ("blk.0.attn_q.bias", &[8, 64], false),
            ("v.patch_embd.weight", &[8, 3, 14, 32], false),
        ] {
            assert_eq!(accepts(name, shape), taken, "{name}");
        }
    }

    #[test]
    fn any_range_dequantizes_like_its_blocks() {
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
