//! The effect of another direction of a global scale: values before and after, compared.

use microscale::{Device, ErrorStats, GlobalScale, QuantizedTensor};

use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::storage::Storage;
use crate::convert::requantized::BandDifference;
use crate::error::Result;
use crate::read::tensor::elements;

/// The effect of the other direction of a global scale on a tensor's values.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rounding {
    /// The tensor.
    pub tensor: String,
    /// Its global scale before.
    pub before: GlobalScale,
    /// Its global scale after, in the other direction.
    pub after: GlobalScale,
    /// Values that are not the same f32.
    pub differing: u64,
    /// All values.
    pub values: u64,
    /// The difference of those after from those before.
    pub errors: ErrorStats,
}

/// Counts the values that differ to the bit between a band before and after. All NaN are the same,
/// because dequantizing gives one NaN.
pub(crate) fn compare_bits(
    packed: &Packed<'_>,
    before: &QuantizedTensor,
    after: &QuantizedTensor,
    device: &Device,
) -> Result<BandDifference> {
    let dequantized = |tensor| device.dequantize(tensor).map_err(|source| packed.error(source));
    let [before, after]: [Vec<f32>; 2] = [dequantized(before)?, dequantized(after)?];
    Ok(BandDifference::between(&before, &after))
}

/// The comparison of a tensor's values under both directions of the global scale, without any value
/// yet; `None` if the scale is the same.
pub(crate) fn rounding(packed: &Packed<'_>, storage: &Storage) -> Option<Rounding> {
    let before = packed.global_scale.map(|(_, scale)| scale)?;
    let after = storage.stored_global_scale(Some(before)).filter(|after| *after != before)?;
    let (tensor, values) = (packed.name.into(), elements(&packed.shape));
    Some(Rounding { tensor, before, after, differing: 0, values, errors: ErrorStats::default() })
}

/// Compares a band with the same blocks under another global scale.
pub(crate) fn rescaled_difference(
    packed: &Packed<'_>,
    band: &QuantizedTensor,
    after: GlobalScale,
    device: &Device,
) -> Result<BandDifference> {
    let converted = band.clone().with_global_scale(after).map_err(|source| packed.error(source))?;
    compare_bits(packed, band, &converted, device)
}

impl Rounding {
    /// Adds the difference of a band, in the order of the bands.
    pub(crate) fn add(&mut self, band: &BandDifference) {
        self.differing += band.differing;
        self.errors = self.errors.and_parts(&band.parts);
    }
}
