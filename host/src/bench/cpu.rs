//! Measuring on the CPU, against memcpy with the same threads.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::{Job, Op, Times, median, random, require_equal};
use crate::cpu::{self, Isa};
use crate::element::Element;
use crate::error::Result;
use crate::tensor::{QuantizedShape, QuantizedTensor};

/// Each is repeated this long, and at least [`FEWEST`] times.
const TIME: Duration = Duration::from_millis(1500);
const FEWEST: usize = 7;

/// The median times of the operation and of the copy.
pub(super) fn measure<T: Element>(job: &Job) -> Result<Times> {
    let shape = job.shape;
    let values = random::<T>(shape.elements(), 1);
    let recipe = job.recipe(&values)?;
    let mut tensor = QuantizedTensor::zeros(QuantizedShape::of(&recipe, shape))?;
    cpu::quantize_into(&values, shape, &recipe, &mut tensor)?;
    let mut back = vec![T::default(); if job.op == Op::Dequantize { shape.elements() } else { 0 }];
    let source = vec![1u8; job.bytes as usize / 2];
    let mut target = vec![2u8; source.len()];

    let mut amax = cpu::amax_with(Isa::Reference, &values, shape)?;
    let expected_amax = amax;
    let mut work = |_| match job.op {
        Op::Dequantize => cpu::dequantize_into(&tensor, &mut back, shape.cols),
        Op::Amax => cpu::amax(&values, shape).map(|found| amax = found),
        _ => cpu::quantize_into(&values, shape, &recipe, &mut tensor).map(|_| ()),
    };
    let [operation, copy] = in_turns([&mut work, &mut |_| copy(&source, &mut target)])?;

    require_equal("amax", &[amax], &[expected_amax])?;
    let mut expected = QuantizedTensor::zeros(QuantizedShape::of(&recipe, shape))?;
    cpu::quantize_with(Isa::Reference, &values, shape, &recipe, &mut expected)?;
    require_equal("quantize", tensor.codes(), expected.codes())?;
    require_equal("quantize", tensor.scales(), expected.scales())?;
    if job.op == Op::Dequantize {
        let mut expected = vec![T::default(); shape.elements()];
        cpu::dequantize_with(Isa::Reference, &tensor, &mut expected, shape.cols)?;
        require_equal("dequantize", bytemuck::cast_slice::<T, u8>(&back), bytemuck::cast_slice(&expected))?;
    }
    Ok(Times { operation, copy: Some(copy) })
}

/// A kind of work, given the number of its turn.
pub(super) type Work<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

/// The median times of some kinds of work, which take turns so that all see the same machine.
pub(super) fn in_turns<const N: usize>(mut work: [Work<'_>; N]) -> Result<[f64; N]> {
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
    // The first of each warmed up.
    Ok(times.map(|mut times| median(times.split_off(1))))
}

/// memcpy by all threads. It cannot fail: an error is what [`Work`] has.
pub(super) fn copy(source: &[u8], target: &mut [u8]) -> Result<()> {
    let part = 1 << 20;
    target.par_chunks_mut(part).zip(source.par_chunks(part)).for_each(|(target, source)| {
        target.copy_from_slice(std::hint::black_box(source));
    });
    std::hint::black_box(target);
    Ok(())
}
