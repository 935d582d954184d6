//! Quantizes a matrix with microscale's PTX, loaded and launched by `cust`, and compares with the
//! CPU's bytes.
//!
//! The library itself launches through cudarc, but the PTX does not depend on it. A launch needs the
//! names, launch shapes and argument structures of `microscale_kernels_abi`, and the kernels'
//! contracts (kernels-gpu/src/quantize.rs).

use std::error::Error;
use std::mem::offset_of;

use cust::memory::DeviceCopy;
use cust::prelude::*;
use half::bf16;
use microscale::formats::E2m1;
use microscale::formats::mx::Arithmetic;
use microscale::{NonFinite, Recipe, Scheme, Shape, quantize};
use microscale_kernels_abi::{BlockGrid, MxOptions, REPORT_SLOTS, ReportSlot, ScaleGrid, kernels};

/// For compute capability 9.0 and newer; `cargo xtask build-ptx` writes it.
const PTX: &str = include_str!("../../host/ptx/quantize.sm_90.ptx");
const KERNEL: &str = "mxfp4_quantize_bf16_even_aligned";
const BLOCK: usize = 32;

/// A structure of `microscale_kernels_abi`, passed by value.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Argument<T: Copy>(T);

// SAFETY: integers in a `repr(C)` structure; no pointers.
unsafe impl DeviceCopy for Argument<BlockGrid> {}
// SAFETY: as above.
unsafe impl DeviceCopy for Argument<ScaleGrid> {}
// SAFETY: as above.
unsafe impl DeviceCopy for Argument<MxOptions> {}

fn main() -> Result<(), Box<dyn Error>> {
    let _context = cust::quick_init()?;
    println!("{}", Device::get_device(0)?.name()?);
    let module = Module::from_ptx(PTX, &[])?;
    let function = module.get_function(KERNEL)?;
    // A stream of this kind waits for what cust does on the default stream: filling the buffers below.
    let stream = Stream::new(StreamFlags::DEFAULT, None)?;

    // Rows are multiples of 32 elements, so they follow each other without gaps and padding, and each
    // starts on 16 bytes. The `aligned` kernels require both.
    let (rows, cols) = (4096usize, 4096usize);
    let values: Vec<bf16> = (0..rows * cols).map(|i| bf16::from_f32((i as f32 * 0.37).sin())).collect();
    let bits: Vec<u16> = values.iter().map(|value| value.to_bits()).collect();

    let blocks = rows * cols / BLOCK;
    let input = DeviceBuffer::from_slice(&bits)?;
    let codes = DeviceBuffer::<u8>::zeroed(blocks * BLOCK / 2)?;
    let scales = DeviceBuffer::<u8>::zeroed(blocks)?;
    // Zeroed memory is the empty report.
    let fields = size_of::<ReportSlot>() / size_of::<u64>();
    let report = DeviceBuffer::<u64>::zeroed(REPORT_SLOTS * fields)?;

    let arithmetic = Arithmetic::default();
    let scheme = Scheme::Mxfp4(arithmetic);
    let recipe = Recipe { scheme, non_finite: NonFinite::Propagate, ..Recipe::default() };
    let grid = BlockGrid::new(rows as u64, cols as u64, cols as u64, BLOCK as u64);
    // Device memory starts on 256 bytes, and so does every row.
    let grid = Argument(grid.ok_or("an empty matrix")?);
    let scale_grid = Argument(ScaleGrid::linear((cols / BLOCK) as u64));
    let options = Argument(MxOptions {
        mantissa_addend: arithmetic.scale_rule.mantissa_addend::<E2m1>(),
        ties: arithmetic.ties as u32,
        negative_zero: arithmetic.negative_zero as u32,
        saturate_non_finite: 0,
    });
    let kernel = kernels().find(|kernel| kernel.name == KERNEL).ok_or("no such kernel")?;
    let thread_blocks = ((rows * cols) as u32).div_ceil(kernel.elements);

    // SAFETY: the arguments are the kernel's, in order; `grid` describes the matrix at `input`, which starts on 16 bytes as
    // do its rows; codes, scales and report have the room that the kernel's contract asks for, and none overlap.
    unsafe {
        launch!(function<<<thread_blocks, kernel.threads, 0, stream>>>(
            input.as_device_ptr(),
            codes.as_device_ptr(),
            scales.as_device_ptr(),
            report.as_device_ptr(),
            grid,
            scale_grid,
            options
        ))?;
    }
    stream.synchronize()?;

    let expected = quantize(&values, Shape::new(rows, cols), &recipe)?.tensor;
    let same = codes.as_host_vec()? == expected.codes() && scales.as_host_vec()? == expected.scales();
    let field = offset_of!(ReportSlot, clipped) / size_of::<u64>();
    let clipped: u64 = report.as_host_vec()?.chunks(fields).map(|slot| slot[field]).sum();
    println!("{blocks} blocks quantized, {clipped} of them clipped");
    println!("the CPU gives {}", if same { "the same bytes" } else { "OTHER BYTES" });
    if same { Ok(()) } else { Err("GPU and CPU differ".into()) }
}
