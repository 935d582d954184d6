//! Cases of dequantization, amax, error sums, and scale layouts.

use std::mem::offset_of;

use microscale::{
    Element, Format, QuantizedShape, QuantizedTensor, ScaleLayout, Shape, Words, dequantize_into,
};
use microscale_formats::errors::{ERROR_LANES, ERROR_PART, ErrorSums};
use microscale_formats::mx;
use microscale_kernels_abi::{Divider, GlobalSlot, ScaleGrid};

use super::case::{Prepared, argument};
use super::quantizing::{Access, amax_words, grid, scale_grid, word};

/// Fills the gaps between rows before dequantization, which must not change them.
const GAP: u8 = 0xEE;

/// Dequantizes a tensor to rows with a stride.
pub(crate) fn dequantizing<T: Element>(
    tensor: &QuantizedTensor,
    row_stride: usize,
    access: Access,
) -> Prepared {
    let mut case = Prepared::new();
    let shape = Shape::new(tensor.rows(), tensor.cols()).with_row_stride(row_stride);
    let span = shape.span().unwrap();
    let codes = case.memory.allocate_from("codes", tensor.codes());
    let scales = case.memory.allocate_from("scales", tensor.scales());
    let bytes = span * size_of::<T>();
    let alignment = if access == Access::Unaligned { size_of::<T>() as u64 } else { 256 };
    let out = case.memory.allocate_aligned("values", bytes, alignment);
    let mut expected = vec![T::default(); span];
    bytemuck::cast_slice_mut::<T, u8>(&mut expected).fill(GAP);
    dequantize_into(tensor, &mut expected, row_stride).unwrap();
    let expected: Vec<u8> = bytemuck::cast_slice(&expected).to_vec();
    case.checks.push(Box::new(move |memory| {
        let found = memory.bytes_or(out, GAP);
        match found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            None => Ok(()),
            Some(i) => Err(format!("values: byte {i} is {:#04x} instead of {:#04x}", found[i], expected[i])),
        }
    }));
    let by_blocks = grid(shape, tensor.format().block(), true);
    let places = argument(&scale_grid(tensor.shape()));
    let mut arguments = vec![codes.into(), scales.into()];
    let global = (tensor.format() == Format::Nvfp4).then(|| case.global_scale(tensor));
    let (slot, apply) = global.unzip();
    arguments.extend(slot);
    arguments.extend([out.into(), argument(&by_blocks), places]);
    arguments.extend(apply);
    let name = dequantizer::<T>(tensor.format(), access);
    case.step(name, by_blocks.blocks * tensor.format().block() as u64, arguments);
    case
}

/// Returns the kernel that dequantizes.
pub(crate) fn dequantizer<T: Element>(format: Format, access: Access) -> String {
    format!("{}_dequantize_{}_{}", word(format), T::DTYPE.word(), access.word())
}

/// Returns the kernel that computes amax.
pub(crate) fn amax_kernel<T: Element>(access: Access) -> String {
    format!("amax_{}_{}", T::DTYPE.word(), access.word())
}

/// Computes amax.
pub(crate) fn amax<T: Element>(values: &[T], shape: Shape, access: Access) -> Prepared {
    let mut case = Prepared::new();
    let given = case.values(&values[..shape.span().unwrap()], access == Access::Unaligned);
    let slot = case.memory.allocate_from("global", &[0; size_of::<GlobalSlot>()]);
    let by_blocks = grid(shape, mx::BLOCK, true);
    let expected = amax_words(values, shape);
    case.checks.push(Box::new(move |memory| {
        let bytes = memory.bytes(slot).map_err(|error| error.to_string())?;
        let offsets = [
            offset_of!(GlobalSlot, amax_bits),
            offset_of!(GlobalSlot, nan),
            offset_of!(GlobalSlot, infinite),
        ];
        let found = offsets.map(|offset| u32::from_le_bytes(*bytes[offset..].first_chunk().unwrap()));
        if found == expected { Ok(()) } else { Err(format!("amax: {found:x?} instead of {expected:x?}")) }
    }));
    let arguments = vec![given, slot.into(), argument(&by_blocks)];
    case.step(amax_kernel::<T>(access), by_blocks.blocks * mx::BLOCK as u64, arguments);
    case
}

