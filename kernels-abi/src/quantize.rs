//! Quantizing by plain rounding.

use microscale_formats::plan::NvPlan;

use crate::launch::{Converts, Launch, THREADS, WARP, WARP_ELEMENTS, kernel, kinds};

const LAUNCH: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS, 0);

kinds! {
    /// The quantizers. One kernel for rows on 16 bytes and for others was 2 % slower on an H200
    /// with the former in 16 bits, and 3 to 8 % with the latter.
    Quantize by dtype {
        /// MXFP4 with ties to even, every row on 16 bytes.
        Mxfp4EvenAligned "mxfp4_quantize" "_even_aligned" [LAUNCH, LAUNCH] E2m1;
        /// MXFP4 with ties to even, rows anywhere.
        Mxfp4EvenUnaligned "mxfp4_quantize" "_even_unaligned" [LAUNCH, LAUNCH] E2m1;
        /// MXFP4 with ties away from zero or toward it, as the options say, every row on 16 bytes.
        Mxfp4OtherTiesAligned "mxfp4_quantize" "_other_ties_aligned" [LAUNCH, LAUNCH] Nothing;
        /// MXFP4 with ties away from zero or toward it, as the options say, rows anywhere.
        Mxfp4OtherTiesUnaligned "mxfp4_quantize" "_other_ties_unaligned" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4 by the plan in the options, every row on 16 bytes.
        Nvfp4GivenAligned "nvfp4_quantize" "_given_aligned" [LAUNCH, LAUNCH] E2m1;
        /// NVFP4 by the plan in the options, rows anywhere.
        Nvfp4GivenUnaligned "nvfp4_quantize" "_given_unaligned" [LAUNCH, LAUNCH] E2m1;
        /// NVFP4 by the plan in the tensor's slot, every row on 16 bytes.
        Nvfp4PlannedAligned "nvfp4_quantize" "_planned_aligned" [LAUNCH, LAUNCH] E2m1;
        /// NVFP4 by the plan in the tensor's slot, rows anywhere.
        Nvfp4PlannedUnaligned "nvfp4_quantize" "_planned_unaligned" [LAUNCH, LAUNCH] E2m1;
        /// MXFP8 with E4M3 elements, every row on 16 bytes.
        Mxfp8E4m3Aligned "mxfp8_e4m3_quantize" "_aligned" [LAUNCH, LAUNCH] E4m3;
        /// MXFP8 with E4M3 elements, rows anywhere.
        Mxfp8E4m3Unaligned "mxfp8_e4m3_quantize" "_unaligned" [LAUNCH, LAUNCH] E4m3;
        /// MXFP8 with E5M2 elements, every row on 16 bytes.
        Mxfp8E5m2Aligned "mxfp8_e5m2_quantize" "_aligned" [LAUNCH, LAUNCH] E5m2;
        /// MXFP8 with E5M2 elements, rows anywhere.
        Mxfp8E5m2Unaligned "mxfp8_e5m2_quantize" "_unaligned" [LAUNCH, LAUNCH] E5m2;
    }
}

/// The options of the MX formats' kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MxOptions {
    /// `ScaleRule::mantissa_addend`.
    pub mantissa_addend: u32,
    /// `NegativeZero` as a number. It follows the addend, so that kernels load the two at once:
    /// apart they made the quantizer of bf16 2 % slower on an H200.
    pub negative_zero: u32,
    /// 1 to replace ±Inf by the largest finite value and NaN by 0; 0 to give such blocks the NaN
    /// scale.
    pub saturate_non_finite: u32,
    /// `Ties` as a number. The kernels for ties to even do not look at it.
    pub ties: u32,
}

/// The options of the NVFP4 quantizers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NvOptions {
    /// The plan, or where that is in the tensor's [`GlobalSlot`](crate::GlobalSlot) one of the same
    /// numerics.
    pub plan: NvPlan,
    /// As in [`MxOptions`].
    pub saturate_non_finite: u32,
}
