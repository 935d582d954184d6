//! Dequantizing.

use crate::launch::{Converts, Launch, THREADS, WARP, WARP_ELEMENTS, kernel, kinds};

/// Chunks of 16 bytes that a lane writes where every row starts on 16 bytes. The fewer a warp
/// writes, the more of an H200's bandwidth f32 output reaches: 94 % with 8, 95 with 4, 96 with 2.
pub const DEQUANTIZE_CHUNKS: u32 = 2;

const F32: Launch = (THREADS, THREADS * DEQUANTIZE_CHUNKS * 4, 0);
const F16: Launch = (THREADS, THREADS * DEQUANTIZE_CHUNKS * 8, 0);
/// Stores are shifted between lanes, and a warp keeps to its elements.
const ANY: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS, 0);

kinds! {
    /// The dequantizers. One kernel for both ways to store had more registers, and was 6 to 13 %
    /// slower on an H200.
    Dequantize by dtype {
        /// MXFP4, every row on 16 bytes.
        Mxfp4Aligned "mxfp4_dequantize" "_aligned" [F32, F16] E2m1;
        /// MXFP4, rows anywhere.
        Mxfp4Unaligned "mxfp4_dequantize" "_unaligned" [ANY, ANY] E2m1;
        /// NVFP4, every row on 16 bytes.
        Nvfp4Aligned "nvfp4_dequantize" "_aligned" [F32, F16] E2m1;
        /// NVFP4, rows anywhere.
        Nvfp4Unaligned "nvfp4_dequantize" "_unaligned" [ANY, ANY] E2m1;
        /// MXFP8 with E4M3 elements, every row on 16 bytes.
        Mxfp8E4m3Aligned "mxfp8_e4m3_dequantize" "_aligned" [F32, F16] E4m3;
        /// MXFP8 with E4M3 elements, rows anywhere.
        Mxfp8E4m3Unaligned "mxfp8_e4m3_dequantize" "_unaligned" [ANY, ANY] E4m3;
        /// MXFP8 with E5M2 elements, every row on 16 bytes.
        Mxfp8E5m2Aligned "mxfp8_e5m2_dequantize" "_aligned" [F32, F16] E5m2;
        /// MXFP8 with E5M2 elements, rows anywhere.
        Mxfp8E5m2Unaligned "mxfp8_e5m2_dequantize" "_unaligned" [ANY, ANY] E5m2;
    }
}
