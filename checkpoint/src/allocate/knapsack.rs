//! The multiple-choice knapsack problem: a point for each group, with the least summed loss within
//! a budget of bytes.
//!
//! The linear relaxation gives a lower bound, the multiplier λ (loss per byte at the budget), and a
//! first solution. λ gives each point a reduced cost: how much the bound rises if the group takes
//! the point. Dynamic programming then extends partial solutions group by group, as Nemhauser and
//! Ullmann (1969) do: a partial solution that is larger and worse than another is dropped. So is
//! one whose bound is no better than the best solution so far (Dyer, Riha and Walker 1995; Pisinger
//! 1995). The result is the optimum, unless the limit on partial solutions was reached. Then
//! [`Solution::bound`] says how far it may be.
//!
//! Losses are sums of floats. A solution that is better by less than [`EPSILON`] of the sums may be
//! missed.

use crate::allocate::hull::{Point, Relaxation, pareto};

/// Limit on the partial solutions of all groups together. Each takes 8 bytes.
const MOST_NODES: usize = 1 << 24;
/// Limit on the partial solutions of one group.
const MOST_STATES: usize = 1 << 17;
/// Relative error of sums that does not count.
const EPSILON: f64 = 1e-12;

/// A point for each group.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Solution {
    /// The index of each group's point.
    pub(crate) chosen: Vec<usize>,
    /// The sum of the points.
    pub(crate) sum: Point,
    /// The optimum of the linear relaxation. No solution has a smaller loss.
    pub(crate) relaxed: f64,
    /// A proved lower bound on the loss of any solution. It is the loss if the solution is optimal.
    pub(crate) bound: f64,
}

/// Chooses a point for each group. Returns `None` if no choice fits the budget.
///
/// Groups have at least one point, and losses are finite and not negative.
pub(crate) fn solve(groups: &[Vec<Point>], budget: u64) -> Option<Solution> {
    solve_within(groups, budget, MOST_STATES)
}

/// [`solve`] with at most `most_states` partial solutions per group.
fn solve_within(groups: &[Vec<Point>], budget: u64, most_states: usize) -> Option<Solution> {
    let pareto: Vec<Vec<usize>> = groups.iter().map(|points| pareto(points)).collect();
    let relaxation = Relaxation::of(groups, &pareto);
    if relaxation.least.bytes > budget {
        return None;
    }
    let start = Start::of(&relaxation, budget);
    let (chosen, bound) = match start.multiplier {
        // The relaxation's optimum takes whole points.
        None => (start.filled, f64::INFINITY),
        Some(multiplier) => {
            let reduced = Reduced::of(groups, &pareto, &start, multiplier);
            Search::new(groups, &reduced, &start, budget, most_states).run()
        }
    };
    let sum = sum(groups, &chosen);
    // The order of a sum changes its rounding.
    let relaxed = start.relaxed.clamp(0.0, sum.loss);
    Some(Solution { chosen, sum, relaxed, bound: bound.clamp(relaxed, sum.loss) })
}

/// Returns the sum of a point of each group.
fn sum(groups: &[Vec<Point>], chosen: &[usize]) -> Point {
    let points = chosen.iter().zip(groups).map(|(point, points)| points[*point]);
    points.fold(Point::default(), Point::with)
}

/// The linear relaxation's optimum, and a solution near it.
struct Start {
    /// The corner of the hull before the budget: a point for each group.
    corner: Vec<usize>,
    /// The corner with further steps that fit.
    filled: Vec<usize>,
    /// The relaxation's optimum.
    relaxed: f64,
    /// Loss per byte at the budget; `None` if the corner is the relaxation's optimum.
    multiplier: Option<f64>,
}

impl Start {
    fn of(relaxation: &Relaxation, budget: u64) -> Self {
        let (mut at, mut sum) = (relaxation.smallest.clone(), relaxation.least);
        let mut steps = relaxation.steps.iter();
        let beyond = steps.find(|step| {
            let fits = step.bytes <= budget - sum.bytes;
            if fits {
                at[step.group] = step.to;
                sum = Point { bytes: sum.bytes + step.bytes, loss: sum.loss - step.gain };
            }
            !fits
        });
        let (corner, left) = (at.clone(), budget - sum.bytes);
        let multiplier = beyond.map(|step| step.slope).filter(|_| left > 0);
        let relaxed = sum.loss - multiplier.unwrap_or(0.0) * left as f64;
        for step in steps {
            if at[step.group] == step.from && step.bytes <= budget - sum.bytes {
                at[step.group] = step.to;
                sum.bytes += step.bytes;
            }
        }
        Self { corner, filled: at, relaxed, multiplier }
    }
}

