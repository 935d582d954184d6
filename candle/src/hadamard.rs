//! Block Hadamard transforms of activations.

use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor, bail};
use microscale::formats::activations::hadamard_factor;
use microscale::{Element, HadamardWidth, hadamard_rows};

use crate::matrix::part;

/// Multiplies each block of `width` elements of the last dimension by the Hadamard matrix.
///
/// The result has the dtype of `x`: f32, f16 or bf16. It is computed in f32 and rounded once. On a
/// CPU the arithmetic is [`microscale::formats::hadamard`]'s. On other devices it is a product with
/// the matrix.
///
/// # Errors
/// If the width does not divide the last dimension, and for other dtypes.
pub fn hadamard(x: &Tensor, width: HadamardWidth) -> Result<Tensor> {
    let columns = x.dims().last().copied().unwrap_or(0);
    let size = width.columns();
    if !columns.is_multiple_of(size) {
        bail!("a Hadamard transform of {size} columns does not fit an input of shape {:?}", x.dims());
    }
    if x.device().is_cpu() {
        return x.contiguous()?.apply_op1_no_bwd(&Transform(width));
    }
    let factor = hadamard_factor(size);
    let entry = |row, column| if HadamardWidth::is_negative(row, column) { -factor } else { factor };
    let matrix: Vec<f32> =
        (0..size).flat_map(|row| (0..size).map(move |column| entry(row, column))).collect();
    let matrix = Tensor::from_vec(matrix, (size, size), x.device())?;
    let blocks = x.to_dtype(DType::F32)?.reshape(((), size))?;
    blocks.matmul(&matrix)?.reshape(x.shape())?.to_dtype(x.dtype())
}

struct Transform(HadamardWidth);

impl CustomOp1 for Transform {
    fn name(&self) -> &'static str {
        "microscale-hadamard"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let transformed = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.of(part(x, layout)?)),
            CpuStorage::F16(x) => CpuStorage::F16(self.of(part(x, layout)?)),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.of(part(x, layout)?)),
            _ => return Err(Error::msg("an input is f32, f16 or bf16 here; convert it")),
        };
        Ok((transformed, layout.shape().clone()))
    }
}

impl Transform {
    fn of<T: Element>(&self, values: &[T]) -> Vec<T> {
        let mut wide: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        hadamard_rows(&mut wide, self.0);
        wide.into_iter().map(T::from_f32).collect()
    }
}
