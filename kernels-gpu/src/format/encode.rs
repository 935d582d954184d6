//! The questions of quantizing to a format: the scale of a block, and the codes of chunks under it.

use microscale_formats::BlockEvents;

use super::blocks::Blocks;
use crate::dtype::{Chunk, Dtype};

/// A lane's data for encoding values of a block.
pub(crate) type Factor = [u32; 3];

/// The scale of a block with finite values.
pub(crate) struct Scaled {
    /// Its byte.
    pub(crate) byte: u8,
    /// What its values are encoded with.
    pub(crate) factor: Factor,
    /// What happened.
    pub(crate) events: BlockEvents,
    /// [`Format::encode`] can do it, if the values of a block that is clipped are
    /// [limited](Format::limit) first.
    pub(crate) in_range: bool,
}

/// A format to quantize to, with its options.
pub(crate) trait Format: Blocks {
    /// The scale byte of a block that is not finite.
    const NAN_SCALE: u8;
    /// The reference's data for encoding a block's values.
    type Scaling: Copy;
    /// Whether the values of clipped blocks must be limited.
    const LIMITS: bool;
    /// Whether blocks that are usual can have events.
    const USUALLY_EVENTFUL: bool;

    /// Words of a [`Factor`] that [`Format::encode`] needs.
    fn words<D: Dtype>() -> usize;

    /// [`Format::scale`] for most blocks, faster. It reports other blocks as not in range: blocks
    /// with events that are not cheap to find, and blocks whose amax is not finite.
    fn usual_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled;

    /// The scale of a block with this amax. A non-finite amax is not in range.
    fn scale<D: Dtype>(&self, amax_bits: u32) -> Scaled;

    /// A chunk with the same codes and smaller magnitudes.
    fn limit<D: Dtype>(chunk: &Chunk, factor: Factor) -> Chunk;

    /// A chunk's codes, the first in the lowest bits.
    fn encode<D: Dtype>(&self, chunk: &Chunk, factor: Factor) -> u64;

    /// Whether there is a shortcut for the tensor.
    fn has_shortcut<D: Dtype>(&self) -> bool;

    /// [`Format::usual_scale`], faster yet, with a factor of one word, for the shortcut. All lanes
    /// of the warp take part.
    fn shortcut_scale<D: Dtype>(&self, amax_bits: u32) -> Scaled;

    /// [`Format::encode`] by the shortcut.
    fn shortcut_encode<D: Dtype>(&self, chunk: &Chunk, factor: u32) -> u64;

    /// [`Format::scale`] by the reference.
    fn define<D: Dtype>(&self, amax_bits: u32) -> (u8, Self::Scaling, BlockEvents);

    /// The reference's data for encoding a block's values under another scale, with the events.
    fn define_under<D: Dtype>(&self, amax_bits: u32, byte: u8) -> (Self::Scaling, BlockEvents);

    /// A value's code by the reference.
    fn code(&self, value: f32, scaling: Self::Scaling) -> u8;

    /// What becomes of −0: `NegativeZero` as a number.
    fn negative_zero(&self) -> u32;

    /// Whether NaN and infinities are replaced.
    fn saturates_non_finite(&self) -> bool;
}
