//! Quantizing by plain rounding.

use microscale_formats::plan::NvPlan;

use crate::launch::{Converts, Launch, THREADS, WARP, WARP_ELEMENTS, kernel, kinds};

const LAUNCH: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS, 0);

kinds! {
    /// The quantizers. Rows may start anywhere.
    Quantize by dtype {
        /// MXFP4 with ties to even.
        Mxfp4Even "mxfp4_quantize" "_even" [LAUNCH, LAUNCH] E2m1;
        /// MXFP4 with ties away from zero or toward it, as the options say.
        Mxfp4OtherTies "mxfp4_quantize" "_other_ties" [LAUNCH, LAUNCH] Nothing;
        /// NVFP4 by the plan in the options.
        Nvfp4Given "nvfp4_quantize" "_given" [LAUNCH, LAUNCH] E2m1;
        /// NVFP4 by the plan in the tensor's slot.
        Nvfp4Planned "nvfp4_quantize" "_planned" [LAUNCH, LAUNCH] E2m1;
        /// MXFP8 with E4M3 elements.
        Mxfp8E4m3 "mxfp8_e4m3_quantize" "" [LAUNCH, LAUNCH] E4m3;
        /// MXFP8 with E5M2 elements.
        Mxfp8E5m2 "mxfp8_e5m2_quantize" "" [LAUNCH, LAUNCH] E5m2;
    }
}

/// What the kernels of the MX formats read at run time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QuantizeOptions {
    /// `ScaleRule::mantissa_addend`.
    pub mantissa_addend: u32,
    /// `Ties` as a number. The kernels for ties to even do not look at it.
    pub ties: u32,
    /// `NegativeZero` as a number.
    pub negative_zero: u32,
    /// 1 to replace ±Inf by the largest finite value and NaN by 0; 0 to give such blocks the NaN scale.
    pub saturate_non_finite: u32,
}

/// What the NVFP4 quantizers read at run time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NvQuantizeOptions {
    /// The plan, or where that is in the tensor's [`GlobalSlot`](crate::GlobalSlot) one of the same convention.
    pub plan: NvPlan,
    /// As in [`QuantizeOptions`].
    pub saturate_non_finite: u32,
}
