//! Measurements on the CPU, against memcpy with the same threads; products also against reading.

use std::time::{Duration, Instant};

use microscale::cpu::{self, Isa};
use microscale::{Element, QuantizeOptions, QuantizedShape, QuantizedTensor, Result};
use rayon::prelude::*;

use super::measurement::{Times, median};
use super::op::Op;
use super::product::matrix_bytes;
use super::workload::{Workload, random, require_equal, sets};

/// Duration of the repetitions of each measurement; at least [`FEWEST`] repetitions.
const TIME: Duration = Duration::from_millis(1500);
const FEWEST: usize = 7;

/// Returns the median times of the operation and of the copy.
pub(super) fn measure<T: Element>(workload: &Workload) -> Result<Times> {
    let shape = workload.shape;
    let values = random::<T>(shape.elements(), 1);
    let recipe = workload.recipe(&values)?;
    let mut tensor = QuantizedTensor::zeros(QuantizedShape::of(&recipe, shape))?;
    cpu::quantize_into(&values, shape, &recipe, QuantizeOptions::new(), &mut tensor)?;
    let mut back = vec![T::default(); if workload.op == Op::Dequantize { shape.elements() } else { 0 }];
    let source = vec![1u8; workload.bytes as usize / 2];
    let mut target = vec![2u8; source.len()];

    let mut amax = cpu::amax_with(Isa::Reference, &values, shape)?;
    let expected_amax = amax;
    let mut work = |_| match workload.op {
        Op::Dequantize => cpu::dequantize_into(&tensor, &mut back, shape.cols),
        Op::Amax => cpu::amax(&values, shape).map(|found| amax = found),
        _ => cpu::quantize_into(&values, shape, &recipe, QuantizeOptions::new(), &mut tensor).map(|_| ()),
    };
    let [operation, copy] = in_turns([&mut work, &mut |_| copy(&source, &mut target)])?;

    require_equal("amax", &[amax], &[expected_amax])?;
    let mut expected = QuantizedTensor::zeros(QuantizedShape::of(&recipe, shape))?;
    cpu::quantize_into(&values, shape, &recipe, QuantizeOptions::new().isa(Isa::Reference), &mut expected)?;
    require_equal("quantize", tensor.codes(), expected.codes())?;
    require_equal("quantize", tensor.scales(), expected.scales())?;
    if workload.op == Op::Dequantize {
        let mut expected = vec![T::default(); shape.elements()];
        cpu::dequantize_with(Isa::Reference, &tensor, &mut expected, shape.cols)?;
        require_equal("dequantize", bytemuck::cast_slice::<T, u8>(&back), bytemuck::cast_slice(&expected))?;
    }
    Ok(Times { operation, copy: Some(copy), ..Times::default() })
}

/// Returns the median times of an operation that moves `bytes` bytes, and of the copy.
pub(super) fn measure_against_copy(bytes: u64, mut operation: impl FnMut() -> Result<()>) -> Result<Times> {
    let source = vec![1u8; bytes as usize / 2];
    let mut target = vec![2u8; source.len()];
    let [operation, copy] = in_turns([&mut |_| operation(), &mut |_| copy(&source, &mut target)])?;
    Ok(Times { operation, copy: Some(copy), ..Times::default() })
}

/// A kind of work. Its argument is the number of the turn.
type Work<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

/// Returns the median times of several kinds of work, which take turns under equal conditions.
fn in_turns<const N: usize>(mut work: [Work<'_>; N]) -> Result<[f64; N]> {
    let mut times = [const { Vec::new() }; N];
    let begin = Instant::now();
    let mut turn = 0;
    while turn <= FEWEST || begin.elapsed() < N as u32 * TIME {
        for (work, times) in work.iter_mut().zip(&mut times) {
            let start = Instant::now();
            work(turn)?;
            times.push(start.elapsed().as_secs_f64());
        }
        turn += 1;
    }
    // The first turn of each kind was the warm-up.
    Ok(times.map(|mut times| median(times.split_off(1))))
}

/// Returns the median times of a product with a matrix that exceeds every cache: copies of it are
/// in rotation. The measurements of reading and of copying use the same matrices.
pub(super) fn measure_product(
    matrix: &QuantizedTensor,
    mut multiply: impl FnMut(&QuantizedTensor) -> Result<()>,
) -> Result<Times> {
    let bytes = matrix_bytes(matrix);
    let (half, sets) = (bytes / 2, sets(bytes as u64));
    let copies: Vec<_> = (1..sets).into_par_iter().map(|_| matrix.clone()).collect();
    let set = |turn: usize| copies.get(turn % sets).unwrap_or(matrix);
    let mut target = vec![2u8; sets * half];
    // The kinds are a third of a round apart, so that no kind finds its matrix in a cache.
    let [operation, read, copy] =
        in_turns([&mut |turn| multiply(set(turn)), &mut |turn| read(set(turn + sets / 3)), &mut |turn| {
            copy(&set(turn + 2 * sets / 3).codes()[..half], &mut target[turn % sets * half..][..half])
        }])?;
    Ok(Times { operation, read: Some(read), copy: Some(copy), ..Times::default() })
}

/// Reads codes and scales with all threads.
///
/// A task reads four places in turn, because processors prefetch less with one place. The addition
/// takes less than half of the time. Like [`copy`] it never fails.
fn read(matrix: &QuantizedTensor) -> Result<()> {
    let [codes, scales] = [matrix.codes(), matrix.scales()].map(|bytes| bytes.par_chunks(256 << 10));
    codes.chain(scales).for_each(|part| {
        let places: [_; 4] = std::array::from_fn(|i| &part[part.len() / 4 * i..][..part.len() / 4]);
        let places = places.map(|place| place.as_chunks::<128>().0);
        let mut sums = [0u64; 16];
        for i in 0..places[0].len() {
            for place in places {
                for (sum, word) in sums.iter_mut().zip(place[i].as_chunks().0) {
                    *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
                }
            }
        }
        std::hint::black_box(sums);
    });
    Ok(())
}

/// Copies with all threads. It never fails; [`Work`] requires a result.
fn copy(source: &[u8], target: &mut [u8]) -> Result<()> {
    let part = 1 << 20;
    target.par_chunks_mut(part).zip(source.par_chunks(part)).for_each(|(target, source)| {
        target.copy_from_slice(std::hint::black_box(source));
    });
    std::hint::black_box(target);
    Ok(())
}
