//! Products of quantized operands.

use microscale::{Batch, Dtype, Element, Format, GlobalScale, QuantizedTensor, gemv};
use microscale_executor::{Argument, Memory};
use microscale_formats::nvfp4::Direction;
use microscale_kernels_abi::{ApplyGlobal, Divider, GemvGrid, GlobalSlot, OutputDtype};

use super::case::{Prepared, argument, kernel};
use super::quantizing::word;

/// The name of a kernel.
pub(crate) fn product_kernel(format: Format, variant: &str) -> String {
    format!("{}_gemv_{variant}", word(format))
}

/// Matrices times vectors.
pub(crate) fn multiplying<T: Element>(
    variant: &str,
    matrix: &QuantizedTensor,
    vectors: &QuantizedTensor,
    batch: Batch,
) -> Prepared {
    let mut case = Prepared::new();
    let mut expected = vec![T::default(); matrix.rows()];
    gemv(matrix, vectors, batch, &mut expected).expect("operands that fit");
    let out = case.memory.allocate("out", size_of_val(&expected[..]));
    let name = product_kernel(matrix.format(), variant);
    let rows_a_warp = kernel(&name).elements_per_warp();
    let rows = matrix.rows() / batch.count;
    let groups = rows.div_ceil(rows_a_warp as usize) as u64;
    let grid = GemvGrid {
        rows: rows as u64,
        batches: batch.count as u64,
        blocks: matrix.shape().blocks_per_row() as u64,
        vector_stride: batch.vector_stride as u64,
        groups: Divider::new(groups),
    };
    let [(mut arguments, apply), (of_vectors, vector_apply)] =
        [matrix, vectors].map(|tensor| operand(&mut case.memory, tensor));
    let dtype = match T::DTYPE {
        Dtype::F32 => OutputDtype::F32,
        Dtype::F16 => OutputDtype::F16,
        Dtype::Bf16 => OutputDtype::Bf16,
    };
    arguments.extend(of_vectors);
    arguments.extend([out.into(), argument(&grid), apply, vector_apply, (dtype as u32).into()]);
    let covered = groups * batch.count as u64 * u64::from(rows_a_warp);
    case.step(name, covered, arguments);
    case.expect("results", out, bytemuck::cast_slice(&expected).to_vec());
    case
}

/// The buffers of an operand, and what becomes of its global scale.
fn operand(memory: &mut Memory, tensor: &QuantizedTensor) -> (Vec<Argument>, Argument) {
    let mut slot = vec![0; size_of::<GlobalSlot>()];
    let scale = tensor.global_scale().map_or(0.0, GlobalScale::value);
    slot[..size_of::<f32>()].copy_from_slice(&scale.to_le_bytes());
    let buffers = [("codes", tensor.codes()), ("scales", tensor.scales()), ("global", &slot)];
    let apply = match tensor.global_scale().map(GlobalScale::direction) {
        Some(Direction::Divisor) => ApplyGlobal::Divisor,
        Some(Direction::Multiplier) => ApplyGlobal::Multiplier,
        None => ApplyGlobal::Absent,
    };
    let buffers = buffers.map(|(what, bytes)| memory.allocate_from(what, bytes).into());
    (buffers.into(), (apply as u32).into())
}

const _: () = assert!(std::mem::offset_of!(GlobalSlot, scale) == 0);
