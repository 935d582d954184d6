//! Gates of products: two rows of weights give one result.

use microscale::formats::Gate;
use microscale::formats::arithmetic::Fused;
use microscale::{Activation, Error, OperandFault};
use pyo3::prelude::*;

use crate::errors::{error, of_tensors};

/// The words for gates.
pub(crate) const GATES: [&str; 2] = ["silu_and_mul", "swiglu_oai"];

/// A gate by its word.
pub(crate) fn gate_of(py: Python<'_>, word: Option<&str>) -> PyResult<Option<Gate>> {
    match word {
        None => Ok(None),
        Some("silu_and_mul") => Ok(Some(Gate::SILU)),
        Some("swiglu_oai") => Ok(Some(Gate::GPT_OSS)),
        Some(found) => {
            let words = GATES.join(", ");
            Err(error(py, format!("gate is {found:?}; pass one of {words}")))
        }
    }
}

/// The results of `rows` rows of weights.
pub(crate) fn results(py: Python<'_>, rows: usize, gate: Option<Gate>) -> PyResult<usize> {
    match gate {
        None => Ok(rows),
        Some(_) if rows.is_multiple_of(2) => Ok(rows / 2),
        Some(_) => Err(of_tensors(py, Error::Operands(OperandFault::Gate { rows }))),
    }
}

/// Combines pairs of sums, of a gate and of `up`, and rounds each result once.
pub(crate) fn combine<T: Activation>(gate: Gate, sums: &[f32], out: &mut [T]) {
    for (result, pair) in out.iter_mut().zip(sums.chunks_exact(2)) {
        *result = T::from_f32(gate.of::<Scalars>(pair[0], pair[1]));
    }
}

/// One f32.
struct Scalars;

impl Fused for Scalars {
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