/// Computes the error sums of a matrix and its dequantized approximation.
pub(crate) fn errors<T: Element>(values: &[T], shape: Shape, back: &[f32]) -> Prepared {
    let mut case = Prepared::new();
    let Shape { rows, cols, row_stride } = shape;
    let by_parts = grid(shape, ERROR_PART as usize, false);
    let given = case.values(&values[..shape.span().unwrap()], true);
    let there = case.values(back, false);
    let expected: Vec<ErrorSums> = (0..rows)
        .flat_map(|row| {
            let pairs = values[row * row_stride..][..cols].iter().zip(&back[row * cols..][..cols]);
            let pairs: Vec<_> = pairs.map(|(a, b)| (a.to_f32(), *b)).collect();
            pairs.chunks(ERROR_PART as usize).map(sums).collect::<Vec<_>>()
        })
        .collect();
    let out = case.memory.allocate("sums", expected.len() * size_of::<ErrorSums>());
    let words = expected.iter().flat_map(|sums| {
        let ErrorSums { signal, noise, approximation, product, max_abs, non_finite } = *sums;
        let floats = [signal, noise, approximation, product, max_abs];
        floats.map(f64::to_bits).into_iter().chain([non_finite])
    });
    case.expect("sums", out, words.flat_map(u64::to_le_bytes).collect());
    let arguments = vec![given, there, out.into(), argument(&by_parts)];
    let elements = by_parts.blocks * u64::from(ERROR_PART);
    case.step(format!("errors_{}", T::DTYPE.word()), elements, arguments);
    case
}

/// Returns the sums of a part of a row, lane by lane.
fn sums(pairs: &[(f32, f32)]) -> ErrorSums {
    let mut total = ErrorSums::default();
    for lane in 0..ERROR_LANES as usize {
        let mut sums = ErrorSums::default();
        for (a, b) in pairs.iter().skip(lane).step_by(ERROR_LANES as usize) {
            if a.is_finite() && b.is_finite() {
                let (a, b) = (f64::from(*a), f64::from(*b));
                sums.signal += a * a;
                sums.noise += (a - b) * (a - b);
                sums.approximation += b * b;
                sums.product += a * b;
                sums.max_abs = sums.max_abs.max((a - b).abs());
            } else {
                sums.non_finite += 1;
            }
        }
        total.signal += sums.signal;
        total.noise += sums.noise;
        total.approximation += sums.approximation;
        total.product += sums.product;
        total.max_abs = total.max_abs.max(sums.max_abs);
        total.non_finite += sums.non_finite;
    }
    total
}

/// Converts scales to layout `to`. `seed` determines the bytes.
pub(crate) fn converting(rows: usize, blocks: usize, to: ScaleLayout, seed: u64) -> Prepared {
    let mut case = Prepared::new();
    let shape = QuantizedShape::new(Format::Mxfp4, rows, blocks * 32);
    let mut rng = fastrand::Rng::with_seed(seed);
    let linear: Vec<u8> = (0..rows * blocks).map(|_| rng.u8(1..)).collect();
    let linear = QuantizedTensor::from_parts(shape, vec![0; rows * blocks * 16], linear).unwrap();
    let swizzled = linear.convert_layout(ScaleLayout::Swizzled);
    let (name, from, into) = match to {
        ScaleLayout::Swizzled => ("scales_to_swizzled", &linear, &swizzled),
        ScaleLayout::Linear => ("scales_to_linear", &swizzled, &linear),
    };
    let source = case.memory.allocate_from("source", from.scales());
    let target = case.memory.allocate("target", into.scales().len());
    let places = ScaleGrid::swizzled(blocks as u64);
    let arguments = vec![
        source.into(),
        target.into(),
        (rows as u64).into(),
        argument(&places),
        argument(&Divider::new(places.tiles_per_row)),
    ];
    case.step(name, swizzled.scales().len() as u64, arguments);
    case.expect("scales", target, into.scales().to_vec());
    case
}
