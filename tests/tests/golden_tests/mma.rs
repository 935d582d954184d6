//! Compares k-steps of FP4 with MMA-Sim's `mma.sync` with block scales, bit for bit.

use microscale::Format;
use microscale::formats::fp4_dot::{self, step, terms};
use microscale_test_support::golden::{Tensors, files};

/// Rows of A, columns of B, and instructions per file.
const SHAPE: (usize, usize, usize) = (16, 8, 16);

/// Part `index` of `len` bytes.
fn part(bytes: &[u8], index: usize, len: usize) -> &[u8] {
    &bytes[index * len..][..len]
}

#[test]
fn k_steps_match_mma_sim() {
    let names = [("mma-sim-c785138-mxfp4", Format::Mxfp4), ("mma-sim-c785138-nvfp4", Format::Nvfp4)];
    assert_eq!(files("mma"), names.map(|(name, _)| name));
    let (rows, columns, instructions) = SHAPE;
    for (name, format) in names {
        let file = Tensors::read("mma", name);
        let [a, b, scale_a, scale_b] = ["a", "b", "scale_a", "scale_b"].map(|tensor| file.bytes(tensor));
        let (c, d) = (file.f32s("c"), file.f32s("d"));
        assert_eq!((file.shape("d"), d.len()), (&[instructions, rows, columns][..], c.len()));
        let blocks = fp4_dot::STEP / format.block();
        let (mut nan, mut zero) = (0, 0);
        for (i, (c, d)) in c.into_iter().zip(d).enumerate() {
            let (instruction, row, column) = (i / (rows * columns), i / columns % rows, i % columns);
            let (row, column) = (instruction * rows + row, instruction * columns + column);
            let codes = |bytes, index| part(bytes, index, fp4_dot::STEP / 2);
            let x = (codes(a, row), part(scale_a, row, blocks));
            let y = (codes(b, column), part(scale_b, column, blocks));
            let found = step(c, terms(format, x, y));
            assert_eq!(found.to_bits(), d.to_bits(), "{format}, row {row}, column {column}");
            (nan, zero) = (nan + usize::from(found.is_nan()), zero + usize::from(found == 0.0));
        }
        assert!(nan > 8 && zero > 0, "{format}: {nan} NaN, {zero} zeros");
    }
}
