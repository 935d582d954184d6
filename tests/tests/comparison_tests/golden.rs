//! Tests against golden vectors by bitsandbytes and microxcaling.

use std::collections::BTreeMap;

use half::{bf16, f16};
use microscale::cpu::Isa;
use microscale::formats::{E3m0, nf4};
use microscale::{Element, NonFinite, QuantizedShape, QuantizedTensor, Recipe, Shape, dequantize};
use microscale_test_support::cases::quantize;
use microscale_test_support::golden::{Input, Tensors, files};
use microscale_test_support::oracle::Exact;

use super::oracle::{format, recipe, taken_apart};

const BITSANDBYTES: &str = "bitsandbytes-0.50.2";
const MICROXCALING: &str = "microxcaling-7bc4195";

#[test]
fn every_file_is_read() {
    let named =
        |stem: &str, kinds: &[&str]| kinds.iter().map(|kind| format!("{stem}-{kind}")).collect::<Vec<_>>();
    assert_eq!(files("nf4"), named(BITSANDBYTES, &["bf16", "f16", "f32", "table"]));
    assert_eq!(files("mxfp4-e3m0"), named(MICROXCALING, &["floor-f32", "tables"]));
}

#[test]
fn the_codebook_matches_bitsandbytes() {
    let table = Tensors::read("nf4", &format!("{BITSANDBYTES}-table"));
    assert_eq!(table.f32s("values"), nf4::VALUES);
    assert_eq!(table.f32s("midpoints"), nf4::MIDPOINTS);
}

/// Number of different rows per group.
type Slips = BTreeMap<String, usize>;

fn group_of(file: &Tensors, row: usize) -> String {
    let groups: Vec<(String, usize, usize)> = file.json("groups");
    groups.into_iter().find(|(_, first, last)| (*first..=*last).contains(&row)).expect("a group").0
}

/// Returns the rows with different codes, and the rows with different values for the library's
/// codes.
fn nf4_slips<T: Exact>(file: &Tensors, values: &[T], back: &[T]) -> [Slips; 2] {
    let [rows, cols] = *file.shape("input") else { panic!("no matrix") };
    let Input::Bf16(scales) = file.input("scales") else { panic!("scales of another type") };
    let scales: Vec<u16> = scales.iter().map(|scale| scale.to_bits()).collect();
    let codes = file.bytes("codes");
    let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let shape = QuantizedShape::new(format("nf4"), rows, cols);
    let theirs = QuantizedTensor::from_parts(shape, codes.to_vec(), bytes).expect("a block a row");
    let found_back = dequantize::<T>(&theirs);
    let mut slips = [Slips::new(), Slips::new()];
    for isa in Isa::available() {
        slips = [Slips::new(), Slips::new()];
        let (tensor, _) =
            quantize(isa, values, Shape::new(rows, cols), &recipe("nf4")).expect("finite values");
        // The scale is the largest magnitude, independent of the library's reciprocal.
        assert_eq!(taken_apart(&tensor).0, scales);
        for row in 0..rows {
            let of_row = row * cols / 2..(row + 1) * cols / 2;
            let same_codes = tensor.codes()[of_row.clone()] == codes[of_row];
            let same_values = (row * cols..(row + 1) * cols).all(|i| found_back[i].bits() == back[i].bits());
            for (slips, same) in slips.iter_mut().zip([same_codes, same_values]) {
                if !same {
                    *slips.entry(group_of(file, row)).or_default() += 1;
                }
            }
        }
    }
    slips
}

#[test]
fn nf4_matches_bitsandbytes() {
    for kind in ["bf16", "f16", "f32"] {
        let file = Tensors::read("nf4", &format!("{BITSANDBYTES}-{kind}"));
        let slips = match (file.input("input"), file.input("dequantized")) {
            (Input::F32(values), Input::F32(back)) => nf4_slips::<f32>(&file, &values, &back),
            (Input::F16(values), Input::F16(back)) => nf4_slips::<f16>(&file, &values, &back),
            (Input::Bf16(values), Input::Bf16(back)) => nf4_slips::<bf16>(&file, &values, &back),
            other => panic!("{other:?}"),
        };
        let known =
            |groups: &[(&str, usize)]| groups.iter().map(|(group, n)| (group.to_string(), *n)).collect();
        // The library divides by 1e-38 if the largest magnitude is smaller.
        let codes: Slips = known(if kind == "f16" { &[] } else { &[("below-1e-38", 3)] });
        // The library dequantizes with the processor's conversion to bf16, which flushes subnormal
        // numbers to zero.
        let values: Slips =
            known(if kind == "bf16" { &[("below-1e-38", 3), ("smallest-normal", 2)] } else { &[] });
        assert_eq!(slips, [codes, values], "{kind}");
    }
}

/// Compares rows of two blocks. Codes of ±0 count as equal, because microxcaling drops the sign.
#[test]
fn e3m0_matches_microxcaling() {
    let file = Tensors::read("mxfp4-e3m0", &format!("{MICROXCALING}-floor-f32"));
    let [rows, cols] = *file.shape("input") else { panic!("no matrix") };
    let values = file.f32s("input");
    let codes: Vec<u8> = file.bytes("codes").iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
    let unsigned =
        |codes: &[u8]| codes.iter().map(|code| if *code == 8 { 0 } else { *code }).collect::<Vec<_>>();
    for isa in Isa::available() {
        let recipe = Recipe { non_finite: NonFinite::Propagate, ..recipe("mxfp4-e3m0") };
        let (tensor, _) = quantize(isa, &values, Shape::new(rows, cols), &recipe).expect("any values");
        let (found_scales, found_codes) = taken_apart(&tensor);
        let mut slips = Slips::new();
        for (block, wide) in values.chunks(32).enumerate() {
            if !wide.iter().all(|value| value.is_finite()) {
                continue;
            }
            let of_block = block * 32..(block + 1) * 32;
            let same = unsigned(&found_codes[of_block.clone()]) == unsigned(&codes[of_block]);
            let byte = u16::from(file.bytes("scales")[block]);
            if !same || found_scales[block] != byte {
                assert_eq!(byte, found_scales[block] + 1);
                *slips.entry(group_of(&file, block / 2)).or_default() += 1;
            }
        }
        // An f32 `log2` a few ulps below a power of two is rounded up to it, as in microxcaling's
        // MXFP4.
        let known = [("largest-finite", 4), ("near-boundary", 3), ("power-of-two", 13)];
        assert_eq!(slips, known.map(|(group, n)| (group.to_owned(), n)).into(), "{isa:?}");
    }
}

#[test]
fn e3m0_rounds_every_16_bit_number_like_microxcaling() {
    let table = Tensors::read("mxfp4-e3m0", &format!("{MICROXCALING}-tables"));
    fn check<T: Element>(codes: &[u8], of_bits: impl Fn(u16) -> T) {
        for (bits, code) in (0..=u16::MAX).zip(codes) {
            let value = of_bits(bits).to_f32();
            let found = E3m0::from_f32(value).to_bits();
            let same = found == *code || (found == 8 && *code == 0 && value == 0.0);
            assert!(value.is_nan() || same, "{value:e}: {found}, not {code}");
        }
    }
    check(table.bytes("e3m0_from_bf16"), bf16::from_bits);
    check(table.bytes("e3m0_from_f16"), f16::from_bits);
}
