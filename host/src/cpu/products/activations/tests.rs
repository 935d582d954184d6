//! Packed activations against their definition.

use half::{bf16, f16};

use super::*;
use crate::cpu::isa::Isa;
use crate::cpu::simd::Portable;
use crate::cpu::simd::products::packed_index;
use crate::elements::Elements;

#[test]
fn columns_become_rows() {
    let rows: [Lanes<f32>; LANES] =
        std::array::from_fn(|row| std::array::from_fn(|column| (LANES * row + column) as f32));
    for (row, columns) in transposed(Portable, rows).into_iter().enumerate() {
        assert_eq!(columns, std::array::from_fn(|column| rows[column][row]));
    }
}

/// Checks that the parts of each activation add up to it at its position, and that padding is zero.
fn check_parts<T: Element>(wrap: impl Fn(&[T]) -> Elements<'_>, exponents: std::ops::Range<u32>) {
    let mut random = fastrand::Rng::with_seed(13);
    for (cols, tokens) in [(1, 9), (33, 16), (256, 17), (300, 40), (800, 3)] {
        let mut one = || {
            T::from_f32(f32::from_bits(random.u32(..) & 0x807F_FFFF | random.u32(exponents.clone()) << 23))
        };
        let values: Vec<T> = std::iter::repeat_with(&mut one).take(cols * tokens).collect();
        let all = [Isa::Portable, Isa::AmxBf16];
        for isa in Isa::available().chain(all).filter(|isa| *isa != Isa::Reference) {
            let packed = isa.pack_activations(wrap(&values), cols, tokens);
            let (packing, parts) = (packed.packing(), packed.parts());
            assert_eq!(packing == Packing::Bf16Tiles, isa == Isa::AmxBf16);
            let elements_of_line = packing.word().elements();
            for (segment, elements) in packed.segments().enumerate() {
                for tile in 0..tokens.div_ceil(TOKENS) {
                    let lines = packed.part(segment, tile, 1);
                    assert_eq!(lines.len(), elements / elements_of_line * parts);
                    let lines_of_part = CHUNK / elements_of_line;
                    for (token, i) in (0..TOKENS * elements).map(|i| (i / elements, i % elements)) {
                        let (row, column) = (tile * TOKENS + token, segment * SEGMENT + i);
                        let exists = row < tokens && column < cols;
                        let expected = if exists { values[row * cols + column].to_f32() } else { 0.0 };
                        let of_part = |part: usize| {
                            let (of_singles, of_pairs) = (i % CHUNK, packed_index(i % CHUNK));
                            let place = if packing == Packing::F32 { of_singles } else { of_pairs };
                            let line = (i / CHUNK * parts + part) * lines_of_part + place / elements_of_line;
                            let bits = lines[line][token].to_bits();
                            f64::from(f32::from_bits(match (packing, place % 2) {
                                (Packing::F32, _) => bits,
                                (_, 0) => bits << 16,
                                (_, _) => bits & 0xFFFF_0000,
                            }))
                        };
                        let sum: f64 = (0..parts).map(of_part).sum();
                        assert_eq!(sum, f64::from(expected), "{isa:?}, {cols}, {tokens}, {row}, {column}");
                    }
                }
            }
        }
    }
}

#[test]
fn parts_come_to_the_activations() {
    // From this exponent on, the lowest bits of an f32 are normal numbers.
    check_parts::<f32>(|values| Elements::F32(values), 24..255);
    check_parts::<f16>(|values| Elements::F16(values), 90..143);
    check_parts::<bf16>(|values| Elements::Bf16(values), 1..255);
}
