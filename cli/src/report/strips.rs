//! Bars of SQNR in the rows of a table, and which values are unusually low.

use crate::markup::{Markup, Px};
use crate::plot::axis::Axis;
use crate::text::table::{count, decibels};

/// A tensor or layer is marked from this distance below the median: the larger of a minimum in dB
/// and a multiple of the median deviation.
const LEAST_DISTANCE: f64 = 1.0;
const DEVIATIONS: f64 = 4.0;
/// Minimum range of the bars in dB, so that small differences look small.
const LEAST_RANGE: f64 = 0.1;
/// Length of the shortest bar, as a share of the longest possible bar.
const SHORTEST_BAR: f64 = 0.02;

/// Returns the range of the bars: from the worst SQNR to the best, in round numbers.
pub(super) fn bars(sqnr_db: impl Iterator<Item = f64>) -> Axis {
    let finite: Vec<f64> = sqnr_db.filter(|sqnr_db| sqnr_db.is_finite()).collect();
    let best = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Axis::holding(finite.into_iter().chain([best - LEAST_RANGE]), 10.0)
}

/// Draws a bar from the left end of the axis, and a line at the median. The cell before it has the
/// number.
pub(super) fn bar(m: &mut Markup, axis: &Axis, typical: &Typical, sqnr_db: f64) {
    let percent = |value: f64| format!("{}%", Px(100.0 * axis.place(value)));
    m.element("svg", &[("class", &"plot"), ("aria-hidden", &"true")], |m| {
        if sqnr_db.is_finite() {
            let width = format!("{}%", Px(100.0 * axis.place(sqnr_db).max(SHORTEST_BAR)));
            let class = if typical.is_low(sqnr_db) { "bar low" } else { "bar" };
            m.empty("rect", &[("class", &class), ("width", &width), ("height", &"100%")]);
        }
        if typical.median.is_finite() {
            let x = percent(typical.median);
            m.empty("line", &[("class", &"median"), ("x1", &x), ("x2", &x), ("y2", &"100%")]);
        }
    });
}

/// The typical SQNR of tensors or layers.
pub(super) struct Typical {
    pub(super) median: f64,
    /// Those further than this below the median are marked.
    distance: f64,
}

impl Typical {
    pub(super) fn of(sqnr_db: impl Iterator<Item = f64>) -> Self {
        let mut finite: Vec<f64> = sqnr_db.filter(|sqnr_db| sqnr_db.is_finite()).collect();
        let middle = median(&mut finite);
        let mut deviations: Vec<_> = finite.iter().map(|sqnr_db| (sqnr_db - middle).abs()).collect();
        Self { median: middle, distance: (DEVIATIONS * median(&mut deviations)).max(LEAST_DISTANCE) }
    }

    pub(super) fn is_low(&self, sqnr_db: f64) -> bool {
        sqnr_db < self.median - self.distance
    }

    /// Describes the SQNR of each tensor or layer, `what`.
    pub(super) fn sentence(&self, what: &str, sqnr_db: impl Iterator<Item = f64>) -> String {
        if !self.median.is_finite() {
            return format!("No {what} has an error.");
        }
        let low = sqnr_db.filter(|sqnr_db| self.is_low(*sqnr_db)).count();
        let who = match low {
            0 => format!("No {what} is"),
            1 => format!("One {what}, which is marked, is"),
            _ => format!("{} {what}s, which are marked, are", count(low as u64)),
        };
        let (median, distance) = (decibels(self.median), self.distance);
        format!("The median SQNR of a {what} is {median}. {who} more than {distance:.1} dB below it.")
    }
}

/// Returns the median, or NaN without values.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[half],
        _ => (values[half - 1] + values[half]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_far_below_the_median_are_low() {
        let typical = Typical::of([18.0, 18.2, 17.9, 18.1, 12.0, f64::INFINITY].into_iter());
        assert_eq!((typical.median, typical.distance), (18.0, 1.0));
        assert!(typical.is_low(16.9) && !typical.is_low(17.1) && typical.is_low(f64::NEG_INFINITY));
        let wide = Typical::of([10.0, 12.0, 14.0, 16.0].into_iter());
        assert_eq!((wide.median, wide.distance), (13.0, 8.0));
        assert!(!Typical::of([].into_iter()).is_low(-1.0));
    }

    #[test]
    fn bars_show_the_range_between_the_worst_and_the_best() {
        let axis = bars([17.25, 18.9, f64::INFINITY].into_iter());
        assert_eq!(axis.ends(), ("17.2".into(), "19.0".into()));
        assert!(axis.place(17.25) < 0.05 && axis.place(18.9) > 0.9);
        // Differences far under a tenth of a decibel do not fill the range.
        let close = bars([18.499, 18.5].into_iter());
        assert!(close.place(18.5) - close.place(18.499) < 0.05);
        assert_eq!(bars([].into_iter()).ends(), ("0.0".into(), "1.0".into()));
    }
}