/// Reduced costs: how much the bound rises if a group takes a point.
struct Reduced {
    multiplier: f64,
    /// The points of each group that no other point dominates, with their reduced costs.
    costs: Vec<Vec<(usize, f64)>>,
    /// The relaxation's optimum.
    relaxed: f64,
    /// Differences that may be rounding.
    epsilon: f64,
}

impl Reduced {
    fn of(groups: &[Vec<Point>], pareto: &[Vec<usize>], start: &Start, multiplier: f64) -> Self {
        let mut all = 0.0;
        let each = groups.iter().zip(pareto).zip(&start.corner);
        let costs = each.map(|((points, pareto), corner)| {
            let cost = |point: usize| points[point].loss + multiplier * points[point].bytes as f64;
            let least = cost(*corner);
            all += least;
            let reduced = |point: &usize| (*point, if point == corner { 0.0 } else { cost(*point) - least });
            pareto.iter().map(reduced).map(|(point, cost)| (point, cost.max(0.0))).collect()
        });
        let costs = costs.collect();
        Self { multiplier, costs, relaxed: start.relaxed, epsilon: EPSILON * all }
    }
}

/// A partial solution: the points of the decided groups and of the groups of the stages so far.
#[derive(Clone, Copy)]
struct State {
    sum: Point,
    /// Sum of reduced costs.
    reduced: f64,
    /// The choice for the last stage.
    node: Node,
}

/// A choice of a partial solution, and the choice before it.
#[derive(Clone, Copy)]
struct Node {
    before: u32,
    point: u32,
}

/// The node before any choice.
const ROOT: u32 = u32::MAX;

/// A group that is still to decide.
struct Stage {
    group: usize,
    /// The points that may be part of a better solution, with their reduced costs.
    points: Vec<(usize, f64)>,
    /// Sums over the stages from this one on: the smallest points, the largest points, and the
    /// points of the corner.
    smallest: u64,
    largest: u64,
    corner: Point,
}

/// Dynamic programming over the groups that are not decided by their reduced costs.
struct Search<'a> {
    groups: &'a [Vec<Point>],
    reduced: &'a Reduced,
    stages: Vec<Stage>,
    budget: u64,
    most_states: usize,
    /// The sum of the groups that are decided: they take the corner's point.
    decided: Point,
    corner: Vec<usize>,
    nodes: Vec<Node>,
    best: Best,
    /// The least bound of the partial solutions that were dropped for lack of room.
    dropped: f64,
}

/// The best solution so far.
struct Best {
    loss: f64,
    chosen: Chosen,
}

/// How a solution is stored.
enum Chosen {
    Whole(Vec<usize>),
    /// The choices up to a stage, and the corner's points for all other groups.
    Partial {
        stage: usize,
        last: Node,
    },
}

