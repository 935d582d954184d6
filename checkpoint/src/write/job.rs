//! A job: the work on one tensor of a checkpoint, decided before anything is written.

use std::collections::HashSet;

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::read::position::Position;
use crate::read::tensor::Tensor;
use crate::write::outline::Outline;

/// The work on one tensor of a checkpoint.
///
/// Jobs are made once, in the order of the files, and passed on to the threads that carry them out.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Job<'a, P> {
    /// The tensor as its values are read, under the name that the model knows.
    pub tensor: Tensor<'a>,
    /// What becomes of it.
    pub plan: P,
    pub(crate) position: Position,
    /// The tensors of the output that take its place.
    pub(crate) outputs: Vec<Outline>,
}

impl<P> Job<'_, P> {
    /// Bytes of the input, without scales that are stored as tensors of their own.
    pub(crate) fn bytes_before(&self) -> u64 {
        self.tensor.data.len() as u64
    }

    /// Bytes of the output.
    pub fn bytes_after(&self) -> u64 {
        self.outputs.iter().map(Outline::bytes).sum()
    }
}

/// The jobs of one shard among all jobs, which are in the order of the files.
pub(crate) fn of_shard<'j, 'a, P>(jobs: &'j [Job<'a, P>], shard: usize) -> &'j [Job<'a, P>] {
    let start = jobs.partition_point(|job| job.position.shard < shard);
    let end = jobs.partition_point(|job| job.position.shard <= shard);
    &jobs[start..end]
}

/// Checks that every tensor of the output has a name of its own.
///
/// # Errors
/// [`OutputError::NameTaken`].
pub(crate) fn check_output_names<P>(jobs: &[Job<'_, P>]) -> Result<()> {
    let mut taken = HashSet::new();
    for Job { tensor, outputs, .. } in jobs {
        for Outline { name, .. } in outputs {
            if !taken.insert(name) {
                let (file, tensor) = (tensor.file.into(), tensor.name.into());
                return Err(Error::Output(OutputError::NameTaken { file, tensor, name: name.clone() }));
            }
        }
    }
    Ok(())
}
