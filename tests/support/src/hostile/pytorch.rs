//! Hostile PyTorch files.
//!
//! The file consists of arbitrary bytes, an archive with an arbitrary pickle, or tensors whose
//! storages, sizes and strides may be wrong.

use super::draw::Draw;
use super::everything::{Ways, everything};
use crate::Scratch;
use crate::torch_file::{TorchTensor, torch_file, torch_pickle};

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let file = match draw.below(3) {
        0 => draw.rest().to_vec(),
        1 => {
            let storage = draw.bytes();
            torch_file(draw.rest(), &[("0", storage)])
        }
        _ => drafted(&mut draw),
    };
    let scratch = Scratch::new();
    let path = scratch.write("x.pt", file);
    everything(&scratch, &path, ways);
}

const NAMES: &[&str] = &["a.weight", "b.weight", "a.bias", "a.weight_scale", "lm_head.weight"];
const CLASSES: &[&str] =
    &["FloatStorage", "HalfStorage", "BFloat16Storage", "CharStorage", "ByteStorage", "LongStorage"];

/// Fragments of pickles.
const PARTS: &[&str] = &[
    "ctorch\nSize\n",
    "ccollections\nOrderedDict\n",
    ")R",
    "}",
    "u",
    "(",
    "t",
    "q\0",
    "h\0",
    "b",
    "cos\nsystem\n",
];

fn drafted(draw: &mut Draw<'_>) -> Vec<u8> {
    let storages: Vec<Vec<u8>> = (0..1 + draw.below(2))
        .map(|_| {
            let length = [0, 128, 512, 2048][draw.below(4)];
            draw.fill(length)
        })
        .collect();
    let mut numbers = Vec::new();
    for _ in 0..1 + draw.below(4) {
        let (rows, cols) = (draw.one_of(&[1i64, 2, 4]), draw.one_of(&[16i64, 32, 64]));
        let (mut shape, mut strides) = (vec![rows, cols], vec![cols, 1]);
        if draw.once_in(4) {
            (shape, strides) = (vec![cols, rows], vec![1, cols]);
        }
        if draw.once_in(8) {
            shape[0] = draw.size() as i64;
        }
        if draw.once_in(8) {
            strides[1] = draw.size() as i64;
        }
        let offset = if draw.once_in(4) { draw.size() as i64 } else { 0 };
        numbers.push((
            draw.one_of(NAMES),
            draw.one_of(CLASSES),
            draw.one_of(&["0", "1"]),
            offset,
            shape,
            strides,
        ));
    }
    let tensors: Vec<_> = numbers
        .iter()
        .map(|(name, class, key, offset, shape, strides)| TorchTensor {
            name,
            class,
            key,
            offset: *offset,
            shape,
            strides,
        })
        .collect();
    let mut pickle = torch_pickle(&tensors);
    if draw.once_in(2) {
        draw.damage(&mut pickle, PARTS);
    }
    let keyed: Vec<_> = ["0", "1"].into_iter().zip(storages.iter().map(Vec::as_slice)).collect();
    let mut file = torch_file(&pickle, &keyed);
    if draw.once_in(4) {
        draw.damage(&mut file, PARTS);
    }
    file
}
