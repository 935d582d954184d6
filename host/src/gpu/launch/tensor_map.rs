//! Tensor maps of the codes of weights, which the driver encodes.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};
use microscale_kernels_abi::gemm::params::{TensorMap, WeightsBoxes};

use crate::error::Result;
use crate::gpu::runtime::driver::doing;

/// Encodes the tensor map of the codes at an address, on 16 bytes. It does not read them.
///
/// # Errors
/// [`crate::Error::Gpu`], also for strides that a tensor map cannot represent.
pub(in crate::gpu) fn tensor_map(codes: u64, boxes: &WeightsBoxes) -> Result<CUtensorMap> {
    let WeightsBoxes { sizes, strides, box_sizes } = boxes;
    let mut map = CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have a number per dimension, or per dimension but the first, and live
    // until the call returns. The driver keeps the address, which only kernels use.
    let encoded = unsafe {
        cuTensorMapEncodeTiled(
            ptr::from_mut(&mut map),
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            sizes.len() as u32,
            codes as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            box_sizes.as_ptr(),
            [1; 3].as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    encoded.result().map_err(doing("encoding a tensor map of the weights"))?;
    Ok(map)
}

const _: () = assert!(size_of::<CUtensorMap>() == size_of::<TensorMap>());
