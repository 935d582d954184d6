//! Given global scales of layer inputs. Engines use them to quantize a layer's inputs to NVFP4.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use microscale::formats::nvfp4::{Direction, LARGEST};
use microscale::{GlobalScale, HadamardWidth, Words};
use serde_json::Value;

use crate::calibration::transformed;
use crate::checkpoint_formats::storage::{Storage, StoredGlobal};
use crate::error::Result;
use crate::error::given::GivenError;
use crate::names::fused::{Fused, fused};
use crate::names::weight::{expert_layer, module};
use crate::read::json::Object;
use crate::read::tensor::Tensor;

/// Suffixes of scales, with their directions. A number without a suffix is an amax.
const SCALES: [(&str, Direction); 2] =
    [(".input_global_scale", Direction::Divisor), (".input_scale", Direction::Multiplier)];

/// Number given for a layer's inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Given {
    /// The largest magnitude.
    Amax(f32),
    /// The scale itself.
    Scale(GlobalScale),
}

impl Given {
    /// Returns the scale in a direction: 2688 / amax as a divisor, amax / 2688 as a multiplier.
    fn toward(self, direction: Direction) -> GlobalScale {
        match (self, direction) {
            (Self::Amax(amax), Direction::Divisor) => GlobalScale::Divisor(LARGEST / amax),
            (Self::Amax(amax), Direction::Multiplier) => GlobalScale::Multiplier(amax / LARGEST),
            (Self::Scale(scale), direction) => scale.toward(direction),
        }
    }
}

/// Source of the global scales of layer inputs.
#[derive(Clone, Debug)]
pub struct InputScales {
    source: InputScaleSource,
}

#[derive(Clone, Debug)]
enum InputScaleSource {
    /// One amax for the inputs of all layers.
    Amax(f32),
    /// A file, and its numbers by name.
    File(PathBuf, HashMap<String, f32>),
}

/// The scales of a plan's layers.
pub(crate) struct FoundInputScales {
    /// A scale per layer.
    pub(crate) scales: Vec<GlobalScale>,
    /// Unused names of the file.
    pub(crate) unused: Vec<String>,
    /// Experts that have the amax of other experts.
    pub(crate) without_tokens: Vec<String>,
}

impl InputScales {
    /// Uses one scale for all layers, computed from the largest magnitude of their inputs.
    pub fn from_amax(amax: f32) -> Self {
        Self { source: InputScaleSource::Amax(amax) }
    }

    /// Reads the scales from a JSON file: an object of numbers.
    ///
    /// A number called `LAYER` or `LAYER.weight` is the largest magnitude of the layer's inputs.
    /// `LAYER.hadamard_32` is the largest magnitude under a Hadamard transform of that width, for
    /// layers that have it. `LAYER.input_global_scale` is their global scale as a divisor (2688 / amax), and
    /// `LAYER.input_scale` as a multiplier.
    ///
    /// # Errors
    /// - Errors of reading the file.
    /// - [`GivenError::InputScaleFile`](crate::GivenError::InputScaleFile) for a value that is not
    ///   a number.
    /// - [`GivenError::InputScaleRepeated`](crate::GivenError::InputScaleRepeated) for a repeated
    ///   name.
    pub fn read(file: &Path) -> Result<Self> {
        let (mut numbers, object) = (HashMap::new(), Object::read(file)?);
        if let Some(name) = object.repeated_key() {
            return Err(GivenError::InputScaleRepeated { file: file.into(), name }.into());
        }
        for (name, value) in &object.json {
            let number = value.as_f64().map(|number| number as f32);
            let number = number.ok_or_else(|| not_a_number(file, name, value))?;
            numbers.insert(name.clone(), number);
        }
        Ok(Self { source: InputScaleSource::File(file.into(), numbers) })
    }

    /// Returns the file that the scales come from, if any.
    pub(crate) fn file(&self) -> Option<&Path> {
        match &self.source {
            InputScaleSource::Amax(_) => None,
            InputScaleSource::File(file, _) => Some(file),
        }
    }

    /// Describes the source in words.
    pub(crate) fn described(&self) -> String {
        match &self.source {
            InputScaleSource::Amax(amax) => format!("from an amax of {amax}"),
            InputScaleSource::File(file, _) => format!("from {}", file.display()),
        }
    }

