//! Statistics of the inputs of linear layers: importance, Hessians, largest magnitudes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, D, DType, InplaceOp2, Layout, Module, Tensor, bail};
use microscale::{HadamardWidth, Words};
use microscale_candle::hadamard;
use microscale_checkpoint::calibration::may_be_transformed;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::pass::Pass;
use crate::progress::{Meter, OnProgress};
use crate::source::{Layer, LayerName, Source, Wrapped, lock};
use crate::statistics::{ColumnStatistics, Identity, InputStatistics, LayerStatistics, Statistics};
use crate::text::Window;

/// Options of a calibration.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateOptions {
    /// The dtype of hidden states: f32, or bf16 as engines have it.
    pub dtype: DType,
    /// Whether to compute the Hessians, XᵀX, that GPTQ needs. They take K² floats per input.
    pub hessians: bool,
}

/// Runs windows through a model and writes statistics of each layer to a directory.
///
/// One decoder layer is in memory at a time, with its statistics and the hidden states of all
/// windows. A directory of an interrupted run with the same identity is continued after the last
/// complete layer.
///
/// # Errors
/// [`Error::Statistics`] if the directory belongs to another run, [`Error::NotFinite`] for NaN and
/// infinities, [`Error::Interrupted`] if the callback interrupts, and errors of reading, of writing
/// and of arithmetic.
pub fn calibrate(
    source: &dyn Source,
    config: &Config,
    windows: &[Window],
    options: CalibrateOptions,
    identity: &Identity,
    directory: &Path,
    on_progress: &mut OnProgress<'_>,
) -> Result<Statistics> {
    let mut statistics = Statistics::create_or_continue(directory, identity)?;
    if statistics.is_complete() {
        return Ok(statistics);
    }
    let mut pass = match statistics.hidden_states(source.device())? {
        Some((batches, next)) => Pass::resumed(source, config, batches, next)?,
        None => Pass::new(source, config, windows, options.dtype)?,
    };
    let mut meter = Meter::new(pass.batches().len() * config.layers, on_progress);
    for layer in 0..pass.next_layer() {
        pass.batches().iter().try_for_each(|_| meter.batch(layer))?;
    }
    for layer in pass.next_layer()..config.layers {
        meter.report(layer)?;
        let recorder = Recorder { hessians: options.hessians, ..Recorder::default() };
        let recorded = Wrapped {
            source,
            layers: |name: &LayerName, layers: Vec<Layer>| Ok(recorder.record(name, layers)),
            cache: |name: &str| Some(recorder.record_cache(name)),
        };
        pass.advance(&recorded, config, || meter.batch(layer))?;
        statistics.write_layer(layer, &recorder.finish()?, pass.batches())?;
    }
    statistics.finish()?;
    Ok(statistics)
}

/// Records the inputs of the linear layers of a decoder layer.
#[derive(Default)]
struct Recorder {
    hessians: bool,
    /// Sums by input, one per expert of a stack.
    inputs: Mutex<BTreeMap<String, Vec<Shared>>>,
    /// The input of each layer, by the name of its weights, and whether it is a stack.
    layers: Mutex<BTreeMap<String, (String, bool)>>,
    caches: Mutex<BTreeMap<String, Arc<Mutex<f32>>>>,
}

type Shared = Arc<Mutex<Sums>>;

/// Sums over the tokens of an input.
struct Sums {
    tokens: usize,
    /// Of the input itself.
    plain: ColumnSums,
    /// Of the input under each transform that fits it.
    transformed: Vec<(HadamardWidth, ColumnSums)>,
    /// Σ x·xᵀ.
    hessian: Option<Tensor>,
}

/// Sums of columns.
struct ColumnSums {
    amax: f32,
    /// Σ x².
    squares: Vec<f64>,
}

impl ColumnSums {
    fn new(columns: usize) -> Self {
        Self { amax: 0.0, squares: vec![0.0; columns] }
    }

    /// Adds rows `[tokens, K]` in f32.
    fn add(&mut self, x: &Tensor) -> candle_core::Result<()> {
        let squares = x.sqr()?.sum(0)?.to_vec1::<f32>()?;
        self.squares.iter_mut().zip(squares).for_each(|(sum, square)| *sum += f64::from(square));
        self.amax = larger(self.amax, amax(x)?);
        Ok(())
    }

    fn statistics(&self, tokens: f64) -> ColumnStatistics {
        let importance = self.squares.iter().map(|sum| (sum / tokens) as f32).collect();
        ColumnStatistics { amax: self.amax, importance }
    }
}

impl Recorder {
    /// Wraps layers. Of several layers with one input, only the first records it.
    fn record(&self, name: &LayerName, layers: Vec<Layer>) -> Vec<Layer> {
        lock(&self.layers).insert(name.weight(), (name.input.clone(), name.stack.is_some()));
        let mut inputs = lock(&self.inputs);
        if inputs.contains_key(&name.input) {
            return layers;
        }
        let sums: Vec<Shared> = layers.iter().map(|_| Arc::new(Mutex::new(Sums::new(name)))).collect();
        inputs.insert(name.input.clone(), sums.clone());
        let hessians = self.hessians;
        layers
            .into_iter()
            .zip(sums)
            .map(|(layer, sums)| Box::new(RecordedLayer { layer, sums, hessians }) as Layer)
            .collect()
    }

