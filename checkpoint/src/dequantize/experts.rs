//! Joins the experts of a layer into one tensor, for architectures whose unquantized files have
//! them so (Llama 4).
//!
//! | in the file, for each expert N | in the output |
//! |---|---|
//! | `X.experts.N.gate_proj.weight` and `up_proj.weight` [I, H] | `X.experts.gate_up_proj` [E, H, 2·I] |
//! | `X.experts.N.down_proj.weight` [H, I] | `X.experts.down_proj` [E, I, H] |
//!
//! This reverses [`OpenOptions::split_experts`](crate::OpenOptions::split_experts).

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use bytemuck::Pod;
use microscale::{Element, NonFinite, Report};

use super::outcome::DequantizedTensor;
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::dtype::FileDtype;
use crate::error::Result;
use crate::names::weight::{EXPERTS, WEIGHT};
use crate::pipeline::Worker;
use crate::read::memory::afford;
use crate::read::position::Position;
use crate::read::tensor::Tensor;
use crate::write::busy::Busy;
use crate::write::narrowed::{check, replace};
use crate::write::outline::Outline;
use crate::write::sink::Sink;

/// The matrices of all experts of a layer, to be written side by side and transposed.
pub(super) struct JoinedExperts<'a> {
    /// The matrices of each expert, all with the same number of columns.
    experts: Vec<Vec<Packed<'a>>>,
    /// Rows of all matrices of an expert.
    rows: usize,
    /// Columns of a matrix.
    cols: usize,
}

/// A quantized matrix of an expert, and its job.
type Parts<'a> = BTreeMap<u64, (usize, Packed<'a>)>;

/// A joined tensor.
pub(super) struct Joined<'a> {
    /// The first of the tensors that it replaces.
    pub(super) tensor: Tensor<'a>,
    pub(super) position: Position,
    pub(super) output: Outline,
    pub(super) experts: JoinedExperts<'a>,
}

/// Takes the quantized experts out of `tensors`, and returns the joined tensors.
///
/// Layers whose experts are incomplete or unquantized stay as they are.
pub(super) fn join<'a>(tensors: &mut Vec<(Position, Logical<'a>)>, dtype: FileDtype) -> Vec<Joined<'a>> {
    let mut layers: HashMap<&'a str, HashMap<&'a str, Parts<'a>>> = HashMap::new();
    for (at, (_, tensor)) in tensors.iter().enumerate() {
        let Logical::Packed(packed) = tensor else { continue };
        if let Some((layer, expert, matrix)) = parts_of_name(packed.name).filter(|_| packed.shape.len() == 2)
        {
            let matrices = layers.entry(layer).or_default();
            matrices.entry(matrix).or_default().insert(expert, (at, Packed::clone(packed)));
        }
    }
    let (mut all, mut taken) = (Vec::new(), vec![false; tensors.len()]);
    for (layer, mut matrices) in layers {
        let mut take = |matrix| matrices.remove(matrix).unwrap_or_default();
        let [gates, ups, downs] = ["gate_proj", "up_proj", "down_proj"].map(&mut take);
        let is_complete = |parts: &Parts<'_>| {
            parts.len() == gates.len() && parts.keys().enumerate().all(|(at, number)| *number == at as u64)
        };
        if gates.is_empty() || !matrices.is_empty() || ![&gates, &ups, &downs].into_iter().all(is_complete) {
            continue;
        }
        for (name, parts) in [("gate_up_proj", vec![gates, ups]), ("down_proj", vec![downs])] {
            let Some((joined, positions)) = JoinedExperts::of(parts) else { continue };
            let shape = vec![joined.experts.len(), joined.cols, joined.rows];
            let output = Outline { name: format!("{layer}{EXPERTS}{name}"), dtype, shape };
            let first = positions.iter().min_by_key(|at| tensors[**at].0).copied().unwrap_or_default();
            let (position, tensor) = &tensors[first];
            let (position, tensor) = (*position, *tensor.stored());
            positions.into_iter().for_each(|at| taken[at] = true);
            all.push(Joined { tensor, position, output, experts: joined });
        }
    }
    let mut taken = taken.into_iter();
    tensors.retain(|_| !taken.next().unwrap_or_default());
    all
}

