//! The casts of tensors to another format: exact, or if that is wanted, by quantizing their values
//! again.

use std::collections::HashMap;

use microscale::cast::{Mxfp4ToNvfp4, to_mxfp8};
use microscale::formats::nvfp4::Direction;
use microscale::{Device, Format, Global, GlobalScale, Numerics, QuantizedTensor, Recipe};
use rayon::prelude::*;

use crate::checkpoint_formats::packed::Packed;
use crate::convert::rounding::compare_bits;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::names::fused::{Fused, fused};
use crate::read::bands::BAND;

/// A cast of a tensor.
#[derive(Clone, Copy)]
pub(crate) enum Cast {
    /// Exact: other scales over the same codes.
    ToNvfp4(Mxfp4ToNvfp4),
    /// Exact.
    ToMxfp8,
    /// Quantizing the values again, under this global scale if the format has one.
    Again(Recipe, Option<GlobalScale>),
}

impl Cast {
    /// The global scale after it, if the format has one.
    pub(crate) fn global_scale(self) -> Option<GlobalScale> {
        match self {
            Self::ToNvfp4(cast) => Some(cast.global_scale(Direction::Divisor)),
            Self::ToMxfp8 => None,
            Self::Again(_, global_scale) => global_scale,
        }
    }
}

/// The casts of tensors to a format, in their order. Parts of a fused layer share a cast. A tensor
/// without an exact cast is an error, or quantized again if `requantize` is set.
pub(crate) fn casts(tensors: &[&Packed<'_>], to: Format, requantize: bool) -> Result<Vec<Cast>> {
    let again = |packed: &Packed<'_>, source| match requantize {
        true => Ok(None),
        false => Err(not_exact(packed, source)),
    };
    let examined = tensors.par_iter().map(|packed| {
        let cast = match (packed.format, to) {
            (Format::Mxfp4, Format::Nvfp4) => Some(cast_to_nvfp4(packed)?),
            (_, Format::Mxfp8E4m3) => match check_mxfp8(packed) {
                Ok(()) => Some(Cast::ToMxfp8),
                Err(NoCast::NotExact(source)) => again(packed, source)?,
                Err(NoCast::Failed(error)) => return Err(error),
            },
            (from, to) => again(packed, microscale::Error::NotCast { from, to })?,
        };
        Ok((*packed, cast))
    });
    let examined = examined.collect::<Result<Vec<_>>>()?;
    let shared = share(&examined);
    let (mut casts, mut others) = (Vec::with_capacity(tensors.len()), Vec::new());
    for (packed, cast) in examined {
        let cast = match fused(packed.name, &packed.shape).filter(|_| to == Format::Nvfp4) {
            Some(layer) => shared.get(&layer).copied().flatten().map(Cast::ToNvfp4),
            None => cast,
        };
        let exact = match cast {
            Some(Cast::ToNvfp4(cast)) if !cast.is_exact() => {
                again(packed, microscale::Error::NotExact { span: cast.span() })?
            }
            cast => cast,
        };
        if exact.is_none() {
            others.push(packed);
        }
        casts.push(exact);
    }
    let mut again = quantized_again(&others, to)?.into_iter();
    let all = casts.into_iter().map(|cast| cast.or_else(|| again.next()));
    // There is one for each tensor without an exact cast.
    Ok(all.flatten().collect())
}

