//! The directory of a calibration. [`microscale_checkpoint::calibration`] has its names.
//!
//! Until the calibration is complete, `hidden-N.safetensors` has the hidden states before layer N.
//! The index is written after it, and tells which N counts, so that a run may end at any moment.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::{fs, io};

use candle_core::{Device, Tensor};
use microscale::HadamardWidth;
use microscale_checkpoint::calibration::{
    COMPLETE, IMPORTANCE, INDEX, INPUT_AMAX, INPUTS, KV_AMAX, RUN, hessian as hessian_name, layer_file,
    transformed,
};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::pass::Batch;

/// What [`transformed`] puts before the width of a transform.
const UNDER: &str = ".hadamard_";

/// The index' object of experts that saw no token.
pub(crate) const UNSEEN: &str = "unseen_experts";

/// The model, the text and the options of a calibration. Only the same run is continued.
#[derive(Clone, Debug, PartialEq)]
pub struct Identity(pub Map<String, Value>);

/// Statistics of the columns of an input.
#[derive(Clone, Debug)]
pub(crate) struct ColumnStatistics {
    /// The largest magnitude, which is finite for inputs that are.
    pub(crate) amax: f32,
    /// Mean squares.
    pub(crate) importance: Vec<f32>,
}

/// Statistics of one input, or of one expert's.
#[derive(Clone, Debug)]
pub(crate) struct InputStatistics {
    /// Tokens that were seen.
    pub(crate) tokens: usize,
    /// Of the input itself.
    pub(crate) plain: ColumnStatistics,
    /// Of the input under each transform that fits it. Inputs of experts have none.
    pub(crate) transformed: Vec<(HadamardWidth, ColumnStatistics)>,
    /// XᵀX divided by the number of tokens, `[K, K]` in f32.
    pub(crate) hessian: Option<Tensor>,
}

/// Statistics of a decoder layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerStatistics {
    /// By input, one entry per expert of a stack.
    pub(crate) inputs: BTreeMap<String, Vec<InputStatistics>>,
    /// The input of each layer by the name of its weights, and whether it is a stack.
    pub(crate) layers: BTreeMap<String, (String, bool)>,
    /// The largest magnitude of keys and of values.
    pub(crate) caches: BTreeMap<String, f32>,
}

/// A directory of statistics.
#[derive(Debug)]
pub struct Statistics {
    directory: PathBuf,
    index: Map<String, Value>,
}

impl Statistics {
    /// Creates a directory, or continues an interrupted run with the same identity.
    pub(crate) fn create_or_continue(directory: &Path, identity: &Identity) -> Result<Self> {
        let file = directory.join(INDEX);
        if file.exists() {
            let statistics = Self { directory: directory.into(), index: read_json(&file)? };
            if statistics.index.get(RUN) != Some(&Value::Object(identity.0.clone())) {
                let problem = "it has statistics of another model, text or options; choose another directory";
                return Err(statistics.error(problem));
            }
            return Ok(statistics);
        }
        fs::create_dir_all(directory).map_err(|source| Error::Io { path: directory.into(), source })?;
        let mut index = Map::new();
        index.insert(RUN.into(), Value::Object(identity.0.clone()));
        index.insert("layers".into(), json!(0));
        index.insert(COMPLETE.into(), json!(false));
        for list in [UNSEEN, INPUTS] {
            index.insert(list.into(), json!({}));
        }
        let statistics = Self { directory: directory.into(), index };
        statistics.write_index()?;
        Ok(statistics)
    }