/// Splits the name of an expert's weight into the part before `.experts.`, the expert's number, and
/// the matrix.
fn parts_of_name(name: &str) -> Option<(&str, u64, &str)> {
    let (layer, expert) = name.strip_suffix(WEIGHT)?.rsplit_once(EXPERTS)?;
    let (number, matrix) = expert.split_once('.')?;
    Some((layer, number.parse().ok()?, matrix))
}

impl<'a> JoinedExperts<'a> {
    /// Joins the matrices of experts, with the positions of their tensors. Returns `None` if their
    /// shapes differ.
    fn of(parts: Vec<Parts<'a>>) -> Option<(Self, Vec<usize>)> {
        let (mut experts, mut positions) = (Vec::new(), Vec::new());
        for matrix in parts {
            for (expert, (at, packed)) in matrix.into_values().enumerate() {
                positions.push(at);
                experts.resize_with(experts.len().max(expert + 1), Vec::new);
                experts[expert].push(packed);
            }
        }
        let first = experts.first()?.first()?;
        let (one, cols) = (first.shape[0], first.shape[1]);
        let rows = one * experts[0].len();
        let alike = experts.iter().flatten().all(|packed| packed.shape == [one, cols]);
        alike.then_some((Self { experts, rows, cols }, positions))
    }

    /// Dequantizes all experts and writes them, a band for each.
    pub(super) fn write<'env, T: Element + Pod>(
        &'env self,
        non_finite: NonFinite,
        worker: &Worker<'_, 'env>,
        sink: &Sink,
    ) -> Result<DequantizedTensor> {
        let mut done = DequantizedTensor::default();
        let (rows, cols, device) = (self.rows, self.cols, worker.device);
        let elements = rows * cols;
        let first = &self.experts[0][0];
        afford(&first.codes, first.name, 2 * elements)?;
        let sink = sink.clone();
        let write = move |expert: usize| {
            let from = Instant::now();
            let (mut joined, mut before) = (vec![T::from_f32(0.0); elements], 0);
            let mut reports = Vec::new();
            for packed in &self.experts[expert] {
                let size = packed.shape[0] * cols;
                let mut values: Vec<T> = packed.values_in(0..size, device)?;
                let report = replace(&mut values, 0, cols, non_finite);
                check::<T>(&packed.codes, packed.name, &report, non_finite, false)?;
                reports.push(report);
                for (row, values) in values.chunks_exact(cols).enumerate() {
                    for (col, value) in values.iter().enumerate() {
                        joined[col * rows + before + row] = *value;
                    }
                }
                before += packed.shape[0];
            }
            let busy = Busy { from, until: Instant::now() };
            let offset = (expert * elements * size_of::<T>()) as u64;
            sink.put(0, offset, bytemuck::cast_slice(&joined).to_vec())?;
            Ok((reports, busy))
        };
        worker.each_band(self.experts.len(), write, |(reports, busy)| {
            reports.into_iter().for_each(|report: Report| done.report += report);
            done.busy.push(busy);
            Ok(())
        })?;
        for packed in self.experts.iter().flatten() {
            let is_nan = |scale: &&u8| packed.format.is_nan_scale(**scale);
            let blocks = packed.each_blocks();
            done.nan_scales +=
                blocks.map(|blocks| blocks.scales.iter().filter(is_nan).count() as u64).sum::<u64>();
            let count = (packed.shape[0] * cols) as u64;
            done.dequantized.add(count, packed.bytes() as u64, count * size_of::<T>() as u64);
        }
        Ok(done)
    }
}
