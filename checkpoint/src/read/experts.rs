//! Splits tensors with all experts of a layer into one tensor per expert, for engines that expect
//! those.
//!
//! | in the file | replaced by |
//! |---|---|
//! | `X.experts.gate_up_proj` [E, 2·I, H], or transposed [E, H, 2·I] | `X.experts.N.gate_proj.weight` and `up_proj.weight` [I, H] |
//! | `X.experts.down_proj` [E, H, I], or transposed [E, I, H] | `X.experts.N.down_proj.weight` [H, I] |
//!
//! Gates are the first half. gpt-oss interleaves gates and up projections and has biases. It is not
//! split, because all engines read its own checkpoint format.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::limits::check_tensors;
use crate::names::architectures::Experts as Stored;
use crate::names::weight::{EXPERTS, WEIGHT};
use crate::read::checkpoint::{Checkpoint, places};
use crate::read::columns::TransposedColumns;
use crate::read::config::Config;
use crate::read::shard::{Shard, StoredTensor};
use crate::read::values::float_dtype;

const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";

/// The experts of a layer, from the tensor of their gates.
struct Experts {
    layout: Layout,
    count: usize,
    /// Rows of a gate or up projection.
    intermediate: usize,
    /// The model's hidden size.
    hidden: usize,
}

impl Experts {
    /// The shape of the tensor of down projections.
    fn down(&self) -> [usize; 3] {
        match self.layout {
            Layout::Rows => [self.count, self.hidden, self.intermediate],
            Layout::Transposed => [self.count, self.intermediate, self.hidden],
        }
    }
}

/// How an expert's matrix is stored in the tensor of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Row-major, [out, in].
    Rows,
    /// Transposed, [in, out].
    Transposed,
}

impl Checkpoint {
    /// Returns whether loaders need experts split that lie in one tensor.
    pub(crate) fn needs_split_experts(&self) -> bool {
        let is_joined =
            |tensor: &StoredTensor| is_of_all_experts(&tensor.name) && float_dtype(tensor.dtype).is_some();
        self.naming.experts() == Stored::ApartIfQuantized
            && self.shards.iter().flat_map(|shard| &shard.stored).any(is_joined)
    }

    /// Splits tensors with all experts of a layer into one tensor per expert, as
    /// [`OpenOptions::split_experts`](crate::OpenOptions::split_experts) describes.
    pub(crate) fn split_experts(&mut self) -> Result<()> {
        let hidden = self.config.as_ref().and_then(hidden_size);
        let all = self.experts(hidden)?;
        let mut renamed = HashMap::new();
        for shard in &mut self.shards {
            let mut stored = Vec::with_capacity(shard.stored.len());
            for tensor in std::mem::take(&mut shard.stored) {
                match parts_of_name(&tensor.name).and_then(|(experts, _)| all.get(experts)) {
                    Some(Experts { layout, .. }) => {
                        let experts = split(&tensor, *layout);
                        let names = experts.iter().map(|expert| expert.name.clone()).collect();
                        renamed.insert(tensor.name, names);
                        stored.extend(experts);
                    }
                    None => stored.push(tensor),
                }
            }
            shard.stored = stored;
        }
        if renamed.is_empty() {
            return Err(Error::Format(FormatError::NothingToSplit { path: self.path.clone() }));
        }
        if let Some(index) = &mut self.index {
            index.replace(&renamed);
        }
        self.places = places(&self.shards)?;
        Ok(())
    }

