//! Instructions that a kernel must contain: the table to extend when a target gains a useful instruction.

use microscale_kernels_abi::{Kernel, Target};

/// Kernels of one kind must contain an instruction, on some targets.
pub(super) struct Requirement {
    /// The target has the instruction.
    target: fn(&Target) -> bool,
    /// The kernel has a use for it.
    kernel: fn(&Kernel) -> bool,
    /// What its PTX must contain.
    pub(super) ptx: &'static str,
    /// What its machine code must contain: the first is the instruction, the second a modifier.
    pub(super) sass: (&'static str, &'static str),
}

/// Every requirement.
pub(super) const REQUIREMENTS: [Requirement; 2] = [
    Requirement {
        target: |target| target.hardware_fp4,
        kernel: |kernel| kernel.converts_fp4 && kernel.name.contains("_quantize_"),
        ptx: "cvt.rn.satfinite.e2m1x2.f32",
        sass: ("F2FP", "E2M1"),
    },
    Requirement {
        target: |target| target.hardware_fp4,
        kernel: |kernel| kernel.converts_fp4 && kernel.name.contains("_dequantize_"),
        ptx: "cvt.rn.f16x2.e2m1x2",
        sass: ("F2FP", "E2M1"),
    },
];

/// The requirements on a kernel compiled for a target.
pub(super) fn requirements(target: &Target, kernel: &Kernel) -> impl Iterator<Item = &'static Requirement> {
    REQUIREMENTS.iter().filter(|requirement| (requirement.target)(target) && (requirement.kernel)(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_kernels_abi::{TARGETS, kernels};

    #[test]
    fn each_requirement_concerns_some_kernel_of_some_target() {
        for requirement in &REQUIREMENTS {
            assert!(TARGETS.iter().any(requirement.target), "{}", requirement.ptx);
            assert!(kernels().iter().any(requirement.kernel), "{}", requirement.ptx);
        }
    }

    #[test]
    fn each_converting_kernel_has_one_requirement() {
        for target in TARGETS.iter().filter(|target| target.hardware_fp4) {
            for kernel in kernels() {
                let expected = usize::from(kernel.converts_fp4);
                assert_eq!(requirements(target, kernel).count(), expected, "{}", kernel.name);
            }
        }
    }
}
