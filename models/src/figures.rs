//! A calibration in a few figures per input, for reports.

use std::collections::BTreeMap;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{Device, Tensor};
use microscale_checkpoint::calibration::{INPUTS, KV_AMAX, layer_file};
use serde_json::Value;

use crate::error::Result;
use crate::statistics::{Statistics, UNSEEN, read_json};

/// A column is an outlier if its mean square is more than this multiple of the median column's.
const OUTLIER: f64 = 100.0;

/// Figures of an input of linear layers, or of the inputs of a layer's experts.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct InputFigures {
    /// The input's name, with `*` in place of the number of an expert.
    pub name: String,
    /// The ends of the names of the layers that read it, such as `q_proj`.
    pub layers: Vec<String>,
    /// The number of columns, K.
    pub columns: usize,
    /// The largest magnitude.
    pub amax: f32,
    /// The root mean square. Of experts, all that saw a token count the same.
    pub rms: f64,
    /// Columns with a mean square of more than 100 times the median column's.
    pub outliers: usize,
    /// The share of the outlier columns in the sum of squares, from 0 to 1.
    pub outlier_share: f64,
    /// The number of experts; 0 for inputs of other layers.
    pub experts: usize,
    /// Experts that saw no token.
    pub unseen: usize,
}

/// Sums over the experts of an input.
#[derive(Default)]
struct Sums {
    figures: InputFigures,
    /// Mean squares by column, summed over `seen`.
    squares: Vec<f64>,
    seen: usize,
}

impl Statistics {
    /// Returns the figures of each input of a complete calibration, in the order of layers.
    ///
    /// # Errors
    /// If a file of the directory cannot be read.
    pub fn inputs(&self) -> Result<Vec<InputFigures>> {
        let mut figures = Vec::new();
        for layer in 0..self.layers_done() {
            let mut sums = BTreeMap::new();
            self.add_layer(layer, &mut sums)?;
            figures.extend(sums.into_values().map(Sums::figures));
        }
        Ok(figures)
    }

    /// Returns the largest magnitudes of keys and of values, by the module of the attention.
    ///
    /// # Errors
    /// As for [`Self::inputs`].
    pub fn caches(&self) -> Result<Vec<(String, [f64; 2])>> {
        let amax = read_json(&self.directory().join(KV_AMAX))?;
        let of = |name: &str| amax.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
        let modules = amax.keys().filter_map(|name| name.strip_suffix(".k_cache"));
        let each = modules.map(|module| {
            (module.to_string(), ["k_cache", "v_cache"].map(|end| of(&format!("{module}.{end}"))))
        });
        Ok(each.collect())
    }

    /// Adds the inputs of a decoder layer, by name.
    fn add_layer(&self, layer: usize, sums: &mut BTreeMap<String, Sums>) -> Result<()> {
        let file = self.directory().join(layer_file(layer));
        // SAFETY: the file is this program's own, renamed into place when it was complete.
        let mapped = unsafe { MmapedSafetensors::new(&file)? };
        let load = |name: &str| mapped.load(name, &Device::Cpu);
        let object = |name: &str| self.index().get(name).and_then(Value::as_object);
        let mut added: Vec<&str> = Vec::new();
        for (weight, input) in object(INPUTS).into_iter().flatten() {
            let Some(input) = input.as_str() else { continue };
            let importance = format!("{weight}.importance");
            if mapped.get(&importance).is_err() {
                continue;
            }
            let (name, is_expert) = starred(input);
            let sums = sums.entry(name.clone()).or_default();
            let module = weight.strip_suffix(".weight").unwrap_or(weight);
            let end = module.rsplit('.').next().unwrap_or(module).to_string();
            if !sums.figures.layers.contains(&end) {
                sums.figures.layers.push(end);
            }
            sums.figures.name = name;
            // Layers with one input have the same statistics.
            if added.contains(&input) {
                continue;
            }
            added.push(input);
            let amax = load(&format!("{weight}.input_amax"))?.get(0)?.to_scalar::<f32>()?;
            sums.figures.amax = sums.figures.amax.max(amax);
            let unseen = object(UNSEEN).and_then(|unseen| unseen.get(weight));
            sums.add(&load(&importance)?, is_expert, unseen)?;
        }
        Ok(())
    }
}

