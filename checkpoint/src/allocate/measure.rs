//! The loss of each tensor in each format, as quantizing would give it. Nothing is written.

use std::sync::Arc;

use microscale::Device;

use crate::allocate::weighted::Squares;
use crate::error::Result;
use crate::pipeline::{Worker, map};
use crate::plan::Plan;
use crate::plan::importance::Columns;
use crate::progress::{Meter, OnProgress};
use crate::quantize::chooser::Chooser;
use crate::quantize::source::Source;

/// A tensor to measure.
pub(crate) struct Unit<'a> {
    /// The number of its job, the same in every plan.
    pub(crate) job: usize,
    pub(crate) name: &'a str,
    /// Bytes in the input.
    pub(crate) bytes: u64,
    pub(crate) elements: u64,
    /// The weights of its columns; `None` if its relative squared error is measured.
    pub(crate) columns: Option<Arc<Columns>>,
}

/// Measures tensors under plans that differ in the format only. Returns the squares of each tensor
/// in each plan, `None` where the plan copies it.
///
/// Without weights of columns, the signal is the number of elements, as if their mean square were
/// 1, and the noise is in proportion.
///
/// # Errors
/// The errors of quantizing, and [`Error::Interrupted`](crate::Error::Interrupted).
pub(crate) fn measure<'env>(
    plans: &'env [Plan<'env>],
    choosers: &'env [Chooser<'env>],
    units: &'env [Unit<'env>],
    devices: &'env [Device],
    progress: &mut OnProgress<'_>,
) -> Result<Vec<Vec<Option<Squares>>>> {
    let mut meter = Meter::new(units.iter().map(|unit| unit.bytes).sum(), progress);
    let each = |unit: &'env Unit<'env>, worker: &Worker<'_, 'env>| -> Result<Vec<_>> {
        let plans = plans.iter().zip(choosers);
        plans.map(|(plan, chooser)| squares(plan, chooser, unit, worker)).collect()
    };
    map(units, devices, &mut meter, |unit| (unit.name, unit.bytes), &each)
}

/// Measures a tensor under one plan.
fn squares<'env>(
    plan: &'env Plan<'env>,
    chooser: &'env Chooser<'env>,
    unit: &'env Unit<'env>,
    worker: &Worker<'_, 'env>,
) -> Result<Option<Squares>> {
    let job = &plan.jobs[unit.job];
    let Some(of_tensor) = job.plan.quantize() else { return Ok(None) };
    let storage = plan.recipe_of(of_tensor).storage;
    let matrix = Source::matrix(plan, of_tensor, unit.job, worker.device)?;
    let source = Source::new(plan, of_tensor, unit.job, worker.device, matrix.as_ref())?;
    let recipe = chooser.recipes_for(&source, &[], worker)?.recipe;
    let mut sums = Squares::default();
    let columns = unit.columns.as_deref();
    let of_rows = move |rows, quantized| match columns {
        Some(columns) => Squares::of_rows(&job.tensor, storage, columns, rows, quantized),
        None => Ok(Squares::default()),
    };
    let stored = source.store(recipe, true, worker, of_rows, |of_rows| {
        sums = sums.with(of_rows);
        Ok(())
    })?;
    if columns.is_none() {
        let signal = unit.elements as f64;
        // NaN means that no value was compared.
        let relative = stored.errors.relative_squared_error().max(0.0);
        sums = Squares { noise: relative * signal, signal };
    }
    plan.checkpoint().forget(&job.tensor);
    Ok(Some(sums))
}
