//! The tables of all families.

use crate::launch::{Family, Kernel, KernelId};
use crate::targets::Target;
use crate::{activations, amax, dequantize, errors, experts, gemm, gemv, gptq, layout, quantize, search};

impl Family {
    /// Its table.
    pub const fn kernels(self) -> &'static [Kernel] {
        match self {
            Self::Quantize => quantize::KERNELS,
            Self::Dequantize => dequantize::KERNELS,
            Self::Search => search::KERNELS,
            Self::Amax => amax::KERNELS,
            Self::Errors => errors::KERNELS,
            Self::Layout => layout::KERNELS,
            Self::Gemv => gemv::KERNELS,
            Self::Experts => experts::KERNELS,
            Self::Gemm => gemm::config::KERNELS,
            Self::Activations => activations::KERNELS,
            Self::Gptq => gptq::KERNELS,
        }
    }
}

impl KernelId {
    /// Every kernel, family by family.
    pub fn all() -> impl Iterator<Item = Self> {
        Family::ALL
            .into_iter()
            .flat_map(|family| (0..family.kernels().len()).map(move |index| Self::new(family, index)))
    }

    /// The row of the family's table.
    pub const fn kernel(self) -> &'static Kernel {
        &self.family().kernels()[self.index()]
    }
}

/// The kernels of a target, family by family.
pub fn kernels_for(target: &Target) -> impl Iterator<Item = &'static Kernel> {
    kernels().filter(|kernel| kernel.targets.contain(target))
}

/// Every kernel, family by family.
pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
    KernelId::all().map(KernelId::kernel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn families_stand_at_their_places() {
        for (place, family) in Family::ALL.into_iter().enumerate() {
            assert_eq!(family as usize, place, "{family:?}");
        }
        let names: Vec<_> = kernels().map(|kernel| kernel.name).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[..i].contains(name), "{name} occurs twice");
        }
    }
}
