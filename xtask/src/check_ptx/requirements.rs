//! Instructions that kernels must contain. Extend the table when a target gains a useful
//! instruction.

use microscale_kernels_abi::{Converts, Kernel, Target};

/// An instruction that some kernels must contain on some targets.
pub(super) struct Requirement {
    /// Returns whether the target has the instruction.
    target: fn(&Target) -> bool,
    /// Returns whether the kernel needs it.
    kernel: fn(&Kernel) -> bool,
    /// Text that the kernel's PTX must contain.
    pub(super) ptx: &'static str,
    /// Instruction that its machine code must contain: name and modifier, empty for any.
    pub(super) sass: (&'static str, &'static str),
}

/// Every requirement.
pub(super) const REQUIREMENTS: [Requirement; 14] = [
    Requirement {
        target: |target| target.hardware_fp4,
        kernel: |kernel| quantizes(kernel, Converts::E2m1),
        ptx: "cvt.rn.satfinite.e2m1x2.f32",
        sass: ("F2FP", "E2M1"),
    },
    Requirement {
        target: |target| target.hardware_fp4,
        kernel: |kernel| decodes(kernel, Converts::E2m1),
        ptx: "cvt.rn.f16x2.e2m1x2",
        sass: ("F2FP", "E2M1"),
    },
    Requirement {
        target: |target| target.since_sm90,
        kernel: |kernel| quantizes(kernel, Converts::E4m3),
        ptx: "cvt.rn.satfinite.e4m3x2.f32",
        sass: ("F2FP", "E4M3"),
    },
    Requirement {
        target: |target| target.since_sm90,
        kernel: |kernel| decodes(kernel, Converts::E4m3),
        ptx: "cvt.rn.f16x2.e4m3x2",
        sass: ("F2FP", "E4M3"),
    },
    Requirement {
        target: |target| target.since_sm90,
        kernel: |kernel| quantizes(kernel, Converts::E5m2),
        ptx: "cvt.rn.satfinite.e5m2x2.f32",
        sass: ("F2FP", "E5M2"),
    },
    Requirement {
        target: |target| target.since_sm90,
        kernel: |kernel| decodes(kernel, Converts::E5m2),
        ptx: "cvt.rn.f16x2.e5m2x2",
        sass: ("F2FP", "E5M2"),
    },
    Requirement {
        target: |target| target.block_scale,
        kernel: |kernel| multiplies_fp4(kernel, "nvfp4_", "_blockscale_"),
        ptx: "kind::mxf4nvf4.block_scale.scale_vec::4X",
        sass: ("OMMA", "4X"),
    },
    Requirement {
        target: |target| target.block_scale,
        kernel: |kernel| multiplies_fp4(kernel, "mxfp4_", "_blockscale_"),
        ptx: "kind::mxf4.block_scale.scale_vec::2X",
        sass: ("OMMA", "E8"),
    },
    Requirement {
        target: |target| target.tcgen05,
        kernel: |kernel| multiplies_fp4(kernel, "nvfp4_", "_tcgen05_"),
        ptx: "kind::mxf4nvf4.block_scale.block16",
        sass: ("UTCOMMA", "4X"),
    },
    Requirement {
        target: |target| target.tcgen05,
        kernel: |kernel| multiplies_fp4(kernel, "mxfp4_", "_tcgen05_"),
        ptx: "kind::mxf4.block_scale.block32",
        sass: ("UTCOMMA", ""),
    },
    Requirement {
        target: |target| target.tcgen05,
        kernel: |kernel| multiplies_fp4(kernel, "", "_tcgen05_") && !kernel.name.ends_with("_c2"),
        ptx: "tcgen05.cp.cta_group::1.32x128b.warpx4",
        sass: ("UTCCP", "4x32dp128bit"),
    },
    Requirement {
        target: |target| target.tcgen05,
        kernel: multiplies_in_pairs,
        ptx: "tcgen05.cp.cta_group::2.32x128b.warpx4",
        sass: ("UTCCP", "2CTA"),
    },
    Requirement {
        target: |target| target.tcgen05,
        kernel: multiplies_in_pairs,
        ptx: "tcgen05.mma.cta_group::2",
        sass: ("UTCOMMA", "2CTA"),
    },
    Requirement {
        target: |target| target.wgmma,
        kernel: |kernel| kernel.name.contains("fp4_gemm_") && kernel.name.contains("_fp8_"),
        ptx: "k32.f32.e4m3.e4m3",
        sass: ("QGMMA", "E4M3"),
    },
];

fn quantizes(kernel: &Kernel, to: Converts) -> bool {
    let quantizes = kernel.name.contains("_quantize_")
        || ["activations_", "kv_append_"].iter().any(|family| kernel.name.starts_with(family));
    kernel.converts == to && quantizes
}

fn decodes(kernel: &Kernel, from: Converts) -> bool {
    let decodes =
        ["_dequantize_", "_gemv_", "_gemm_", "kv_gather_"].iter().any(|word| kernel.name.contains(word));
    kernel.converts == from && decodes
}

fn multiplies_fp4(kernel: &Kernel, format: &str, mainloop: &str) -> bool {
    kernel.name.starts_with(format) && kernel.name.contains(mainloop)
}

fn multiplies_in_pairs(kernel: &Kernel) -> bool {
    multiplies_fp4(kernel, "", "_tcgen05_") && kernel.name.ends_with("_c2")
}

/// Returns the requirements for a kernel compiled for a target.
pub(super) fn requirements(target: &Target, kernel: &Kernel) -> impl Iterator<Item = &'static Requirement> {
    REQUIREMENTS.iter().filter(|requirement| (requirement.target)(target) && (requirement.kernel)(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_kernels_abi::{TARGETS, kernels, kernels_for};

    #[test]
    fn each_requirement_applies_to_a_kernel() {
        for requirement in &REQUIREMENTS {
            assert!(TARGETS.iter().any(requirement.target), "{}", requirement.ptx);
            assert!(kernels().any(requirement.kernel), "{}", requirement.ptx);
        }
    }

    #[test]
    fn each_converting_or_block_scaled_kernel_has_its_requirements() {
        for target in TARGETS.iter().filter(|target| target.hardware_fp4) {
            for kernel in kernels_for(target) {
                let expected = match kernel.name {
                    _ if multiplies_in_pairs(kernel) => 3,
                    name if name.contains("_tcgen05_") => 2,
                    name if name.contains("_blockscale_") => 1,
                    _ => usize::from(kernel.converts != Converts::Nothing),
                };
                assert_eq!(requirements(target, kernel).count(), expected, "{}", kernel.name);
            }
        }
    }
}
