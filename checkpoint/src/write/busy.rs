//! Time spans during which workers were busy, and the seconds in their union.

use std::time::Instant;

/// A time span during which a worker was busy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Busy {
    pub(crate) from: Instant,
    pub(crate) until: Instant,
}

impl Busy {
    /// Seconds in the union of the spans.
    pub(crate) fn seconds(all: impl Iterator<Item = Self>) -> f64 {
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|busy| busy.from);
        let (mut seconds, mut covered) = (0.0, None);
        for Self { from, until } in all {
            let new = covered.map_or(from, |covered| from.max(covered));
            seconds += until.saturating_duration_since(new).as_secs_f64();
            covered = covered.max(Some(until));
        }
        seconds
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_worked_at_by_two_counts_once() {
        let start = Instant::now();
        let at = |from, until| Busy {
            from: start + Duration::from_secs(from),
            until: start + Duration::from_secs(until),
        };
        for (expected, all) in [
            (0.0, vec![]),
            (3.0, vec![at(1, 4)]),
            (5.0, vec![at(1, 4), at(6, 8)]),
            (7.0, vec![at(3, 8), at(1, 4)]),
            (9.0, vec![at(0, 9), at(2, 3), at(4, 5)]),
        ] {
            assert_eq!(Busy::seconds(all.into_iter()), expected);
        }
    }
}
