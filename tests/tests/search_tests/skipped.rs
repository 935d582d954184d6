//! Tests scales that the full search skips.

use microscale::cpu::Isa;
use microscale::formats::search::{Block, Measure, PowersOfTwo, Scales};
use microscale::formats::{mx, nvfp4};
use microscale::{Format, Numerics, QuantizedTensor, Search};
use microscale_test_support::arithmetic::Scalars;
use rayon::prelude::*;

use super::brute_force::TOLERANCE;
use super::inputs::{COLS, FEWER_BLOCKS, importance, matrices, quantize, recipe};

/// Asserts that the full search took the documented scale.
///
/// No skipped scale may have a smaller error.
///
/// Errors use the search's own arithmetic. `plain` and `full` are the block's bytes without a
/// search and with it.
fn check_skipped<const N: usize, S: Scales>(what: &str, block: &Block<N>, scales: &S, plain: u8, full: u8) {
    let error = |byte| block.error::<Scalars>(scales.factor(byte));
    let plain_error = error(plain);
    let (first, last) = block.bounds::<Scalars, S>(scales, plain_error, plain);
    let mut best = (plain, plain_error);
    for byte in first..=last {
        let error = error(byte);
        if error < best.1 {
            best = (byte, error);
        }
    }
    assert_eq!(full, best.0, "{what}: among {first:#x} to {last:#x} the best is {best:?}");
    // Smaller skipped scales lose in rounded numbers too.
    for byte in S::FIRST..first {
        assert!(error(byte) >= best.1, "{what}: {byte:#x} errs less than {best:?}");
    }
    // Larger skipped scales may win by a rounding. Under the largest possible factor, all codes
    // become zeros, and the error is Σ w·a².
    let least = f64::from(best.1).sqrt();
    let rounding = TOLERANCE * (f64::from(block.error::<Scalars>(f32::MAX)).sqrt() + least);
    for byte in last + 1..=S::LAST {
        assert!(
            f64::from(error(byte)).sqrt() >= least - rounding,
            "{what}: {byte:#x} errs less than {best:?}"
        );
    }
}

/// [`check_skipped`] for the blocks of matrices, with importance and without.
fn check_skipped_everywhere<const N: usize, S: Scales + Sync>(
    format: Format,
    scales: impl Fn(&QuantizedTensor) -> S,
) {
    let importance = importance();
    for (name, values) in matrices(N, FEWER_BLOCKS / 4) {
        let numerics = Numerics::default_for(format);
        let plain = quantize(Isa::best(), &values, &recipe(format, numerics, Search::None), None).tensor;
        for importance in [None, Some(&importance[..])] {
            let recipe = recipe(format, numerics, Search::Full);
            let full = quantize(Isa::best(), &values, &recipe, importance).tensor;
            let scales = scales(&full);
            values.as_chunks::<N>().0.par_iter().enumerate().for_each(|(i, values)| {
                let importance =
                    importance.map(|importance| std::array::from_fn(|k| importance[(i * N + k) % COLS]));
                let what = format!("{format}, {name}, block {i}, importance: {}", importance.is_some());
                let block = Block::new(values, importance);
                check_skipped(&what, &block, &scales, plain.scales()[i], full.scales()[i]);
            });
        }
    }
}

#[test]
fn scales_skipped_by_full_search_cannot_win() {
    check_skipped_everywhere::<{ nvfp4::BLOCK }, _>(Format::Nvfp4, QuantizedTensor::global_scale);
    check_skipped_everywhere::<{ mx::BLOCK }, _>(Format::Mxfp4, |_| PowersOfTwo);
}