impl Sums {
    /// Adds the mean squares `[K]` of an input, or `[experts, K]` of a stack's. `unseen` is the
    /// index' entry.
    fn add(&mut self, importance: &Tensor, is_expert: bool, unseen: Option<&Value>) -> Result<()> {
        let is_stack = importance.rank() == 2;
        let rows = if is_stack { importance.to_vec2::<f32>()? } else { vec![importance.to_vec1::<f32>()?] };
        let listed = |row: usize| {
            unseen.and_then(Value::as_array).is_some_and(|experts| experts.contains(&row.into()))
        };
        for (i, row) in rows.iter().enumerate() {
            self.figures.experts += usize::from(is_stack || is_expert);
            if listed(i) || unseen == Some(&Value::Bool(true)) {
                self.figures.unseen += 1;
                continue;
            }
            self.squares.resize(row.len(), 0.0);
            self.squares.iter_mut().zip(row).for_each(|(sum, square)| *sum += f64::from(*square));
            self.seen += 1;
        }
        self.figures.columns = importance.dims().last().copied().unwrap_or(0);
        Ok(())
    }

    fn figures(self) -> InputFigures {
        let Self { mut figures, mut squares, seen } = self;
        squares.sort_by(f64::total_cmp);
        let all: f64 = squares.iter().sum();
        let limit = OUTLIER * squares.get(squares.len() / 2).copied().unwrap_or(0.0);
        let outliers = &squares[squares.partition_point(|square| *square <= limit)..];
        figures.rms = (all / (seen.max(1) * squares.len().max(1)) as f64).sqrt();
        figures.outliers = outliers.len();
        figures.outlier_share = if all > 0.0 { outliers.iter().sum::<f64>() / all } else { 0.0 };
        figures
    }
}

/// Replaces the number of an expert with `*`. Returns whether there is one.
fn starred(input: &str) -> (String, bool) {
    let parts = input.split_once(".experts.").and_then(|(before, after)| {
        let (expert, rest) = after.split_once('.')?;
        expert.parse::<usize>().ok().map(|_| format!("{before}.experts.*.{rest}"))
    });
    let is_expert = parts.is_some();
    (parts.unwrap_or_else(|| input.into()), is_expert)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_far_above_the_median_are_outliers() {
        let mut sums = Sums::default();
        // Two experts of three saw tokens, with means of 1 except for one column.
        let rows: Vec<f32> = (0..24).map(|i| if i % 8 == 3 { 400.0 } else { 1.0 }).collect();
        let importance = Tensor::from_vec(rows, (3, 8), &Device::Cpu).unwrap();
        sums.add(&importance, false, Some(&serde_json::json!([1]))).unwrap();
        let found = sums.figures();
        assert_eq!((found.columns, found.experts, found.unseen, found.outliers), (8, 3, 1, 1));
        assert!((found.outlier_share - 400.0 / 407.0).abs() < 1e-12);
        assert!((found.rms - (407.0f64 / 8.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn inputs_without_tokens_have_no_outliers() {
        let mut sums = Sums::default();
        let importance = Tensor::zeros(4, candle_core::DType::F32, &Device::Cpu).unwrap();
        sums.add(&importance, true, Some(&Value::Bool(true))).unwrap();
        let found = sums.figures();
        assert_eq!((found.experts, found.unseen, found.outliers, found.rms), (1, 1, 0, 0.0));
    }

    #[test]
    fn numbers_of_experts_are_replaced() {
        let name = "model.layers.3.mlp.experts.17.down";
        assert_eq!(starred(name), ("model.layers.3.mlp.experts.*.down".into(), true));
        for other in ["model.layers.3.mlp.experts.down", "model.layers.3.self_attn.qkv"] {
            assert_eq!(starred(other), (other.into(), false));
        }
    }
}