    /// The experts of each layer, by the name in front of `.experts.`.
    fn experts(&self, hidden: Option<usize>) -> Result<HashMap<String, Experts>> {
        let stored =
            || self.shards.iter().flat_map(|shard| shard.stored.iter().map(move |tensor| (shard, tensor)));
        let names: HashSet<&str> = stored().map(|(_, tensor)| &*tensor.name).collect();
        let mut all = HashMap::new();
        for (shard, tensor) in stored() {
            let Some((experts, GATE_UP)) = parts_of_name(&tensor.name) else { continue };
            let failed = |why: String| not_split(shard, tensor, why);
            if names.contains(&*format!("{}_bias", tensor.name)) {
                return Err(failed(
                    "it has biases, and gates in turns with up, as gpt-oss; use --to gpt-oss".into(),
                ));
            }
            let [count, first, second] = *tensor.shape else {
                return Err(failed(format!(
                    "it has {} dimensions, and three are expected",
                    tensor.shape.len()
                )));
            };
            let Some(hidden) = hidden else {
                return Err(failed(
                    "config.json has no hidden_size, which distinguishes rows from columns; add it".into(),
                ));
            };
            let layout = match [first, second].map(|size| size == hidden) {
                // Both sizes fit. The architecture decides, as in published files of this shape.
                [true, true] if self.is_transposed() => Layout::Transposed,
                [_, true] if first % 2 == 0 => Layout::Rows,
                [true, _] if second % 2 == 0 => Layout::Transposed,
                _ => {
                    let why = format!(
                        "it is [{first}, {second}] for each, and neither is config.json's hidden_size, {hidden}"
                    );
                    return Err(failed(why));
                }
            };
            let intermediate = if layout == Layout::Rows { first } else { second } / 2;
            all.insert(experts.to_owned(), Experts { layout, count, intermediate, hidden });
        }
        let mut experts_in_all = 0usize;
        for (shard, tensor) in stored() {
            let Some((experts, matrix)) = parts_of_name(&tensor.name) else { continue };
            let failed = |why: String| not_split(shard, tensor, why);
            let Some(of_layer) = all.get(experts) else {
                return Err(failed(format!(
                    "there is no {experts}{EXPERTS}{GATE_UP}; complete the checkpoint"
                )));
            };
            if float_dtype(tensor.dtype).is_none() {
                return Err(failed(format!(
                    "{} is not a float type; dequantize the checkpoint first",
                    tensor.dtype
                )));
            }
            if tensor.range.is_empty() {
                return Err(failed("it is empty".into()));
            }
            experts_in_all = experts_in_all.saturating_add(*tensor.shape.first().unwrap_or(&0));
            check_tensors(experts_in_all.saturating_mul(2)).map_err(failed)?;
            if matrix == DOWN && tensor.shape != of_layer.down() {
                let (found, expected) = (&tensor.shape, of_layer.down());
                return Err(failed(format!(
                    "its sizes are {found:?}, and {expected:?} fit those of gate and up"
                )));
            }
            if !names.contains(&*format!("{experts}{EXPERTS}{DOWN}")) {
                return Err(failed(format!("there is no {experts}{EXPERTS}{DOWN}; complete the checkpoint")));
            }
        }
        Ok(all)
    }

    /// Returns whether the architecture stores transposes. Only asked if sizes leave that open.
    fn is_transposed(&self) -> bool {
        let model_type = self.config.as_ref().and_then(Config::model_type).unwrap_or_default();
        ["llama4", "qwen3_vl_moe"].iter().any(|known| model_type.starts_with(known))
    }
}

/// The hidden size of the model, or of its language model.
fn hidden_size(config: &Config) -> Option<usize> {
    let json = &config.object.json;
    let of_text = json.get("text_config").and_then(|text| text.get("hidden_size"));
    of_text.or(json.get("hidden_size")).and_then(Value::as_u64).map(|size| size as usize)
}

/// Splits the name of a tensor with all experts into the part before `.experts.` and the matrix.
fn parts_of_name(name: &str) -> Option<(&str, &'static str)> {
    let (experts, matrix) = name.rsplit_once(EXPERTS)?;
    let matrix = [GATE_UP, DOWN].into_iter().find(|known| matrix == *known)?;
    Some((experts, matrix))
}

/// Returns whether a tensor has the name of a tensor with all experts of a layer.
pub(crate) fn is_of_all_experts(name: &str) -> bool {
    parts_of_name(name).is_some()
}

fn not_split(shard: &Shard, tensor: &StoredTensor, why: String) -> Error {
    let (file, tensor) = (shard.path.clone(), tensor.name.clone());
    Error::Format(FormatError::NotSplit { file, tensor, why })
}

/// The tensors of each expert, in the order of their bytes.
fn split(tensor: &StoredTensor, layout: Layout) -> Vec<StoredTensor> {
    let Some((experts, matrix)) = parts_of_name(&tensor.name) else { return Vec::new() };
    let [count, first, second] = tensor.shape[..] else { return Vec::new() };
    let names: &[&str] = if matrix == GATE_UP { &["gate_proj", "up_proj"] } else { &[DOWN] };
    let (rows, cols) = if layout == Layout::Rows { (first, second) } else { (second, first) };
    let rows = rows / names.len();
    let bytes = tensor.range.len() / count.max(1);
    let mut split = Vec::with_capacity(count * names.len());
    for expert in 0..count {
        let start = tensor.range.start + expert * bytes;
        for (i, name) in names.iter().enumerate() {
            let name = format!("{experts}{EXPERTS}{expert}.{name}{WEIGHT}");
            let (range, columns) = match layout {
                Layout::Rows => {
                    let part = bytes / names.len();
                    (start + i * part..start + (i + 1) * part, None)
                }
                Layout::Transposed => {
                    (start..start + bytes, Some(TransposedColumns { width: second, first: i * rows }))
                }
            };
            split.push(tensor.part(name, vec![rows, cols], range, columns));
        }
    }
    split
}
