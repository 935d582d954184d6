//! Hostile GGUF files.
//!
//! They are arbitrary bytes, or follow a grammar with wrong counts, lengths, types and offsets.

use super::checkpoints::names;
use super::draw::Draw;
use super::everything::{Ways, everything};
use crate::Scratch;

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let file = match draw.below(3) {
        0 => draw.rest().to_vec(),
        1 => drafted(&mut draw, true),
        _ => drafted(&mut draw, false),
    };
    let scratch = Scratch::new();
    let path = scratch.write("x.gguf", file);
    everything(&scratch, &path, ways);
}

const KEYS: &[&str] = &[
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "tokenizer.ggml.tokens",
    "split.count",
];

/// Value type numbers, including array and string.
const KINDS: &[u32] = &[4, 8, 9, 0, 1, 2, 3, 5, 6, 7, 10, 11, 12, 13, u32::MAX];

/// Tensor types with the elements and bytes of a block.
const TYPES: &[(u32, u64, u64)] =
    &[(0, 1, 4), (39, 32, 17), (40, 64, 36), (30, 1, 2), (1, 1, 2), (8, 32, 34), (24, 1, 1), (12, 256, 144)];

/// Returns a file by the grammar. With `honest`, only strings and numbers may be wrong.
fn drafted(draw: &mut Draw<'_>, honest: bool) -> Vec<u8> {
    let lie = |draw: &mut Draw<'_>| !honest && draw.once_in(16);
    let mut alignment = 32;
    let entries: Vec<Vec<u8>> = (0..draw.below(4))
        .map(|place| {
            let key = if draw.once_in(6) {
                draw.text()
            } else {
                format!("{}{}", draw.one_of(KEYS), if honest { place.to_string() } else { String::new() })
            };
            let kind = if key == "general.alignment" && !lie(draw) { 4 } else { draw.one_of(KINDS) };
            let value = if key == "general.alignment" {
                alignment = draw.one_of(&[32, 8, 1, 64, 4096, 1 << 20, 0, 3, u32::MAX]);
                alignment.to_le_bytes().to_vec()
            } else {
                value(draw, kind, honest)
            };
            [&string(draw, key.as_bytes(), honest)[..], &kind.to_le_bytes(), &value].concat()
        })
        .collect();
    let alignment = u64::from(alignment.clamp(1, 1 << 12));

    let (mut tensors, mut end) = (Vec::new(), 0u64);
    for place in 0..draw.below(5) {
        let name = if honest { format!("{place}.{}", names(draw)) } else { names(draw) };
        let (kind, elements, bytes) = draw.one_of(TYPES);
        let dims = if lie(draw) { draw.below(7) } else { 1 + draw.below(3) };
        let mut sizes: Vec<u64> =
            (0..dims).map(|_| if honest { draw.one_of(&[1, 2, 4, 0]) } else { draw.size() }).collect();
        if let Some(first) = sizes.first_mut().filter(|_| !lie(draw)) {
            *first = draw.one_of(&[1, 2, 3]) * elements.max(32);
        }
        let product = sizes.iter().fold(1u64, |product, size| product.wrapping_mul(*size));
        let kind = if lie(draw) { u32::from(draw.byte()) } else { kind };
        let offset = if lie(draw) { draw.size() } else { end };
        let data = (product / elements).wrapping_mul(bytes);
        end = offset.wrapping_add(data).checked_next_multiple_of(alignment).unwrap_or(0);
        let mut tensor = string(draw, name.as_bytes(), honest);
        tensor.extend((sizes.len() as u32).to_le_bytes());
        sizes.iter().for_each(|size| tensor.extend(size.to_le_bytes()));
        tensor.extend(kind.to_le_bytes());
        tensor.extend(offset.to_le_bytes());
        tensors.push(tensor);
    }

    let version = if lie(draw) { u32::from(draw.byte()) } else { 3 };
    let count = |draw: &mut Draw<'_>, true_one: usize| if lie(draw) { draw.size() } else { true_one as u64 };
    let counts = [count(draw, tensors.len()), count(draw, entries.len())];
    let mut file =
        [&b"GGUF"[..], &version.to_le_bytes(), &counts[0].to_le_bytes(), &counts[1].to_le_bytes()].concat();
    file.extend(entries.concat());
    file.extend(tensors.concat());
    file.resize(file.len().next_multiple_of(alignment as usize), 0);
    let data = if lie(draw) { draw.size() } else { end };
    file.extend(draw.fill(data.min(1 << 14) as usize));
    file
}

/// Returns a length and the bytes. The length may be wrong.
fn string(draw: &mut Draw<'_>, text: &[u8], honest: bool) -> Vec<u8> {
    let length = if !honest && draw.once_in(16) { draw.size() } else { text.len() as u64 };
    [&length.to_le_bytes(), text].concat()
}

/// Returns the bytes of a value of a type.
fn value(draw: &mut Draw<'_>, kind: u32, honest: bool) -> Vec<u8> {
    let bytes = |kind| match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    };
    match kind {
        8 => {
            let text = draw.bytes();
            string(draw, text, honest)
        }
        9 => {
            let of = draw.one_of(KINDS);
            let elements = draw.below(5);
            let count = if !honest && draw.once_in(8) { draw.size() } else { elements as u64 };
            let mut value = [&of.to_le_bytes()[..], &count.to_le_bytes()].concat();
            for _ in 0..elements {
                let element = match of {
                    8 => {
                        let text = draw.bytes();
                        string(draw, text, honest)
                    }
                    _ => draw.fill(bytes(of)),
                };
                value.extend(element);
            }
            value
        }
        _ => draw.fill(bytes(kind)),
    }
}
