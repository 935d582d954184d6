//! The outcome of an allocation: a format for each tensor, and the loss and size of alternatives.

use std::path::PathBuf;

use microscale::{Format, Search};

use crate::allocate::budget::Budget;
use crate::allocate::choice::Choice;
use crate::allocate::hull::{Point, Relaxation, pareto};
use crate::allocate::knapsack::solve;
use crate::checkpoint_format::CheckpointFormat;
use crate::error::Result;
use crate::error::plan::PlanError;
use crate::names::layers::Layers;
use crate::plan::selection::Selection;
use crate::plan::warning::Warning;

/// A format for each tensor of a checkpoint, chosen for the least loss within a budget.
///
/// Losses are shares of [`Self::signal`], once divided by it ([`Self::relative`]). Without
/// importance, the loss of a tensor is its relative squared error times its number of weights, so
/// the sum is the mean relative squared error of a weight. With importance it is Σ h (w − y)²,
/// where h is the importance of the weight's column. If h is the mean squared input of a layer,
/// that is the expected squared error of the layer's outputs, for inputs that are independent.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Allocation {
    /// The checkpoint format to write.
    pub checkpoint_format: CheckpointFormat,
    /// What tensors could become, from the most bits to the fewest.
    pub choices: Vec<Choice>,
    /// Search for block scales, in the formats that have one.
    pub search: Search,
    /// File of importance per column, if it was given.
    pub importance: Option<PathBuf>,
    /// The tensors that some format quantizes, in the order of the files.
    pub tensors: Vec<Allocated>,
    /// Bytes of all other tensors.
    pub others: u64,
    /// The loss of tensors of zeros: the number of weights, or with importance Σ h w².
    pub signal: f64,
    /// Largest number of bytes for the tensors.
    pub budget: u64,
    /// Bytes and loss of the tensors as they were chosen.
    pub chosen: Point,
    /// The optimum of the linear relaxation, which no choice is better than.
    pub relaxed: f64,
    /// A proved lower bound on the loss of all choices within the budget. It is the loss if the
    /// choice is optimal.
    pub bound: f64,
    /// One format for all tensors, with and without the first and last layers, for comparison.
    pub alternatives: Vec<Alternative>,
    /// The corners of the lower convex hull of all choices, the smallest first.
    pub curve: Vec<Point>,
    /// Checkpoint formats that can hold the tensors as they were chosen.
    pub held_by: Vec<CheckpointFormat>,
    /// Warnings about the chosen formats.
    pub warnings: Vec<Warning>,
    pub(crate) selection: Selection,
}

/// A tensor, and its bytes and loss as each choice.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Allocated {
    /// The name.
    pub name: String,
    /// The number of weights.
    pub elements: u64,
    /// Number of the tensors that got one choice together, such as the parts of a fused layer.
    pub group: usize,
    /// Index of the chosen one among [`Allocation::choices`].
    pub choice: usize,
    /// Bytes and loss as each choice. A tensor that a format cannot hold stays unquantized.
    pub points: Vec<Point>,
    /// Bytes, unquantized.
    pub(crate) unquantized: Point,
    /// Whether each choice quantizes it.
    pub(crate) quantized: Vec<bool>,
}

/// One format for all tensors.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Alternative {
    /// The format.
    pub format: Format,
    /// True if the first and the last layer stay unquantized.
    pub keeps_ends: bool,
    /// Bytes and loss.
    pub point: Point,
}

impl Alternative {
    /// Returns the name of the recipe: `nvfp4` or `nvfp4-keep-ends`.
    pub fn name(&self) -> String {
        format!("{}{}", Choice::Format(self.format), if self.keeps_ends { "-keep-ends" } else { "" })
    }
}

/// Sums over the tensors that became one choice.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Share {
    /// The choice.
    pub choice: Choice,
    /// The number of tensors.
    pub tensors: u64,
    /// Their weights.
    pub elements: u64,
    /// Their bytes and loss.
    pub point: Point,
}

