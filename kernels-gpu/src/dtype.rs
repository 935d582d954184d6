//! The dtypes of unquantized values, in chunks of 16 bytes: a lane's loads and stores.

mod chunk;
mod e2m1;
mod floats;

pub(crate) use chunk::{Chunk, Dtype};
#[cfg(not(microscale_fp4))]
pub(crate) use e2m1::encode_by_shortcut;
pub(crate) use e2m1::{
    decode, drop_negative_zero_codes, encode, encode_scaled, reciprocal, signed_for_hardware,
};
pub(crate) use floats::{Bf16, F16, F32};
