//! The outcome of converting a tensor, and the values of codes under scales in bf16.

use half::bf16;
use microscale::NonFinite;
use rayon::prelude::*;

use crate::convert::requantized::Requantized;
use crate::convert::rounding::Rounding;
use crate::error::{Error, Result};
use crate::read::bands::bands;
use crate::read::tensor::Tensor;
use crate::read::values::Values;
use crate::sums::Sums;
use crate::write::narrowed::check;
use crate::write::values::write_values;
use crate::write::writer::Sink;

/// The outcome of one tensor of a file.
#[derive(Default)]
pub(crate) struct Done {
    pub(crate) converted: Sums,
    pub(crate) in_bf16: Sums,
    pub(crate) copied: Sums,
    pub(crate) rounded: Option<Rounding>,
    pub(crate) requantized: Option<Requantized>,
    pub(crate) rounded_input: Option<String>,
    pub(crate) dropped_input: Option<String>,
}

/// What values of codes under scales become.
pub(crate) const BF16: &str = "bf16";

/// Writes the values of codes of eight bits in bf16, and makes sure that they are the same, or tells what `rounding` them loses.
pub(crate) fn in_bf16(tensor: &Tensor<'_>, rounding: bool, sink: &Sink<'_>) -> Result<Done> {
    let (bytes_after, report) = write_values::<bf16>(tensor, NonFinite::Error, sink)?;
    // NaN is the same in both dtypes.
    check::<bf16>(tensor, tensor.name, &report, NonFinite::Error, false)?;
    let mut rounded = Requantized::new(tensor.name, tensor.dtype, BF16);
    for band in bands(tensor.elements() as usize) {
        let Some(Values::F32(values)) = tensor.values_in(band) else { continue };
        let after: Vec<f32> = values.par_iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
        rounded.add(&values, &after);
    }
    let same = rounded.differing == 0;
    if !same && !rounding {
        return Err(Error::tensor(tensor.file, tensor.name, microscale::Error::Wrong("a cast to bf16")));
    }
    let mut done = Done { requantized: (!same).then_some(rounded), ..Done::default() };
    done.in_bf16.add(tensor.elements(), tensor.bytes() as u64, bytes_after);
    Ok(done)
}