impl<'a> Search<'a> {
    fn new(
        groups: &'a [Vec<Point>],
        reduced: &'a Reduced,
        start: &Start,
        budget: u64,
        most_states: usize,
    ) -> Self {
        let loss = sum(groups, &start.filled).loss;
        let gap = loss - reduced.relaxed + reduced.epsilon;
        let (mut stages, mut decided) = (Vec::new(), Point::default());
        for (group, costs) in reduced.costs.iter().enumerate() {
            let points: Vec<_> = costs.iter().copied().filter(|(_, cost)| *cost <= gap).collect();
            if points.len() > 1 {
                stages.push(Stage { group, points, smallest: 0, largest: 0, corner: Point::default() });
            } else {
                decided = decided.with(groups[group][start.corner[group]]);
            }
        }
        // Groups that hardly change come first, so that there are few partial solutions for long.
        let least = |stage: &Stage| {
            let others = stage.points.iter().filter(|(point, _)| *point != start.corner[stage.group]);
            others.map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min)
        };
        stages.sort_by(|a, b| least(b).total_cmp(&least(a)).then(a.group.cmp(&b.group)));
        let (mut smallest, mut largest, mut corner) = (0, 0, Point::default());
        for stage in stages.iter_mut().rev() {
            let bytes = stage.points.iter().map(|(point, _)| groups[stage.group][*point].bytes);
            smallest += bytes.clone().min().unwrap_or(0);
            largest += bytes.max().unwrap_or(0);
            corner = corner.with(groups[stage.group][start.corner[stage.group]]);
            (stage.smallest, stage.largest, stage.corner) = (smallest, largest, corner);
        }
        let most_states = most_states.min(MOST_NODES / stages.len().max(1)).max(1);
        let best = Best { loss, chosen: Chosen::Whole(start.filled.clone()) };
        let (corner, nodes) = (start.corner.clone(), Vec::new());
        let dropped = f64::INFINITY;
        Self { groups, reduced, stages, budget, most_states, decided, corner, nodes, best, dropped }
    }

    /// Returns the point of each group, and a proved lower bound on the loss, which is infinite if
    /// the points are the best.
    fn run(mut self) -> (Vec<usize>, f64) {
        // The nodes of the last stage's states, whose numbers are their places from `first` on.
        let root = Node { before: ROOT, point: 0 };
        let mut states = vec![State { sum: self.decided, reduced: 0.0, node: root }];
        let mut first = ROOT;
        for stage in 0..self.stages.len() {
            states = self.extended(&states, first, stage);
            self.drop_dominated(&mut states, stage);
            first = self.nodes.len() as u32;
            self.nodes.extend(states.iter().map(|state| state.node));
        }
        // Differences that may be rounding are none.
        let is_proved = self.dropped >= self.best.loss - self.reduced.epsilon;
        let bound = if is_proved { f64::INFINITY } else { self.dropped };
        (self.chosen(), bound)
    }

    /// Extends partial solutions by each point of a stage's group, without the ones that cannot
    /// become better than the best solution so far. `first` is the number of the first one's node.
    fn extended(&mut self, states: &[State], first: u32, stage: usize) -> Vec<State> {
        let rest = self.stages.get(stage + 1).map(|rest| (rest.smallest, rest.largest, rest.corner));
        let (smallest, largest, corner) = rest.unwrap_or_default();
        let (group, relaxed) = (self.stages[stage].group, self.reduced.relaxed);
        let mut extended = Vec::new();
        for (point, cost) in self.stages[stage].points.clone() {
            for (number, state) in states.iter().enumerate() {
                let sum = state.sum.with(self.groups[group][point]);
                let reduced = state.reduced + cost;
                // Every byte that stays unused costs the multiplier.
                let unused = self.budget.saturating_sub(sum.bytes + largest);
                let bound = relaxed + reduced + self.reduced.multiplier * unused as f64;
                let fits = sum.bytes + smallest <= self.budget;
                if !fits || bound >= self.best.loss - self.reduced.epsilon {
                    continue;
                }
                let before = if first == ROOT { ROOT } else { first + number as u32 };
                let node = Node { before, point: point as u32 };
                let whole = sum.with(corner);
                if whole.bytes <= self.budget && whole.loss < self.best.loss {
                    self.best = Best { loss: whole.loss, chosen: Chosen::Partial { stage, last: node } };
                }
                extended.push(State { sum, reduced, node });
            }
        }
        extended
    }

    /// Drops partial solutions that are larger and worse than another, and beyond the limit the
    /// ones with the highest bounds.
    fn drop_dominated(&mut self, states: &mut Vec<State>, stage: usize) {
        // Equal ones are in the order of their points, because the sort is stable.
        states.sort_by(|a, b| a.sum.bytes.cmp(&b.sum.bytes).then(a.sum.loss.total_cmp(&b.sum.loss)));
        let mut least = f64::INFINITY;
        states.retain(|state| {
            let better = state.sum.loss < least;
            least = least.min(state.sum.loss);
            better
        });
        let most = if stage + 1 == self.stages.len() { states.len() } else { self.most_states };
        if states.len() > most {
            states.sort_by(|a, b| a.reduced.total_cmp(&b.reduced).then(a.sum.bytes.cmp(&b.sum.bytes)));
            self.dropped = self.dropped.min(self.reduced.relaxed + states[most].reduced);
            states.truncate(most);
        }
    }

    /// Returns the point of each group in the best solution.
    fn chosen(self) -> Vec<usize> {
        let (stage, last) = match self.best.chosen {
            Chosen::Whole(chosen) => return chosen,
            Chosen::Partial { stage, last } => (stage, last),
        };
        let (mut chosen, mut node) = (self.corner, Some(last));
        for stage in self.stages[..=stage].iter().rev() {
            let Some(Node { before, point }) = node else { break };
            chosen[stage.group] = point as usize;
            node = self.nodes.get(before as usize).copied();
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Groups of points, and a budget as a share of the way from the smallest to the largest sum.
    fn instances() -> impl Strategy<Value = (Vec<Vec<Point>>, f64)> {
        // Small sizes and losses make ties, large ones make awkward fits.
        let point =
            prop_oneof![(1u64..6, 0u32..6), (1u64..1000, 0u32..1000), (1u64..1 << 40, 0u32..1 << 20),];
        let point = point.prop_map(|(bytes, loss)| Point { bytes, loss: f64::from(loss) });
        let groups = prop::collection::vec(prop::collection::vec(point, 1..5), 1..7);
        (groups, 0.0f64..1.1)
    }

    /// A budget between the smallest and the largest size.
    fn budget(groups: &[Vec<Point>], share: f64) -> u64 {
        let size = |of: fn(u64, u64) -> u64| -> u64 {
            groups.iter().filter_map(|points| points.iter().map(|point| point.bytes).reduce(of)).sum()
        };
        let (least, most) = (size(u64::min), size(u64::max));
        least + ((most - least) as f64 * share) as u64
    }

    /// The least loss of all choices that fit.
    fn brute_force(groups: &[Vec<Point>], budget: u64) -> Option<f64> {
        let Some((points, rest)) = groups.split_first() else { return Some(0.0) };
        let fits = points.iter().filter(|point| point.bytes <= budget);
        let each = fits.filter_map(|point| Some(point.loss + brute_force(rest, budget - point.bytes)?));
        each.reduce(f64::min)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn solutions_are_the_best_of_all((groups, share) in instances()) {
            let budget = budget(&groups, share);
            let solution = solve(&groups, budget).expect("the smallest points fit");
            let best = brute_force(&groups, budget).unwrap();
            // Sums of whole numbers are exact.
            prop_assert_eq!(solution.sum.loss, best);
            prop_assert!(solution.sum.bytes <= budget);
            prop_assert_eq!(sum(&groups, &solution.chosen), solution.sum);
            prop_assert!(solution.relaxed <= best, "{} {}", solution.relaxed, best);
            prop_assert_eq!(solution.bound, best);
            prop_assert_eq!(solve(&groups, budget), Some(solution));
        }

        #[test]
        fn a_limit_on_states_leaves_true_bounds((groups, share) in instances(), most in 1usize..4) {
            let budget = budget(&groups, share);
            let solution = solve_within(&groups, budget, most).unwrap();
            let best = brute_force(&groups, budget).unwrap();
            prop_assert!(solution.sum.bytes <= budget);
            prop_assert_eq!(sum(&groups, &solution.chosen), solution.sum);
            prop_assert!(solution.relaxed <= solution.bound && solution.bound <= solution.sum.loss);
            prop_assert!(solution.bound <= best * (1.0 + 1e-9) && best <= solution.sum.loss);
        }

        #[test]
        fn more_bytes_never_lose_more((groups, share) in instances(), more in 0u64..1000) {
            let budget = budget(&groups, share);
            let [tight, loose] = [budget, budget + more].map(|budget| solve(&groups, budget).unwrap());
            prop_assert!(loose.sum.loss <= tight.sum.loss);
        }

        #[test]
        fn budgets_below_the_smallest_points_are_refused((groups, _) in instances()) {
            let least = budget(&groups, 0.0);
            prop_assert!(solve(&groups, least).is_some());
            prop_assert_eq!(solve(&groups, least - 1), None);
        }
    }

    #[test]
    fn no_groups_have_an_empty_solution() {
        let solution = solve(&[], 0).unwrap();
        assert_eq!((solution.chosen.len(), solution.sum, solution.bound), (0, Point::default(), 0.0));
    }

    /// 94 layers of a large model, whose tensors differ in how much they lose.
    #[test]
    fn models_of_many_layers_are_solved_exactly() {
        let mut rng = fastrand::Rng::with_seed(7);
        let shapes = [40_000_000u64, 33_554_432, 5_000_000_000, 16_777_216, 12_345_344];
        let mut group = |weights: u64| -> Vec<Point> {
            let level = 0.5 + rng.f64();
            let formats = [(17.0 / 32.0 * 8.0, 0.012), (4.5, 0.0085), (8.25, 6e-4), (16.0, 0.0)];
            let point = |(bits, loss): (f64, f64)| Point {
                bytes: (bits * weights as f64 / 8.0) as u64 + u64::from(bits == 4.5) * 12,
                loss: level * (0.95 + 0.1 * rng.f64()) * loss * weights as f64,
            };
            formats.map(point).to_vec()
        };
        let groups: Vec<_> = (0..94).flat_map(|_| shapes).map(&mut group).collect();
        for share in [0.0005, 0.01, 0.1, 0.3, 0.5, 0.9] {
            let budget = budget(&groups, share);
            let solution = solve(&groups, budget).unwrap();
            assert!(solution.sum.bytes <= budget && solution.bound == solution.sum.loss, "{solution:?}");
        }
    }
}
