//! The PTX targets: compiler flags, file names, and the target of a GPU.

use core::fmt;

use crate::launch::{Converts, Family, Kernel, KernelId, Targets};

/// A target that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name in rustc's `-Ctarget-cpu` and in the PTX's `.target`.
    pub name: &'static str,
    /// The LLVM feature that sets the PTX's `.version`: the lowest that has the instructions,
    /// friendlier to old drivers.
    pub ptx_feature: &'static str,
    /// The smallest compute capability (major, minor) that runs it.
    pub compute_capability: (u32, u32),
    /// Family-specific and architecture-specific PTX (`f`, `a`) runs within its major version only;
    /// other PTX runs on everything newer.
    pub family_only: bool,
    /// Has the e2m1x2 conversions: the kernels are built with `--cfg microscale_fp4`.
    pub hardware_fp4: bool,
    /// Has what came with sm_90: packed 16-bit integer min and max, conversions of 8-bit floats
    /// (those since sm_89). The kernels are built with `--cfg microscale_sm90`.
    pub since_sm90: bool,
    /// Has warp groups that multiply: the kernels are built with `--cfg microscale_wgmma`.
    pub wgmma: bool,
    /// Has `mma.sync` of block-scaled FP4: the kernels are built with
    /// `--cfg microscale_block_scale`.
    pub block_scale: bool,
    /// The GPUs for which NVIDIA's assembler must accept it. `check-ptx` assembles for the first
    /// one, and with `--every-gpu` for all.
    pub assemble_for: &'static [&'static str],
}

/// Every target, from the oldest to the newest. Targets that differ in few kernels follow each
/// other, as equal PTX is stored once.
pub const TARGETS: [Target; 5] = [
    Target {
        name: "sm_80",
        ptx_feature: "ptx74",
        compute_capability: (8, 0),
        family_only: false,
        hardware_fp4: false,
        since_sm90: false,
        wgmma: false,
        block_scale: false,
        assemble_for: &["sm_80", "sm_86", "sm_89"],
    },
    Target {
        name: "sm_90",
        ptx_feature: "ptx80",
        compute_capability: (9, 0),
        family_only: false,
        hardware_fp4: false,
        since_sm90: true,
        wgmma: false,
        block_scale: false,
        assemble_for: &["sm_90", "sm_110"],
    },
    Target {
        name: "sm_90a",
        ptx_feature: "ptx80",
        compute_capability: (9, 0),
        family_only: true,
        hardware_fp4: false,
        since_sm90: true,
        wgmma: true,
        block_scale: false,
        assemble_for: &["sm_90a"],
    },
    Target {
        name: "sm_100f",
        ptx_feature: "ptx88",
        compute_capability: (10, 0),
        family_only: true,
        hardware_fp4: true,
        since_sm90: true,
        wgmma: false,
        block_scale: false,
        assemble_for: &["sm_100f", "sm_100a", "sm_103a"],
    },
    Target {
        name: "sm_120f",
        ptx_feature: "ptx88",
        compute_capability: (12, 0),
        family_only: true,
        hardware_fp4: true,
        since_sm90: true,
        wgmma: false,
        block_scale: true,
        assemble_for: &["sm_120f", "sm_120a", "sm_121a"],
    },
];

/// The name of the file that holds a family's PTX for a target, as its [`Display`](fmt::Display)
/// text: the kernels whose text differs from the [previous](Target::before) target's.
#[derive(Clone, Copy, Debug)]
pub struct PtxFile<'a> {
    /// The family.
    pub family: Family,
    /// The target.
    pub target: &'a Target,
}

impl fmt::Display for PtxFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.ptx", self.family.word(), self.target.name)
    }
}

/// The lines that a module for a target starts with, as its [`Display`](fmt::Display) text.
#[derive(Clone, Copy, Debug)]
pub struct PtxHead<'a>(&'a Target);

impl fmt::Display for PtxHead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.0.ptx_feature.trim_start_matches("ptx").split_at(1);
        write!(f, ".version {major}.{minor}\n.target {}\n.address_size 64\n", self.0.name)
    }
}

