//! Epilogues of products: operands, and checks of results against exact sums.

use microscale::{Activation, Gate};

use crate::oracle::Exact;
use crate::weights::{Bound, ExactProducts, near};

/// Epilogue steps of a product of `T` activations with `O` results.
///
/// An empty operand means no such step.
#[derive(Clone, Debug)]
pub struct Steps<T, O> {
    /// One value per row of weights.
    pub bias: Vec<T>,
    /// The gate.
    pub gate: Option<Gate>,
    /// One value per result.
    pub residual: Vec<O>,
}

/// Largest slope of a gate times its sigmoid.
const STEEPEST: f64 = 1.1;
/// Relative error of the steps' operations.
const LOST: f64 = 1.0 / (1 << 20) as f64;

impl<T: Exact + Activation, O: Exact + Activation> Steps<T, O> {
    /// Draws operands for `rows` rows of weights and `tokens` tokens: a bias, a residual, both or
    /// none.
    pub fn draw(rows: usize, tokens: usize, steps: (bool, Option<Gate>, bool), seed: u64) -> Self {
        let (bias, gate, residual) = steps;
        let mut random = fastrand::Rng::with_seed(seed);
        let mut number = || f64::from(random.i32(-1000..1000)) / 64.0;
        let results = if gate.is_some() { rows / 2 } else { rows } * tokens;
        let bias = (0..if bias { rows } else { 0 }).map(|_| T::round_f64(number())).collect();
        let residual = (0..if residual { results } else { 0 }).map(|_| O::round_f64(number())).collect();
        Self { bias, gate, residual }
    }

    /// Returns the results per token for `rows` rows of weights.
    pub fn results(&self, rows: usize) -> usize {
        if self.gate.is_some() { rows / 2 } else { rows }
    }

    /// Checks that results are within the error that `bound` allows for exact sums.
    ///
    /// Sums that are not finite, or too large, are skipped.
    ///
    /// # Errors
    /// Returns a message about the first result that is too far off.
    pub fn check(
        &self,
        exact: &ExactProducts,
        bound: &Bound,
        rows: usize,
        found: &[O],
    ) -> Result<(), String> {
        let results = self.results(rows);
        if found.len() != exact.count() / rows * results {
            return Err(format!("{} results of {} sums", found.len(), exact.count()));
        }
        for (i, found) in found.iter().enumerate() {
            let (token, result) = (i / results, i % results);
            let sum = |row: usize| {
                let (sum, error) = exact.number(token * rows + row, bound)?;
                let bias = self.bias.get(row).map_or(0.0, |bias| bias.to_f64());
                Some((sum + bias, error + LOST * (sum.abs() + bias.abs())))
            };
            let before = match self.gate {
                None => sum(result),
                Some(gate) => sum(2 * result).zip(sum(2 * result + 1)).map(|both| gated(gate, both)),
            };
            let Some((value, error)) = before.filter(|(value, _)| value.abs() < f64::from(f32::MAX)) else {
                continue;
            };
            let residual = self.residual.get(i).map_or(0.0, |residual| residual.to_f64());
            let error = error + LOST * (value.abs() + residual.abs());
            near(*found, value + residual, error)
                .map_err(|wrong| format!("{wrong}: token {token}, result {result}"))?;
        }
        Ok(())
    }
}

/// Returns the gated value of `gate` and `up` values with given errors, and its own maximum error.
fn gated(gate: Gate, ((g, of_g), (u, of_u)): ((f64, f64), (f64, f64))) -> (f64, f64) {
    let limit = f64::from(gate.limit);
    let (g, u) = (g.min(limit), u.clamp(-limit, limit) + f64::from(gate.offset));
    let let_through = g / (1.0 + (-f64::from(gate.alpha) * g).exp());
    let error = STEEPEST * of_g * (u.abs() + of_u) + let_through.abs() * of_u;
    (let_through * u, error + LOST * (let_through * u).abs() + f64::from(f32::MIN_POSITIVE) * (1.0 + u.abs()))
}