impl Allocation {
    /// Returns the number of weights of the tensors.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.elements).sum()
    }

    /// Returns the bits per weight of a number of bytes.
    pub fn bits(&self, bytes: u64) -> f64 {
        8.0 * bytes as f64 / self.elements().max(1) as f64
    }

    /// Returns a loss as a share of the loss of zeros; 0 if that is 0.
    pub fn relative(&self, loss: f64) -> f64 {
        if self.signal > 0.0 { loss / self.signal } else { 0.0 }
    }

    /// Returns whether no other choice within the budget has a smaller loss.
    pub fn is_optimal(&self) -> bool {
        self.bound >= self.chosen.loss
    }

    /// Returns the chosen format of a tensor, or `None` if it stays unquantized.
    pub fn format_of(&self, tensor: &Allocated) -> Option<Format> {
        self.choices.get(tensor.choice)?.format().filter(|_| tensor.quantized[tensor.choice])
    }

    /// Returns the sums over the tensors of each choice, from the most bits to the fewest.
    pub fn shares(&self) -> Vec<Share> {
        let formats = self.choices.iter().filter_map(|choice| choice.format());
        let all = std::iter::once(None).chain(formats.map(Some));
        let share = |format: Option<Format>| {
            let choice = format.map_or(Choice::Unquantized, Choice::Format);
            let none = Share { choice, tensors: 0, elements: 0, point: Point::default() };
            self.tensors.iter().filter(|tensor| self.format_of(tensor) == format).fold(none, |sum, tensor| {
                Share {
                    tensors: sum.tensors + 1,
                    elements: sum.elements + tensor.elements,
                    point: sum.point.with(tensor.points[tensor.choice]),
                    ..sum
                }
            })
        };
        all.map(share).filter(|share| share.tensors > 0).collect()
    }

    /// Chooses for each group of tensors within a budget.
    ///
    /// # Errors
    /// [`PlanError::Budget`] if no choice fits.
    pub(crate) fn solve(&mut self, budget: Budget) -> Result<()> {
        let groups = self.grouped();
        let points: Vec<Vec<Point>> = groups
            .iter()
            .map(|group| {
                let point = |choice: usize| {
                    let points = group.iter().map(|tensor| self.tensors[*tensor].points[choice]);
                    points.fold(Point::default(), Point::with)
                };
                (0..self.choices.len()).map(point).collect()
            })
            .collect();
        let undominated: Vec<_> = points.iter().map(|points| pareto(points)).collect();
        let relaxation = Relaxation::of(&points, &undominated);
        let (elements, least) = (self.elements(), relaxation.least.bytes);
        let bytes = budget.bytes(elements, self.others);
        let Some((bytes, solution)) = bytes.and_then(|bytes| Some((bytes, solve(&points, bytes)?))) else {
            let least = budget.holding(least, elements, self.others).to_string();
            return Err(PlanError::Budget { budget: budget.to_string(), least }.into());
        };
        for (group, choice) in groups.iter().zip(&solution.chosen) {
            for tensor in group {
                self.tensors[*tensor].choice = *choice;
            }
        }
        self.budget = bytes;
        // Sums of alternatives are in the order of the tensors, too.
        let points = self.tensors.iter().map(|tensor| tensor.points[tensor.choice]);
        self.chosen = points.fold(Point::default(), Point::with);
        let is_optimal = solution.bound >= solution.sum.loss;
        self.bound = if is_optimal { self.chosen.loss } else { solution.bound.min(self.chosen.loss) };
        self.relaxed = solution.relaxed.min(self.bound);
        self.curve = relaxation.corners();
        Ok(())
    }

    /// Returns the indices of each group's tensors.
    fn grouped(&self) -> Vec<Vec<usize>> {
        let most = self.tensors.iter().map(|tensor| tensor.group + 1).max().unwrap_or(0);
        let mut groups = vec![Vec::new(); most];
        for (number, tensor) in self.tensors.iter().enumerate() {
            groups[tensor.group].push(number);
        }
        groups
    }

    /// Computes bytes and loss of one format for all tensors. `layers` are the checkpoint's.
    pub(crate) fn compare(&mut self, layers: &Layers) {
        let is_end = |name: &str| layers.is_first(name, 1) || layers.is_last(name, 1);
        let sum = |choice: usize, keeps_ends: bool| {
            let points = self.tensors.iter().map(|tensor| match keeps_ends && is_end(&tensor.name) {
                true => tensor.unquantized,
                false => tensor.points[choice],
            });
            points.fold(Point::default(), Point::with)
        };
        let mut alternatives = Vec::new();
        for (number, choice) in self.choices.iter().enumerate() {
            let Some(format) = choice.format() else { continue };
            let all = sum(number, false);
            alternatives.push(Alternative { format, keeps_ends: false, point: all });
            let point = sum(number, true);
            if point != all {
                alternatives.push(Alternative { format, keeps_ends: true, point });
            }
        }
        self.alternatives = alternatives;
    }
}