impl Target {
    /// The lines that a module for this target starts with, as [`Display`](fmt::Display) text.
    pub const fn head(&self) -> PtxHead<'_> {
        PtxHead(self)
    }

    /// The thread blocks of a kernel that its PTX says are [resident](Kernel::resident); 0 if it
    /// says nothing.
    pub const fn resident(&self, kernel: &Kernel) -> u32 {
        if kernel.resident > 1 && !self.wgmma { 0 } else { kernel.resident }
    }

    /// Returns whether a kernel's text is shared with the target [before](Self::before), even if a
    /// build for this target differs.
    ///
    /// Measured on an H100: quantizing and dequantizing 4-bit formats is as fast with the text for
    /// `sm_80` as with that for `sm_90`. MXFP8's conversions, the search and NVFP4's products are
    /// not. GPUs with `wgmma` use it, so `mma` kernels need new text only for FP4 conversions, and
    /// products of bf16 activations have none.
    pub fn shares_text(&self, id: KernelId) -> bool {
        let kernel = id.kernel();
        let shares = match id.family() {
            Family::Quantize | Family::Dequantize | Family::Activations => {
                kernel.converts == Converts::E2m1 && !self.hardware_fp4
            }
            Family::Gemm => match kernel.targets {
                Targets::WithoutWgmma => !self.hardware_fp4 || kernel.converts == Converts::Nothing,
                Targets::WithWgmma | Targets::WithBlockScale => false,
                Targets::All => {
                    self.hardware_fp4 && kernel.converts == Converts::Nothing && kernel.resident == 0
                }
            },
            _ => false,
        };
        shares && self.before().is_some()
    }

    /// The next older target.
    pub fn before(&self) -> Option<&'static Self> {
        let place = TARGETS.iter().position(|target| target.name == self.name)?;
        TARGETS.get(place.checked_sub(1)?)
    }
}

impl Targets {
    /// Returns whether a target is one of them.
    pub const fn contain(self, target: &Target) -> bool {
        match self {
            Self::All => true,
            Self::WithWgmma => target.wgmma,
            Self::WithoutWgmma => !target.wgmma,
            Self::WithBlockScale => target.block_scale,
        }
    }
}

/// The newest target that a GPU of this compute capability runs; `None` below 8.0.
pub fn target_for(compute_capability: (u32, u32)) -> Option<&'static Target> {
    TARGETS.iter().rev().find(|target| {
        let family = !target.family_only || target.compute_capability.0 == compute_capability.0;
        family && target.compute_capability <= compute_capability
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generation_gets_its_target() {
        let name = |major, minor| target_for((major, minor)).map(|t| t.name);
        assert_eq!(name(7, 5), None);
        assert_eq!([name(8, 0), name(8, 6), name(8, 9)], [Some("sm_80"); 3]);
        assert_eq!(name(9, 0), Some("sm_90a"));
        assert_eq!([name(10, 0), name(10, 3)], [Some("sm_100f"); 2]);
        assert_eq!(name(11, 0), Some("sm_90"), "no family PTX for 11.x: the newest portable one");
        assert_eq!([name(12, 0), name(12, 1)], [Some("sm_120f"); 2]);
    }

    #[test]
    fn modules_start_with_their_target() {
        let head = std::format!("{}", TARGETS[0].head());
        assert_eq!(head, ".version 7.4\n.target sm_80\n.address_size 64\n");
    }

    #[test]
    fn kernels_share_text_where_a_target_adds_nothing() {
        let sharing = |name: &str| {
            let id = KernelId::all().find(|id| id.kernel().name == name).unwrap();
            TARGETS.map(|target| target.shares_text(id))
        };
        assert_eq!(sharing("nvfp4_gemm_f16_mma_256x32"), [false, true, true, false, false]);
        assert_eq!(sharing("nvfp4_gemm_bf16_mma_256x32"), [false, true, true, true, true]);
        assert_eq!(sharing("nvfp4_gemm_bf16_wgmma_128x64"), [false; 5]);
        assert_eq!(sharing("nvfp4_gemm_bf16_gemv_16x8"), [false, false, false, true, true]);
        assert_eq!(sharing("pack_bf16"), [false; 5]);
        assert_eq!(sharing("nvfp4_quantize_bf16_given_aligned"), [false, true, true, false, false]);
        assert_eq!(sharing("mxfp8_e4m3_quantize_bf16_aligned"), [false; 5]);
    }

    #[test]
    fn every_target_but_the_oldest_has_one_before() {
        assert_eq!(TARGETS[0].before(), None);
        for pair in TARGETS.windows(2) {
            assert_eq!(pair[1].before(), Some(&pair[0]));
            assert!(pair[0].compute_capability <= pair[1].compute_capability);
        }
    }
}