    /// Finds the scale of each layer's inputs, in the direction of its storage.
    ///
    /// Layers that serving engines fuse have the same inputs. They share the scale of the largest
    /// amax. An expert whose amax is 0 saw no token in a calibration. It gets the largest amax of
    /// the other experts of its layer.
    ///
    /// # Errors
    /// - [`GivenError::NoInputScale`](crate::GivenError::NoInputScale) if a layer has none.
    /// - [`GivenError::InputScaleTwice`](crate::GivenError::InputScaleTwice) if a layer has
    ///   several.
    /// - [`GivenError::InputScaleNumber`](crate::GivenError::InputScaleNumber) for a number that
    ///   cannot be a global scale.
    pub(crate) fn find<'a>(
        &self,
        tensors: impl Iterator<Item = (Tensor<'a>, &'static StoredGlobal, Option<HadamardWidth>)>,
    ) -> Result<FoundInputScales> {
        let (mut found, mut layers, mut used) = (Vec::new(), HashMap::new(), BTreeSet::new());
        let tensors: Vec<_> = tensors.collect();
        let given = tensors.iter().map(|(tensor, _, hadamard)| self.of(tensor.name, *hadamard, &mut used));
        let mut given = given.collect::<Result<Vec<_>>>()?;
        let names: Vec<_> = tensors.iter().map(|(tensor, ..)| tensor.name).collect();
        let without_tokens = borrow_amax(&names, &mut given);
        for ((tensor, storage, _), given) in tensors.into_iter().zip(given) {
            let scale = given.toward(storage.direction);
            if !scale.in_range() {
                let (source, tensor) = (self.described(), tensor.name.into());
                return Err(GivenError::InputScaleNumber { source_of: source, tensor, scale }.into());
            }
            let layer = fused(tensor.name, tensor.shape);
            if let Some(layer) = &layer {
                let shared = layers.entry(layer.clone()).or_insert(scale);
                *shared = larger(*shared, scale);
            }
            found.push((layer, scale));
        }
        let shared = |layer: Option<Fused>, scale| {
            layer.and_then(|layer| layers.get(&layer)).copied().unwrap_or(scale)
        };
        let scales = found.into_iter().map(|(layer, scale)| shared(layer, scale)).collect();
        let unused = match &self.source {
            InputScaleSource::Amax(_) => Vec::new(),
            InputScaleSource::File(_, numbers) => {
                let mut unused: Vec<_> =
                    numbers.keys().filter(|name| !used.contains(*name)).cloned().collect();
                unused.sort();
                unused
            }
        };
        Ok(FoundInputScales { scales, unused, without_tokens })
    }

    /// Returns the number that is given for a weight.
    fn of(
        &self,
        weight: &str,
        hadamard: Option<HadamardWidth>,
        used: &mut BTreeSet<String>,
    ) -> Result<Given> {
        let (file, numbers) = match &self.source {
            InputScaleSource::Amax(amax) => return Ok(Given::Amax(*amax)),
            InputScaleSource::File(file, numbers) => (file, numbers),
        };
        let layer = module(weight);
        // The weight and its layer have the same name if the weight's name lacks `.weight`.
        let weights = [Some(layer), Some(weight).filter(|weight| *weight != layer)].into_iter().flatten();
        // A calibration has the amax under each transform.
        for width in HadamardWidth::values().map(Some).chain([None]) {
            let known = weights.clone().map(|name| transformed(name, width));
            used.extend(known.filter(|name| numbers.contains_key(name)));
        }
        let names = weights.map(|name| (transformed(name, hadamard), None));
        let names = names.chain(SCALES.map(|(end, direction)| (format!("{layer}{end}"), Some(direction))));
        let mut given = names.filter_map(|(name, direction)| {
            let number = *numbers.get(&name)?;
            let value = direction
                .map_or(Given::Amax(number), |direction| Given::Scale(GlobalScale::of(direction, number)));
            Some((name, value))
        });
        let (file, tensor) = (file.clone(), weight.to_string());
        match (given.next(), given.next()) {
            (None, _) => Err(GivenError::NoInputScale {
                file,
                tensor,
                layer: layer.into(),
                amax: transformed(layer, hadamard),
            }
            .into()),
            (Some((first, _)), Some((second, _))) => {
                Err(GivenError::InputScaleTwice { file, tensor, first, second }.into())
            }
            (Some((name, value)), None) => {
                used.insert(name);
                Ok(value)
            }
        }
    }
}

/// Gives experts whose amax is 0 the largest amax of the same layer's other experts. Returns the
/// experts.
fn borrow_amax(weights: &[&str], given: &mut [Given]) -> Vec<String> {
    let mut largest: HashMap<_, f32> = HashMap::new();
    for (weight, given) in weights.iter().zip(&*given) {
        if let (Some(layer), Given::Amax(amax)) = (expert_layer(weight), *given) {
            let most = largest.entry(layer).or_default();
            *most = most.max(amax);
        }
    }
    let mut without_tokens = Vec::new();
    for (weight, given) in weights.iter().zip(given) {
        let most = expert_layer(weight).and_then(|layer| largest.get(&layer));
        if let Some(most) = most.filter(|most| **most > 0.0)
            && *given == Given::Amax(0.0)
        {
            *given = Given::Amax(*most);
            without_tokens.push(module(weight).to_string());
        }
    }
    without_tokens
}

/// Returns the scale with the larger amax.
fn larger(a: GlobalScale, b: GlobalScale) -> GlobalScale {
    match a.direction() {
        Direction::Divisor if b.value() < a.value() => b,
        Direction::Multiplier if b.value() > a.value() => b,
        _ => a,
    }
}

fn not_a_number(file: &Path, name: &str, value: &Value) -> crate::error::Error {
    let value = value.to_string().chars().take(40).collect();
    GivenError::InputScaleFile { file: file.into(), name: name.into(), value }.into()
}

impl Storage {
    /// Returns how a layer's input scale is stored next to its weight, if it can be.
    pub(crate) fn stored_input(&self, weight: &str) -> Option<&StoredGlobal> {
        let stored = self.input_scale.as_ref()?;
        stored.name_for(weight).map(|_| stored)
    }
}
