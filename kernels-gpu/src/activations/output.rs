//! What quantizes and stores the pieces of a row.

use microscale_kernels_abi::ActivationParams;

use super::row::Row;
use crate::access::MOST_STEPS;
use crate::dtype::{Chunk, Dtype};

/// The addresses that kernels take.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub(super) codes: *mut u8,
    pub(super) scales: *mut u8,
    pub(super) row_scales: *mut f32,
}

/// A warp's piece of a row.
pub(super) struct Piece<'a> {
    pub(super) params: &'a ActivationParams,
    pub(super) memory: Memory,
    pub(super) row: &'a Row,
    /// Its number in the row.
    pub(super) number: u32,
    /// Four chunks per lane: columns 256 apart.
    pub(super) chunks: [Chunk; MOST_STEPS],
}

/// An output format.
pub(super) trait Output {
    /// The data of a row: its scale, its plan, or its place.
    type Scale;

    /// Whether rows may have a scale each.
    const PER_TOKEN: bool;
    /// Whether all rows may share a scale from their amax.
    const PER_TENSOR: bool = false;
    /// Whether rows may belong to experts.
    const BY_EXPERT: bool = true;
    /// Whether products quantize their activations to this. The next kernel may then start at once:
    /// it relies on earlier work only after it has waited for this kernel, or if this one started
    /// when all earlier work had ended.
    #[cfg(microscale_sm90)]
    const BEFORE_PRODUCTS: bool = false;

    /// The scale of a row, for its amax, or where that is given. Lane 0 of a row's first warp
    /// `stores` a scale from amax.
    ///
    /// # Safety
    /// The contract of the kernels in [`super`].
    unsafe fn scale<D: Dtype>(
        &self,
        params: &ActivationParams,
        memory: &Memory,
        row: &Row,
        amax: f32,
        stores: bool,
    ) -> Self::Scale;

    /// Quantizes and stores a piece.
    ///
    /// # Safety
    /// The contract of the kernels in [`super`].
    unsafe fn store<D: Dtype>(&self, piece: &Piece<'_>, scale: &Self::Scale);
}

/// Where the blocks of a piece of a row are stored.
pub(super) trait Place {
    /// The address of a block's codes, `bytes` per block; null for blocks that do not exist.
    fn codes(&self, block: u32, bytes: u32) -> *mut u8;

    /// The address of a block's scale byte; null for blocks that neither exist nor are padding.
    fn scale(&self, block: u32) -> *mut u8;
}