    /// Returns the hidden states after the last complete layer, on a device, and the next layer's
    /// number.
    pub(crate) fn hidden_states(&self, device: &Device) -> Result<Option<(Vec<Batch>, usize)>> {
        let next = self.layers_done();
        let file = self.directory.join(hidden_file(next));
        if next == 0 || !file.exists() {
            return Ok(None);
        }
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu)?;
        let mut batches = Vec::new();
        while let Some(hidden) = tensors.remove(&format!("hidden.{}", batches.len())) {
            let lengths = tensors.remove(&format!("lengths.{}", batches.len()));
            let lengths = lengths.ok_or_else(|| self.error("the file of hidden states has no lengths"))?;
            let lengths = lengths.to_vec1::<u32>()?.into_iter().map(|length| length as usize).collect();
            batches.push(Batch { hidden: hidden.to_device(device)?, lengths });
        }
        Ok(Some((batches, next)))
    }

    /// Returns whether the calibration is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.index.get(COMPLETE) == Some(&json!(true))
    }

    pub(crate) fn layers_done(&self) -> usize {
        self.index["layers"].as_u64().unwrap_or(0) as usize
    }

    /// Writes a layer's statistics and the hidden states after it.
    pub(crate) fn write_layer(
        &mut self,
        layer: usize,
        statistics: &LayerStatistics,
        batches: &[Batch],
    ) -> Result<()> {
        let mut tensors = HashMap::new();
        for (weight, (input, is_stack)) in &statistics.layers {
            let Some(each) = statistics.inputs.get(input) else { continue };
            let columns = each.first().map_or(0, |each| each.plain.importance.len());
            let numbers = each.iter().flat_map(|each| each.plain.importance.iter().copied()).collect();
            let shape: &[usize] = if *is_stack { &[each.len(), columns] } else { &[columns] };
            tensors.insert(format!("{weight}.importance"), tensor(numbers, shape)?);
            let most = each.iter().map(|each| each.plain.amax).fold(0.0, f32::max);
            tensors.insert(format!("{weight}.input_amax"), tensor(vec![most], &[1])?);
            for (width, under) in each.first().into_iter().flat_map(|each| &each.transformed) {
                let name = transformed(weight, Some(*width));
                tensors.insert(format!("{name}.importance"), tensor(under.importance.clone(), &[columns])?);
                tensors.insert(format!("{name}.input_amax"), tensor(vec![under.amax], &[1])?);
            }
            self.insert(INPUTS, weight, json!(input));
            let unseen: Vec<usize> = (0..each.len()).filter(|i| each[*i].tokens == 0).collect();
            if !unseen.is_empty() {
                let experts = if *is_stack { json!(unseen) } else { json!(true) };
                self.insert(UNSEEN, weight, experts);
            }
        }
        for (input, each) in &statistics.inputs {
            // Experts without tokens have no Hessian.
            for (expert, each) in each.iter().enumerate() {
                if let Some(hessian) = &each.hessian {
                    let expert = statistics.is_stack(input).then_some(expert);
                    tensors.insert(hessian_name(input, expert), hessian.clone());
                }
            }
        }
        for (name, amax) in &statistics.caches {
            tensors.insert(format!("{name}.amax"), tensor(vec![*amax], &[1])?);
        }
        self.write_tensors(&layer_file(layer), &tensors)?;

        let mut hidden = HashMap::new();
        for (i, batch) in batches.iter().enumerate() {
            hidden.insert(format!("hidden.{i}"), batch.hidden.contiguous()?);
            let lengths: Vec<u32> = batch.lengths.iter().map(|length| *length as u32).collect();
            hidden.insert(format!("lengths.{i}"), Tensor::new(lengths, &Device::Cpu)?);
        }
        self.write_tensors(&hidden_file(layer + 1), &hidden)?;
        self.index.insert("layers".into(), json!(layer + 1));
        self.write_index()?;
        self.remove(&hidden_file(layer))
    }

    /// Writes the files of the whole model.
    pub(crate) fn finish(&mut self) -> Result<()> {
        let (mut importance, mut inputs, mut caches) = (HashMap::new(), Map::new(), Map::new());
        for layer in 0..self.layers_done() {
            let file = self.directory.join(layer_file(layer));
            // SAFETY: the file is this program's own, renamed into place when it was complete.
            let mapped = unsafe { candle_core::safetensors::MmapedSafetensors::new(&file)? };
            let mut names: Vec<_> = mapped.tensors().into_iter().map(|(name, _)| name).collect();
            names.sort();
            for name in names {
                let number = || mapped.load(&name, &Device::Cpu)?.get(0)?.to_scalar::<f32>();
                if name.ends_with(".importance") {
                    importance.insert(name.clone(), mapped.load(&name, &Device::Cpu)?);
                } else if let Some(weight) = name.strip_suffix(".input_amax") {
                    // A transform follows the name of the weight.
                    let (weight, under) = weight.split_at(weight.rfind(UNDER).unwrap_or(weight.len()));
                    let module = weight.strip_suffix(".weight").unwrap_or(weight);
                    inputs.insert(format!("{module}{under}"), json!(number()?));
                } else if let Some(cache) = name.strip_suffix(".amax") {
                    caches.insert(cache.into(), json!(number()?));
                }
            }
        }
        self.write_tensors(IMPORTANCE, &importance)?;
        self.write_file(INPUT_AMAX, &pretty(&inputs))?;
        self.write_file(KV_AMAX, &pretty(&caches))?;
        self.index.insert(COMPLETE.into(), json!(true));
        self.write_index()?;
        // An interrupted run may have left one more.
        (0..=self.layers_done()).try_for_each(|layer| self.remove(&hidden_file(layer)))
    }

    /// Returns the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns calibration.json.
    pub fn index(&self) -> &Map<String, Value> {
        &self.index
    }

    /// Returns the weights of experts that saw no token, and which experts of a stack, in words.
    pub fn unseen(&self) -> Vec<(&str, String)> {
        let unseen = self.index.get(UNSEEN).and_then(Value::as_object);
        let words = |experts: &Value| match experts.as_array() {
            Some(experts) => {
                let numbers: Vec<_> = experts.iter().map(Value::to_string).collect();
                format!("experts {}", numbers.join(", "))
            }
            None => "its expert".into(),
        };
        unseen.into_iter().flatten().map(|(weight, experts)| (weight.as_str(), words(experts))).collect()
    }

    /// Inserts an entry of an object in the index.
    fn insert(&mut self, object: &str, name: &str, value: Value) {
        if let Some(Value::Object(object)) = self.index.get_mut(object) {
            object.insert(name.into(), value);
        }
    }

    /// Removes a file if it is there.
    fn remove(&self, name: &str) -> Result<()> {
        let path = self.directory.join(name);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::Io { path, source }),
            _ => Ok(()),
        }
    }

    fn write_index(&self) -> Result<()> {
        self.write_file(INDEX, &pretty(&self.index))
    }

    /// Writes a file under another name and renames it, so that it is complete or missing.
    fn write_file(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        let partial = self.directory.join(format!("{name}.partial"));
        let write = fs::write(&partial, text).and_then(|()| fs::rename(&partial, &path));
        write.map_err(|source| Error::Io { path, source })
    }

    fn write_tensors(&self, name: &str, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let path = self.directory.join(name);
        let partial = self.directory.join(format!("{name}.partial"));
        let on_cpu = tensors.iter().map(|(name, tensor)| Ok((name, tensor.to_device(&Device::Cpu)?)));
        let on_cpu = on_cpu.collect::<candle_core::Result<HashMap<_, _>>>()?;
        candle_core::safetensors::save(&on_cpu, &partial)?;
        fs::rename(&partial, &path).map_err(|source| Error::Io { path, source })
    }

    fn error(&self, problem: &str) -> Error {
        Error::Statistics { path: self.directory.clone(), problem: problem.into() }
    }
}

impl LayerStatistics {
    /// Returns whether layers of a stack have this input.
    fn is_stack(&self, input: &str) -> bool {
        self.layers.values().any(|(of, is_stack)| of == input && *is_stack)
    }
}

/// Returns the file of the hidden states before a layer.
fn hidden_file(layer: usize) -> String {
    format!("hidden-{layer}.safetensors")
}

fn pretty(object: &Map<String, Value>) -> String {
    format!("{:#}\n", Value::Object(object.clone()))
}

pub(crate) fn read_json(file: &Path) -> Result<Map<String, Value>> {
    let text = fs::read_to_string(file).map_err(|source| Error::Io { path: file.into(), source })?;
    serde_json::from_str(&text)
        .map_err(|error| Error::Statistics { path: file.into(), problem: error.to_string() })
}

/// Returns a tensor of numbers.
fn tensor(numbers: Vec<f32>, shape: &[usize]) -> candle_core::Result<Tensor> {
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}