/// The cast of all parts of each fused layer, if all can be cast over the same codes.
fn share(examined: &[(&Packed<'_>, Option<Cast>)]) -> HashMap<Fused, Option<Mxfp4ToNvfp4>> {
    let mut shared = HashMap::new();
    for (packed, cast) in examined {
        let Some(layer) = fused(packed.name, &packed.shape) else { continue };
        let of_layer = shared.entry(layer).or_insert(Some(Mxfp4ToNvfp4::default()));
        *of_layer = match (*of_layer, cast) {
            (Some(of_layer), Some(Cast::ToNvfp4(cast))) => Some(of_layer.and(*cast)),
            _ => None,
        };
    }
    shared
}

/// The casts of tensors whose values are quantized again, in their order: as `quantize` does by
/// default, parts of a fused layer under one global scale.
fn quantized_again(tensors: &[&Packed<'_>], to: Format) -> Result<Vec<Cast>> {
    let Some(first) = tensors.first() else { return Ok(Vec::new()) };
    let recipe = Recipe::of(to, Numerics::default_for(to)).map_err(|error| first.error(error))?;
    let Some(arithmetic) = recipe.scheme.global_from_amax() else {
        return Ok(vec![Cast::Again(recipe, None); tensors.len()]);
    };
    let largest: Vec<f32> = tensors.par_iter().map(|packed| amax(packed)).collect::<Result<_>>()?;
    let mut of_layers: HashMap<Fused, f32> = HashMap::new();
    for (packed, amax) in tensors.iter().zip(&largest) {
        if let Some(layer) = fused(packed.name, &packed.shape) {
            let of_layer = of_layers.entry(layer).or_default();
            *of_layer = of_layer.max(*amax);
        }
    }
    let all = tensors.iter().zip(&largest).map(|(packed, amax)| {
        let of_layer = fused(packed.name, &packed.shape).and_then(|layer| of_layers.get(&layer));
        let scale = arithmetic.global_scale(*of_layer.unwrap_or(amax), |x| x);
        Cast::Again(recipe.with_global(Global::Given(scale)), Some(scale))
    });
    Ok(all.collect())
}

/// The largest magnitude of a tensor's finite values.
fn amax(packed: &Packed<'_>) -> Result<f32> {
    let mut most = 0.0f32;
    for band in packed.bands(BAND)? {
        let values: Vec<f32> = packed.stored_values_in(band, &Device::Cpu)?;
        let finite = values.par_iter().map(|value| value.abs()).filter(|value| value.is_finite());
        most = most.max(finite.reduce(|| 0.0, f32::max));
    }
    Ok(most)
}

/// The error of a cast that is not exact, which names the way out.
fn not_exact(packed: &Packed<'_>, why: microscale::Error) -> Error {
    let (file, tensor) = (packed.codes.file.into(), packed.name.into());
    FormatError::NotExact { file, tensor, why: why.into() }.into()
}

/// The cast of a tensor in MXFP4, which its scales decide.
fn cast_to_nvfp4(packed: &Packed<'_>) -> Result<Cast> {
    let mut cast = Mxfp4ToNvfp4::default();
    for band in packed.bands(BAND)? {
        let examined = cast.look_at(packed.row(&packed.blocks_in(band))?);
        cast = examined.map_err(|error| packed.error(error))?;
    }
    Ok(Cast::ToNvfp4(cast))
}

/// Why a tensor is not cast.
enum NoCast {
    NotExact(microscale::Error),
    Failed(Error),
}

/// Elements of a block of MXFP8.
const BLOCK_OF_MXFP8: usize = 32;

/// Makes sure that all values of a tensor are exact in MXFP8.
fn check_mxfp8(packed: &Packed<'_>) -> std::result::Result<(), NoCast> {
    // MXFP4 always is MXFP8.
    let bands = if packed.format == Format::Mxfp4 { Ok(Vec::new()) } else { packed.bands(BAND) };
    for band in bands.map_err(NoCast::Failed)? {
        let before = band.start / BLOCK_OF_MXFP8;
        let blocks = packed.blocks_in(band);
        let row = packed.row(&blocks).map_err(NoCast::Failed)?;
        to_mxfp8_in(packed, &row.to_tensor(), before).map_err(NoCast::NotExact)?;
    }
    Ok(())
}

/// Casts a band to MXFP8, given the blocks of the tensor before it.
fn to_mxfp8_in(
    packed: &Packed<'_>,
    band: &QuantizedTensor,
    before: usize,
) -> microscale::Result<QuantizedTensor> {
    let columns = packed.shape.last().copied().unwrap_or(1);
    let not_exact = |block| microscale::Error::NotExactBlock { to: Format::Mxfp8E4m3, block, columns };
    if columns % BLOCK_OF_MXFP8 != 0 {
        return Err(not_exact(0));
    }
    to_mxfp8(band).map_err(|source| match source {
        microscale::Error::NotExactBlock { block, .. } => not_exact(before + block),
        source => source,
    })
}

/// Casts a band exactly, and makes sure that its values are the same.
pub(crate) fn cast_alike(
    packed: &Packed<'_>,
    band: &QuantizedTensor,
    device: &Device,
    cast: impl Fn(&QuantizedTensor) -> microscale::Result<QuantizedTensor>,
) -> Result<QuantizedTensor> {
    let after = cast(band).map_err(|source| packed.error(source))?;
    match compare_bits(packed, band, &after, device)?.differing {
        0 => Ok(after),
        _ => Err(packed.error(microscale::Error::Wrong("a cast"))),
    }
}
