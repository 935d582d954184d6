//! The effect of another direction of a global scale: values before and after, compared.

use microscale::{Device, ErrorStats, GlobalScale, QuantizedTensor};
use rayon::prelude::*;

use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::storage::Storage;
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

/// Values that a thread compares at once.
const TOGETHER: usize = 1 << 14;

/// The values of a band before and after. All NaN are the same.
pub(crate) struct Compared {
    values: [Vec<f32>; 2],
    /// Values that are not the same to the bit.
    pub(crate) differing: u64,
}

impl Compared {
    pub(crate) fn of(
        packed: &Packed<'_>,
        before: &QuantizedTensor,
        after: &QuantizedTensor,
        device: &Device,
    ) -> Result<Self> {
        let dequantized = |tensor| device.dequantize(tensor).map_err(|source| packed.error(source));
        let values: [Vec<f32>; 2] = [dequantized(before)?, dequantized(after)?];
        let pairs = values[0].par_chunks(TOGETHER).zip(values[1].par_chunks(TOGETHER));
        let differing = pairs.map(|(before, after)| {
            before.iter().zip(after).map(|(a, b)| u32::from(a.to_bits() != b.to_bits())).sum::<u32>()
        });
        let differing = differing.map(u64::from).sum();
        Ok(Self { values, differing })
    }
}

/// The comparison of a tensor's values under both directions of the global scale, without any value yet;
/// `None` if the scale is the same.
pub(crate) fn rounding(packed: &Packed<'_>, storage: &Storage) -> Option<Rounding> {
    let before = packed.global_scale.map(|(_, scale)| scale)?;
    let after = storage.stored_global_scale(Some(before)).filter(|after| *after != before)?;
    let (tensor, values) = (packed.name.into(), elements(&packed.shape));
    Some(Rounding { tensor, before, after, differing: 0, values, errors: ErrorStats::default() })
}

impl Rounding {
    /// Compares a band of the tensor, which is under the scale before.
    pub(crate) fn add(&mut self, packed: &Packed<'_>, band: &QuantizedTensor, device: &Device) -> Result<()> {
        let converted = band.clone().with_global_scale(self.after);
        let converted = converted.map_err(|source| packed.error(source))?;
        let Compared { values: [before, after], differing } = Compared::of(packed, band, &converted, device)?;
        self.differing += differing;
        self.errors = self.errors.and_between(&before, &after);
        Ok(())
    }
}
