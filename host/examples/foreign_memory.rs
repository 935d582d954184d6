//! Quantizes and multiplies on a GPU in another library's memory and on its stream, without copies.
//!
//! The CUDA driver stands in for that library and provides plain addresses, as PyTorch does for its
//! extensions. Without a GPU the example prints why there is none.
//!
//! ```text
//! cargo run --release --example foreign_memory
//! ```

use std::error::Error;

use half::bf16;
use microscale::gpu::cudarc::driver::result::stream::StreamKind;
use microscale::gpu::cudarc::driver::{DriverError, result, sys};
use microscale::gpu::{
    DeviceQuantizeOptions, DeviceTensorViewMut, DeviceView, DeviceViewMut, GemmWorkspaceMut, Gpu, devices,
    primary_context,
};
use microscale::{Dtype, Format, NonFinite, Numerics, QuantizedShape, Recipe, Shape, gemv_weights, quantize};

const ROWS: usize = 1024;
const COLS: usize = 2048;
const TOKENS: usize = 32;

/// The other library. Like PyTorch it uses the GPU's primary context and plain addresses.
struct Framework {
    stream: sys::CUstream,
    allocated: Vec<u64>,
}

impl Framework {
    /// Creates a stream. The caller must have made the context current.
    fn new() -> Result<Self, DriverError> {
        Ok(Self { stream: result::stream::create(StreamKind::NonBlocking)?, allocated: Vec::new() })
    }

    /// Allocates zeroed device memory.
    fn zeros(&mut self, bytes: usize) -> Result<u64, DriverError> {
        // SAFETY: `malloc_sync` allocates `bytes` bytes in the current context, which live until
        // `drop` frees them.
        let address = unsafe { result::malloc_sync(bytes)? };
        self.allocated.push(address);
        // SAFETY: `address` is the start of the `bytes` bytes allocated above. Nothing else uses
        // them yet.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream)? };
        Ok(address)
    }

    /// Copies values to device memory.
    fn upload(&mut self, values: &[bf16]) -> Result<u64, DriverError> {
        let address = self.zeros(size_of_val(values))?;
        // SAFETY: the allocation at `address` has the size of `values` in bytes. The stream is
        // synchronized before this function returns, so `values` outlives the copy.
        unsafe {
            result::memcpy_htod_async(address, values, self.stream)?;
            result::stream::synchronize(self.stream)?;
        }
        Ok(address)
    }

    /// Waits for the stream and reads values.
    fn download(&self, address: u64, values: &mut [bf16]) -> Result<(), DriverError> {
        // SAFETY: the caller passes an address with at least `values.len()` elements. The stream is
        // synchronized before `values` is read.
        unsafe {
            result::memcpy_dtoh_async(values, address, self.stream)?;
            result::stream::synchronize(self.stream)
        }
    }
}

impl Drop for Framework {
    fn drop(&mut self) {
        // SAFETY: this structure allocated the addresses and created the stream, and no view of
        // them is left.
        unsafe {
            for address in &self.allocated {
                let _ = result::free_sync(*address);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Err(microscale::Error::NoGpu(why)) = devices() {
        println!("no GPU: {why}");
        return Ok(());
    }
    let context = primary_context(0)?;
    let mut framework = Framework::new()?;

    // The other library has weights, activations, and memory for results. An NVFP4 tensor needs a
    // slot for its global scale.
    let recipe = Recipe {
        non_finite: NonFinite::Propagate,
        ..Recipe::of(Format::Nvfp4, Numerics::CompressedTensors)?
    };
    let (shape, quantized) = (Shape::new(ROWS, COLS), QuantizedShape::new(Format::Nvfp4, ROWS, COLS));
    let (host_weights, host_x) = (waves(ROWS * COLS, 0.02), waves(TOKENS * COLS, 1.0));
    let (weights, x) = (framework.upload(&host_weights)?, framework.upload(&host_x)?);
    let (code_bytes, scale_bytes) = quantized.bytes()?;
    let (codes, scales) = (framework.zeros(code_bytes)?, framework.zeros(scale_bytes)?);
    let slot = framework.zeros(4 * DeviceTensorViewMut::GLOBAL_SLOT_WORDS)?;
    let out = framework.zeros(2 * TOKENS * ROWS)?;

    // The library works on the other library's stream and owns neither the stream nor any memory.
    // SAFETY: the stream belongs to GPU 0's primary context, which `context` is, and outlives
    // `gpu`.
    let gpu = Gpu::from_stream(unsafe { context.wrap_borrowed_stream(framework.stream) })?;
    let stream = gpu.stream();
    let workspace_bytes = gpu.gemm_workspace_bytes(quantized, TOKENS, Dtype::Bf16)?;
    let workspace = framework.zeros(workspace_bytes)?;

    // SAFETY: each address is the start of an allocation with this number of elements, and the
    // allocations do not overlap. They live until the end of `main`, and all work uses one stream.
    // The workspace, including its semaphores, was zeroed.
    let (weights, x, out_there, mut tensor, workspace) = unsafe {
        (
            DeviceView::<bf16>::from_raw_parts(weights, ROWS * COLS),
            DeviceView::<bf16>::from_raw_parts(x, TOKENS * COLS),
            DeviceViewMut::<bf16>::from_raw_parts(out, TOKENS * ROWS),
            DeviceTensorViewMut::from_raw_parts(quantized, codes, scales)?.with_global_slot(
                DeviceViewMut::from_raw_parts(slot, DeviceTensorViewMut::GLOBAL_SLOT_WORDS),
            )?,
            GemmWorkspaceMut::from_raw_parts(workspace, workspace_bytes)?,
        )
    };

    // Both calls enqueue kernels and return. Nothing is allocated or copied, and nothing waits.
    gpu.quantize_on(stream, weights, shape, &recipe, DeviceQuantizeOptions::new(), &mut tensor)?;
    gpu.linear(tensor.as_view()).plan(TOKENS)?.run(stream, x, workspace, out_there)?;

    let mut results = vec![bf16::ZERO; TOKENS * ROWS];
    framework.download(out, &mut results)?;
    let on_cpu = quantize(&host_weights, shape, &recipe)?.tensor;
    let same = tensor.as_view().to_host(stream)? == on_cpu;
    println!(
        "the CPU quantizes to {}",
        if same { "the same bytes" } else { "OTHER BYTES: please report this" }
    );
    let mut expected = vec![bf16::ZERO; TOKENS * ROWS];
    gemv_weights(&on_cpu, &host_x, TOKENS, &mut expected)?;
    let distances = results.iter().zip(&expected).map(|(a, b)| (a.to_f32() - b.to_f32()).abs());
    let largest = expected.iter().map(|value| value.to_f32().abs()).fold(0.0, f32::max);
    println!(
        "results are up to {largest:.3}, and at most {:.5} from the CPU's",
        distances.fold(0.0, f32::max)
    );
    Ok(())
}

/// Returns values that stand for weights or activations.
fn waves(count: usize, size: f32) -> Vec<bf16> {
    let value = |i: usize| (i as f32 * 0.37).sin() + (i as f32 * 0.71).sin() + (i as f32 * 1.3).sin();
    (0..count).map(|i| bf16::from_f32(size * value(i))).collect()
}
