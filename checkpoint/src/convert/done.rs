//! The outcome of converting a tensor, and the values of codes under scales in bf16.

use half::bf16;
use microscale::NonFinite;

use crate::convert::requantized::{BandDifference, Requantized};
use crate::convert::rounding::Rounding;
use crate::error::{Error, Result};
use crate::pipeline::Worker;
use crate::read::bands::{band, count};
use crate::read::input::Input;
use crate::read::values::Values;
use crate::sums::Sums;
use crate::write::narrowed::check;
use crate::write::sink::Sink;
use crate::write::values::write_values;

/// The outcome of one tensor of a file.
#[derive(Default)]
pub(crate) struct ConvertedTensor {
    pub(crate) converted: Sums,
    pub(crate) in_bf16: Sums,
    pub(crate) copied: Sums,
    pub(crate) rounded: Option<Rounding>,
    pub(crate) requantized: Option<Requantized>,
    pub(crate) rounded_input: Option<String>,
    pub(crate) dropped_input: Option<String>,
}

/// The name of the dtype that values of codes under scales are written in.
pub(crate) const BF16: &str = "bf16";

/// Writes the values of 8-bit codes in bf16. If that is not exact, it is an error, or `rounding`
/// reports the loss.
pub(crate) fn in_bf16<'env>(
    input: &Input<'env>,
    rounding: bool,
    worker: &Worker<'_, 'env>,
    sink: &Sink,
) -> Result<ConvertedTensor> {
    let tensor = &input.tensor;
    let (bytes_after, report) = write_values::<bf16>(input, NonFinite::Error, worker, sink)?;
    // NaN is the same in both dtypes.
    check::<bf16>(tensor, tensor.name, &report, NonFinite::Error, false)?;
    let mut rounded = Requantized::new(tensor.name, tensor.dtype, BF16);
    let (each, elements) = (input.clone(), tensor.elements() as usize);
    let compare = move |number: usize| {
        each.with_values(band(elements, number), |values| {
            let Values::F32(values) = values else { return BandDifference::default() };
            let after: Vec<f32> = values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
            BandDifference::between(&values, &after)
        })
    };
    worker.each_band(count(elements), compare, |band| {
        rounded.add(&band);
        Ok(())
    })?;
    let same = rounded.differing == 0;
    if !same && !rounding {
        return Err(Error::tensor(tensor.file, tensor.name, microscale::Error::Wrong("a cast to bf16")));
    }
    let mut done = ConvertedTensor { requantized: (!same).then_some(rounded), ..Default::default() };
    done.in_bf16.add(tensor.elements(), tensor.bytes() as u64, bytes_after);
    Ok(done)
}
