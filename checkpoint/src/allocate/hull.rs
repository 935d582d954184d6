//! Points of size and loss, their lower convex hulls, and the linear relaxation over groups.

use std::cmp::Ordering;

/// The bytes and the loss of a tensor, or of tensors, in one format.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Bytes: codes, scales and global scales.
    pub bytes: u64,
    /// The loss.
    pub loss: f64,
}

impl Point {
    /// Returns the sum of both.
    pub(crate) fn with(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, loss: self.loss + other.loss }
    }
}

/// Returns the indices of the points that no other point dominates, smallest first.
///
/// Their loss falls strictly. Of equal points, the first one is kept.
pub(crate) fn pareto(points: &[Point]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (points[*a], points[*b]);
        a.bytes.cmp(&b.bytes).then(a.loss.total_cmp(&b.loss))
    });
    let mut least = f64::INFINITY;
    order.retain(|point| {
        points[*point].loss < least && {
            least = points[*point].loss;
            true
        }
    });
    order
}

/// A step along the lower convex hull of a group, to a larger and better point.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) group: usize,
    /// The point before the step, and after it.
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Additional bytes.
    pub(crate) bytes: u64,
    /// The fall of the loss.
    pub(crate) gain: f64,
    /// The fall of the loss per byte.
    pub(crate) slope: f64,
}

/// Returns the steps along the lower convex hull of a group's points, steepest first. `pareto` are
/// the points that no other point dominates.
fn steps(group: usize, points: &[Point], pareto: &[usize]) -> Vec<Step> {
    let step = |from: usize, to: usize| {
        let bytes = points[to].bytes - points[from].bytes;
        let gain = points[from].loss - points[to].loss;
        Step { group, from, to, bytes, gain, slope: gain / bytes as f64 }
    };
    let mut steps: Vec<Step> = Vec::new();
    let Some((first, rest)) = pareto.split_first() else { return steps };
    for to in rest {
        let mut next = step(steps.last().map_or(*first, |last| last.to), *to);
        while let Some(last) = steps.pop_if(|last| last.slope <= next.slope) {
            next = step(last.from, *to);
        }
        steps.push(next);
    }
    steps
}

/// The linear relaxation of choosing a point per group: groups may take points between two points
/// of their hull.
#[derive(Debug)]
pub(crate) struct Relaxation {
    /// The smallest point of each group.
    pub(crate) smallest: Vec<usize>,
    /// The sum of the smallest points.
    pub(crate) least: Point,
    /// The steps of all groups, steepest first. Steps of one group are in the order of their
    /// sizes.
    pub(crate) steps: Vec<Step>,
}

impl Relaxation {
    /// `pareto` has the points of each group that no other point dominates. Each group has a point.
    pub(crate) fn of(groups: &[Vec<Point>], pareto: &[Vec<usize>]) -> Self {
        let smallest: Vec<usize> = pareto.iter().map(|pareto| pareto[0]).collect();
        let least = smallest.iter().zip(groups).map(|(point, points)| points[*point]);
        let least = least.fold(Point::default(), Point::with);
        let each = groups.iter().zip(pareto).enumerate();
        let mut steps: Vec<Step> =
            each.flat_map(|(group, (points, pareto))| steps(group, points, pareto)).collect();
        // The sort is stable, and slopes of a group fall strictly.
        steps.sort_by(|a, b| b.slope.partial_cmp(&a.slope).unwrap_or(Ordering::Equal));
        Self { smallest, least, steps }
    }

    /// Returns the sums of points after each step, the smallest first: the corners of the hull of
    /// all groups together.
    pub(crate) fn corners(&self) -> Vec<Point> {
        let after = self.steps.iter().scan(self.least, |sum, step| {
            *sum = Point { bytes: sum.bytes + step.bytes, loss: (sum.loss - step.gain).max(0.0) };
            Some(*sum)
        });
        std::iter::once(self.least).chain(after).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(points: &[(u64, f64)]) -> Vec<Point> {
        points.iter().map(|&(bytes, loss)| Point { bytes, loss }).collect()
    }

    #[test]
    fn dominated_points_are_left_out() {
        let all = points(&[(9, 1.0), (4, 5.0), (4, 4.0), (5, 4.0), (6, 3.0), (9, 1.0), (7, 3.5)]);
        assert_eq!(pareto(&all), [2, 4, 0]);
        assert_eq!(pareto(&points(&[(3, 0.0), (2, 0.0)])), [1]);
    }

    #[test]
    fn hulls_leave_out_points_above_a_line() {
        // (6, 5.0) is above the line from (4, 8.0) to (8, 0.0), and (7, 2.0) is on it.
        let all = points(&[(4, 8.0), (6, 5.0), (7, 2.0), (8, 0.0)]);
        let relaxation = Relaxation::of(std::slice::from_ref(&all), &[pareto(&all)]);
        let steps: Vec<_> = relaxation.steps.iter().map(|step| (step.from, step.to)).collect();
        assert_eq!(steps, [(0, 3)]);
        assert_eq!(relaxation.corners(), points(&[(4, 8.0), (8, 0.0)]));
    }

    #[test]
    fn steps_of_all_groups_go_from_steep_to_flat() {
        let groups = [points(&[(1, 9.0), (2, 4.0), (4, 2.0)]), points(&[(1, 8.0), (3, 2.0)])];
        let pareto: Vec<_> = groups.iter().map(|points| pareto(points)).collect();
        let relaxation = Relaxation::of(&groups, &pareto);
        assert_eq!(relaxation.corners(), points(&[(2, 17.0), (3, 12.0), (5, 6.0), (7, 4.0)]));
    }
}
