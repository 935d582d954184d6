//! NVFP4 scales with the sign bit set. The library refuses them on the host, but cannot see them in
//! a GPU's memory.

use std::collections::BTreeSet;

use microscale_executor::{Launch, Memory};
use microscale_formats::{E2m1, E4m3};
use microscale_kernels_abi::TARGETS;
use rayon::prelude::*;

use super::cases::{Case, cases};
use super::everything::{modules, own_kernels};

/// Bytes of a block's codes.
const BLOCK: usize = 8;

/// Negates the scale of every other block, and its codes. The values stay the same if the sign bit
/// of a scale means a negative scale.
fn negate(memory: &mut Memory) {
    let [codes, scales] = ["codes", "scales"].map(|name| memory.named(name).expect("an operand"));
    let [mut code_bytes, mut scale_bytes] = [codes, scales].map(|buffer| memory.bytes_or(buffer, 0));
    assert_eq!(code_bytes.len(), scale_bytes.len() * BLOCK, "linear scales");
    for (scale, codes) in scale_bytes.iter_mut().zip(code_bytes.chunks_mut(BLOCK)).step_by(2) {
        *scale ^= 0x80;
        codes.iter_mut().for_each(|code| *code ^= 0x88);
    }
    memory.write(codes, 0, &code_bytes);
    memory.write(scales, 0, &scale_bytes);
}

/// Returns whether scales have signs in a kernel.
///
/// Products with FP8 activations do not define them, and FP4 tensor cores read scales without sign.
fn reads_signs(case: &Case) -> bool {
    let kernel = &case.kernel;
    let other = ["_fp8", "_tcgen05_", "_blockscale_"].iter().any(|mainloop| kernel.contains(mainloop));
    kernel.starts_with("nvfp4_gemv_") || kernel.starts_with("nvfp4_gemm_") && !other
}

#[test]
fn scales_with_the_sign_bit_are_negative_on_every_target() {
    assert_eq!(E4m3::from_bits(0xB8).to_f32() * E2m1::from_bits(0xA).to_f32(), 1.0);
    let cases = cases();
    for (target, module) in modules() {
        let own = own_kernels(target);
        let described = TARGETS.iter().find(|of| of.name == *target).expect("a target");
        let runs = |case: &&Case| own.contains(&case.kernel) && reads_signs(case) && case.runs_on(described);
        let mut seen = BTreeSet::new();
        // One case per kernel.
        let some: Vec<_> = cases.iter().filter(runs).filter(|case| seen.insert(&case.kernel)).collect();
        assert!(!some.is_empty() || described.hardware_fp4, "{target}: no case");
        some.par_iter().for_each(|case| {
            let mut prepared = (case.make)();
            negate(&mut prepared.memory);
            if let Err(wrong) = prepared.run(&[module], &Launch::default()) {
                panic!("{target}, {}: {wrong}\n  {}", case.kernel, case.what);
            }
        });
    }
}
