//! Measurements of products of quantized matrices and quantized vectors, on a CPU or a GPU.

use microscale::{Device, Element, Recipe, Result, cpu};

use super::cpu::measure_product;
use super::measurement::Times;
use super::op::Op;
use super::product::{Product, verify};
use super::size::Size;

/// Returns the bytes of the matrices, and times.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only GPUs have several kernels"))]
pub(super) fn measure<T: Element>(
    op: Op,
    recipe: &Recipe,
    size: Size,
    device: &Device,
) -> Result<(u64, Times)> {
    let product = Product::new(recipe, size)?;
    let times = match device {
        Device::Cpu => on_cpu::<T>(&product)?,
        #[cfg(feature = "cuda")]
        Device::Gpus(gpus) => super::gpu::measure_product::<T>(op, &product, gpus.first())?,
    };
    Ok((product.bytes, times))
}

fn on_cpu<T: Element>(product: &Product) -> Result<Times> {
    let mut out = product.results::<T>();
    let times = measure_product(&product.matrix, |matrix| {
        cpu::gemv(matrix, &product.vectors, product.batch, &mut out)
    })?;
    verify("gemv", &out, &product.expected()?)?;
    Ok(times)
}
