//! The PTX targets: what is compiled, which file holds it, and which GPU gets which.

use core::fmt;

use crate::launch::Family;

/// A target that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name in rustc's `-Ctarget-cpu` and in the PTX's `.target`.
    pub name: &'static str,
    /// The target whose PTX it runs, with its own name in the `.target` line: itself, or one for which the kernels compile to the
    /// same text. [`PtxFile`] names a family's file.
    pub ptx: &'static str,
    /// The LLVM feature that sets the PTX's `.version`: the lowest that has the instructions, friendlier to old
    /// drivers.
    pub ptx_feature: &'static str,
    /// The smallest compute capability (major, minor) that runs it.
    pub compute_capability: (u32, u32),
    /// Family-specific PTX (`f`) runs within its major version only; other PTX runs on everything newer.
    pub family_only: bool,
    /// Has the e2m1x2 conversions: the kernels are built with `--cfg microscale_fp4`.
    pub hardware_fp4: bool,
    /// Has what came with sm_90: packed 16-bit integer min and max, conversions of 8-bit floats (those since sm_89).
    /// The kernels are built with `--cfg microscale_sm90`.
    pub since_sm90: bool,
    /// The GPUs for which NVIDIA's assembler must accept it.
    pub assemble_for: &'static [&'static str],
}

/// Every target, from the oldest to the newest.
pub const TARGETS: [Target; 4] = [
    Target {
        name: "sm_80",
        ptx: "sm_80",
        ptx_feature: "ptx74",
        compute_capability: (8, 0),
        family_only: false,
        hardware_fp4: false,
        since_sm90: false,
        assemble_for: &["sm_80", "sm_86", "sm_89"],
    },
    Target {
        name: "sm_90",
        ptx: "sm_90",
        ptx_feature: "ptx80",
        compute_capability: (9, 0),
        family_only: false,
        hardware_fp4: false,
        since_sm90: true,
        assemble_for: &["sm_90", "sm_90a", "sm_110"],
    },
    Target {
        name: "sm_100f",
        ptx: "sm_100f",
        ptx_feature: "ptx88",
        compute_capability: (10, 0),
        family_only: true,
        hardware_fp4: true,
        since_sm90: true,
        assemble_for: &["sm_100f", "sm_100a", "sm_103a"],
    },
    Target {
        name: "sm_120f",
        ptx: "sm_100f",
        ptx_feature: "ptx88",
        compute_capability: (12, 0),
        family_only: true,
        hardware_fp4: true,
        since_sm90: true,
        assemble_for: &["sm_120f", "sm_120a", "sm_121a"],
    },
];

/// The name of the file that holds a family's PTX for a target, as its [`Display`](fmt::Display) text.
#[derive(Clone, Copy, Debug)]
pub struct PtxFile<'a> {
    /// The family.
    pub family: Family,
    /// The target, or one that [shares](Target::ptx) its PTX.
    pub target: &'a Target,
}

impl fmt::Display for PtxFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.ptx", self.family.word(), self.target.ptx)
    }
}

impl Target {
    /// PTX with this target's name in the `.target` line, in three pieces to put together. Targets that share PTX differ in that
    /// line alone.
    pub fn named<'a>(&self, ptx: &'a str) -> [&'a str; 3] {
        const DIRECTIVE: &str = "\n.target ";
        let start = ptx.find(DIRECTIVE).map_or(ptx.len(), |place| place + DIRECTIVE.len());
        let end = ptx[start..].find('\n').map_or(ptx.len(), |length| start + length);
        let name = if start < ptx.len() { self.name } else { "" };
        [&ptx[..start], name, &ptx[end..]]
    }

    /// The target whose PTX this one runs.
    pub fn built(&self) -> &'static Self {
        TARGETS.iter().find(|target| target.name == self.ptx).unwrap_or(&TARGETS[0])
    }
}

/// The newest target that a GPU of this compute capability runs; none below 8.0.
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
        assert_eq!(name(9, 0), Some("sm_90"));
        assert_eq!([name(10, 0), name(10, 3)], [Some("sm_100f"); 2]);
        assert_eq!(name(11, 0), Some("sm_90"), "no family PTX for 11.x: the newest portable one");
        assert_eq!([name(12, 0), name(12, 1)], [Some("sm_120f"); 2]);
    }

    #[test]
    fn shared_ptx_says_whose_it_is() {
        let shared = "// for sm_1\n.version 8.8\n.target sm_1\n.address_size 64\n";
        for target in &TARGETS {
            let named = target.named(shared).concat();
            assert_eq!(named, shared.replace(".target sm_1", &std::format!(".target {}", target.name)));
        }
        assert_eq!(TARGETS[0].named("no such line").concat(), "no such line");
    }

    #[test]
    fn ptx_is_shared_with_a_target_that_has_its_own() {
        for target in &TARGETS {
            assert_eq!(target.built().name, target.ptx);
            assert_eq!(target.built().ptx, target.ptx);
            assert_eq!(target.built().ptx_feature, target.ptx_feature);
        }
    }
}
