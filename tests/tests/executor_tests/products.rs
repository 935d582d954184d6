//! Cases of products of quantized operands.

use microscale::{Batch, Element, Format, QuantizedTensor, gemv};
use microscale_executor::Argument;
use microscale_kernels_abi::Divider;
use microscale_kernels_abi::gemv::GemvGrid;

use super::case::{Prepared, argument, kernel};
use super::quantizing::word;

/// Returns the name of a kernel.
pub(crate) fn product_kernel(format: Format, variant: &str) -> String {
    format!("{}_gemv_{variant}", word(format))
}

/// Multiplies matrices by vectors.
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
        [matrix, vectors].map(|tensor| operand(&mut case, tensor));
    arguments.extend(of_vectors);
    arguments.extend([out.into(), argument(&grid), apply, vector_apply, (T::DTYPE as u32).into()]);
    let covered = groups * batch.count as u64 * u64::from(rows_a_warp);
    case.step(name, covered, arguments);
    case.expect("results", out, bytemuck::cast_slice(&expected).to_vec());
    case
}

/// Returns the buffers of an operand, and how its global scale is applied.
fn operand(case: &mut Prepared, tensor: &QuantizedTensor) -> (Vec<Argument>, Argument) {
    let codes = case.memory.allocate_from("codes", tensor.codes());
    let scales = case.memory.allocate_from("scales", tensor.scales());
    let (slot, apply) = case.global_scale(tensor);
    (vec![codes.into(), scales.into(), slot], apply)
}