    fn record_cache(&self, name: &str) -> Layer {
        let amax = lock(&self.caches).entry(name.into()).or_default().clone();
        Box::new(RecordedCache(amax))
    }

    /// Returns the means.
    fn finish(self) -> Result<LayerStatistics> {
        let inputs = self.inputs.into_inner().unwrap_or_else(PoisonError::into_inner);
        let inputs = inputs.into_iter().map(|(name, sums)| {
            let each = sums.iter().map(|sums| lock(sums).statistics()).collect::<Result<Vec<_>>>()?;
            each.iter().try_for_each(|each| finite(&name, each.plain.amax))?;
            Ok((name, each))
        });
        let caches = self.caches.into_inner().unwrap_or_else(PoisonError::into_inner);
        let caches = caches.into_iter().map(|(name, amax)| {
            let amax = *lock(&amax);
            finite(&name, amax)?;
            Ok((name, amax))
        });
        Ok(LayerStatistics {
            inputs: inputs.collect::<Result<_>>()?,
            layers: self.layers.into_inner().unwrap_or_else(PoisonError::into_inner),
            caches: caches.collect::<Result<_>>()?,
        })
    }
}

impl Sums {
    /// Experts have no sums under transforms, stored in stacks or one by one.
    fn new(name: &LayerName) -> Self {
        let fits = |width: &HadamardWidth| name.inputs.is_multiple_of(width.columns());
        let transformed = name.stack.is_none() && may_be_transformed(&name.module);
        let widths = HadamardWidth::values().filter(|width| transformed && fits(width));
        let transformed = widths.map(|width| (width, ColumnSums::new(name.inputs))).collect();
        Self { tokens: 0, plain: ColumnSums::new(name.inputs), transformed, hessian: None }
    }

    /// Adds rows `[tokens, K]`.
    fn add(&mut self, x: &Tensor, hessians: bool) -> candle_core::Result<()> {
        let x = x.to_dtype(DType::F32)?;
        self.tokens += x.dim(0)?;
        self.plain.add(&x)?;
        for (width, sums) in &mut self.transformed {
            sums.add(&hadamard(&x, *width)?)?;
        }
        if hessians {
            let product = x.t()?.matmul(&x)?;
            self.hessian = Some(match self.hessian.take() {
                Some(sum) if sum.device().is_cpu() => {
                    sum.inplace_op2(&product, &AddInPlace)?;
                    sum
                }
                Some(sum) => (sum + product)?,
                None => product,
            });
        }
        Ok(())
    }

    fn statistics(&mut self) -> Result<InputStatistics> {
        let tokens = self.tokens.max(1) as f64;
        let hessian = self.hessian.take().map(|sum| sum / tokens).transpose()?;
        Ok(InputStatistics {
            tokens: self.tokens,
            plain: self.plain.statistics(tokens),
            transformed: self
                .transformed
                .iter()
                .map(|(width, sums)| (*width, sums.statistics(tokens)))
                .collect(),
            hessian,
        })
    }
}

/// Adds a matrix in f32 to another one without a third: these are the largest ones in memory.
struct AddInPlace;

impl InplaceOp2 for AddInPlace {
    fn name(&self) -> &'static str {
        "add-in-place"
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        sum_layout: &Layout,
        other: &CpuStorage,
        other_layout: &Layout,
    ) -> candle_core::Result<()> {
        let ranges = (sum_layout.contiguous_offsets(), other_layout.contiguous_offsets());
        let (CpuStorage::F32(sum), CpuStorage::F32(other), (Some(to), Some(from))) = (sum, other, ranges)
        else {
            bail!("sums of products are in f32, without gaps");
        };
        let pairs = sum[to.0..to.1].iter_mut().zip(&other[from.0..from.1]);
        pairs.for_each(|(sum, other)| *sum += other);
        Ok(())
    }
}

/// Returns the largest magnitude of rows, or NaN if there is one.
fn amax(x: &Tensor) -> candle_core::Result<f32> {
    let x = x.to_dtype(DType::F32)?;
    if x.device().is_cpu() {
        let values = x.flatten_all()?.to_vec1::<f32>()?;
        return Ok(values.into_iter().fold(0.0, |most, x| larger(most, x.abs())));
    }
    // A GPU's maximum leaves NaN out. 0 · x is NaN for NaN and infinities.
    let most = x.abs()?.max(D::Minus1)?.max(0)?.to_scalar()?;
    let invalid = (x * 0.0)?.sum(D::Minus1)?.sum(0)?.to_scalar()?;
    Ok(larger(most, invalid))
}

/// Returns the larger number, or NaN if one is NaN.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a >= b { a } else { b }
}

/// Checks the largest magnitude of an input.
fn finite(name: &str, amax: f32) -> Result<()> {
    if amax.is_finite() { Ok(()) } else { Err(Error::NotFinite { name: name.into() }) }
}

/// A layer that adds its input to sums.
struct RecordedLayer {
    layer: Layer,
    sums: Shared,
    hessians: bool,
}

impl Module for RecordedLayer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        lock(&self.sums).add(x, self.hessians)?;
        self.layer.forward(x)
    }
}

/// Keeps the largest magnitude of keys or values.
struct RecordedCache(Arc<Mutex<f32>>);

impl Module for RecordedCache {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let found = amax(x)?;
        let mut most = lock(&self.0);
        *most = larger(*most, found);
        Ok(x.clone())
    }
}
