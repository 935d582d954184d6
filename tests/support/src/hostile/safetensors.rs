//! Hostile safetensors files.
//!
//! The file consists of arbitrary bytes, an arbitrary header with the right length, or a header by
//! a grammar that may be wrong.

use super::checkpoints::{HEADER_WORDS, Template, encode, names};
use super::draw::Draw;
use super::everything::{Ways, everything};
use crate::{Scratch, raw_file};

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let file = match draw.below(4) {
        0 => draw.rest().to_vec(),
        1 => {
            let rest = draw.rest();
            let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
            raw_file(&rest[..end], rest.get(end + 1..).unwrap_or_default())
        }
        2 => lying(&mut draw),
        _ => {
            let tensors = Template::draw(&mut draw).tensors(&mut draw);
            let mut header = encode(&mut draw, &tensors);
            draw.damage(&mut header, HEADER_WORDS);
            let data: Vec<u8> = tensors.into_iter().flat_map(|tensor| tensor.bytes).collect();
            raw_file(header, &data)
        }
    };
    let scratch = Scratch::new();
    let path = scratch.write("x.safetensors", file);
    everything(&scratch, &path, ways);
}

const DTYPES: &[&str] = &[
    "U8", "F32", "F8_E4M3", "BF16", "F16", "F8_E8M0", "F4", "F6_E2M3", "I32", "I64", "BOOL", "F64",
    "F8_E5M2", "C64", "F23", "u8",
];

/// Returns tensors whose dtypes, shapes and offsets may be wrong.
fn lying(draw: &mut Draw<'_>) -> Vec<u8> {
    let (mut header, mut end) = (String::from("{"), 0u64);
    if draw.once_in(8) {
        header += r#""__metadata__":{"format":"pt"},"#;
    }
    for place in 0..1 + draw.below(6) {
        if place > 0 {
            header.push(',');
        }
        let (name, dtype) = (names(draw), draw.one_of(DTYPES));
        let shape: Vec<u64> = (0..draw.below(5)).map(|_| draw.size()).collect();
        let bits = match dtype {
            "F32" | "I32" => 32,
            "BF16" | "F16" => 16,
            "I64" | "F64" | "C64" => 64,
            "F4" => 4,
            "F6_E2M3" => 6,
            _ => 8,
        };
        let bytes = shape.iter().fold(bits, |product: u64, size| product.wrapping_mul(*size)) / 8;
        let mut offsets = [end, end.wrapping_add(bytes)];
        if draw.once_in(6) {
            offsets[draw.below(2)] = draw.size();
        }
        end = offsets[1];
        let name = serde_json::Value::from(name);
        header += &format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":{offsets:?}}}"#);
    }
    header.push('}');
    let data = if draw.once_in(6) { draw.size() } else { end };
    let data = draw.fill(data.min(1 << 14) as usize);
    raw_file(header, &data)
}
