//! Runs PTX that Triton compiled, and compares products with the script's expectation.
//!
//! Neither the PTX nor the products come from this repository's Rust code, so layouts, selectors
//! and sums of `mma` and `tcgen05.mma` with block scales are checked independently.
//! `MICROSCALE_TRITON` is the folder that `scripts/independent/triton_products.py` wrote. Without
//! it, the test does nothing.

use std::path::{Path, PathBuf};

use microscale_executor::{Argument, Kernel, Launch, Memory, Module, Schedule};
use rayon::prelude::*;

/// The least number of cases per target and format: tiles times sets of operands.
const LEAST: usize = 8;

#[test]
#[ignore = "needs MICROSCALE_TRITON, the output of scripts/independent/triton_products.py: .ci/long does it"]
fn products_that_triton_compiled_have_the_expected_bits() {
    let Some(folder) = std::env::var_os("MICROSCALE_TRITON").map(PathBuf::from) else {
        println!("skipped: MICROSCALE_TRITON is not set");
        return;
    };
    let cases = std::fs::read_dir(folder.join("cases")).expect("the folder of the script");
    let cases: Vec<PathBuf> = cases.map(|case| case.expect("a case").path()).collect();
    for of in ["sm_120-mxfp4-", "sm_120-nvfp4-", "sm_100-mxfp4-", "sm_100-nvfp4-"] {
        let begins =
            |case: &&PathBuf| case.file_name().is_some_and(|name| name.to_string_lossy().starts_with(of));
        let count = cases.iter().filter(begins).count();
        assert!(count >= LEAST, "{count} cases of {of}");
    }
    cases.par_iter().for_each(|case| check(case));
}

/// Files of operands, in the order of the kernel's parameters.
const NAMES: [&str; 4] = ["a", "scales_a", "b", "scales_b"];

/// A product's operands: codes and scales of A, then of B.
type Operands = [Vec<u8>; 4];

/// Compares a case's product under several schedules. Changed operands must change it.
fn check(case: &Path) {
    let read = |file: &str| std::fs::read(case.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let text = String::from_utf8(read("kernel.ptx")).expect("text");
    // Swizzled matrices need the alignment of dynamic shared memory on GPUs, which Triton does not
    // declare.
    let text = text.replace(".extern .shared .align 16 ", ".extern .shared .align 1024 ");
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", case.display()));
    let launch = String::from_utf8(read("launch")).expect("text");
    let [kernel, numbers @ ..] = &launch.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{launch}")
    };
    let numbers: Vec<u32> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
    let [blocks, threads, shared, inner] = numbers[..] else { panic!("{launch}") };
    let kernel = module.kernel(kernel).unwrap_or_else(|error| panic!("{}: {error}", case.display()));
    let opcodes = kernel.instructions();
    let tensor = case.file_name().is_some_and(|name| name.to_string_lossy().starts_with("sm_100"));
    let product = if tensor { "tcgen05.mma." } else { "mma.sync." };
    let scaled = |opcode: &&str| opcode.starts_with(product) && opcode.contains(".block_scale.");
    assert!(opcodes.iter().any(scaled), "{opcodes:?}");
    // Triton omits the fences of `tcgen05`.
    let launch = Launch::new(blocks, threads).shared(shared).tensor_fences(false);
    let operands: Operands = NAMES.map(read);
    let expected = read("product");
    for schedule in [Schedule::LowestFirst, Schedule::HighestFirst, Schedule::Random(1)] {
        let launch = launch.clone().schedule(schedule);
        let found = run(kernel, &launch, &operands, expected.len(), inner);
        let different = found.as_chunks::<4>().0.iter().zip(expected.as_chunks().0).position(|(a, b)| a != b);
        assert_eq!(different, None, "{}, {schedule:?}: the first element that differs", case.display());
    }
    // A wide range of scales hides single codes.
    if case.to_string_lossy().ends_with("-exact") {
        for operand in 0..4 {
            let mut operands = operands.clone();
            operands[operand][0] ^= 2;
            let found = run(kernel, &launch, &operands, expected.len(), inner);
            assert!(found != expected, "{}: operand {operand} has no effect", case.display());
        }
    }
}

/// Returns the bytes of a product.
fn run(kernel: &Kernel, launch: &Launch, operands: &Operands, bytes: usize, inner: u32) -> Vec<u8> {
    let mut memory = Memory::new();
    let buffers = NAMES.into_iter().zip(operands).map(|(name, bytes)| memory.allocate_from(name, bytes));
    let mut arguments: Vec<Argument> = buffers.map(Into::into).collect();
    let product = memory.allocate("product", bytes);
    // Triton adds two pointers to scratch memory, which this kernel does not use.
    arguments.extend([product.into(), inner.into(), 0u64.into(), 0u64.into()]);
    kernel.run(&mut memory, launch, &arguments).unwrap_or_else(|fault| panic!("{fault}"));
    memory.bytes(product).expect("a whole product")
}
