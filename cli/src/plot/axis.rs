//! An axis with ticks at round numbers.

/// An axis from one round number to another.
pub(crate) struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    /// Returns the shortest axis in about `steps` round steps that contains all finite values.
    pub(crate) fn holding(values: impl Iterator<Item = f64>, steps: f64) -> Self {
        let finite = values.filter(|value| value.is_finite());
        let (low, high) = finite
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        // The range of a single value is empty.
        let span = (high - low).max(1e-3 * high.abs()).max(1e-3);
        let rough = span / steps;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        Self { low, high: if high > low { high } else { low + step }, step }
    }

    /// Returns the place of a value, from 0 to 1. Values outside the axis are clamped.
    pub(crate) fn place(&self, value: f64) -> f64 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// Returns the texts of the first and the last tick.
    pub(crate) fn ends(&self) -> (String, String) {
        let mut texts = self.ticks().map(|(_, text)| text);
        let low = texts.next().unwrap_or_default();
        (low, texts.last().unwrap_or_default())
    }

    /// Returns the round numbers along the axis with their texts.
    pub(crate) fn ticks(&self) -> impl Iterator<Item = (f64, String)> {
        let decimals = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        let steps = ((self.high - self.low) / self.step).round() as usize;
        (0..=steps).map(move |i| {
            // Adding 0 turns −0 into 0.
            let tick = self.low + i as f64 * self.step + 0.0;
            (tick, format!("{tick:.decimals$}").replace('-', "−"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_hold_all_values() {
        let ticks = |values: &[f64]| -> Vec<String> {
            Axis::holding(values.iter().copied(), 5.0).ticks().map(|(_, text)| text).collect()
        };
        assert_eq!(ticks(&[0.0, 18.3]), ["0", "5", "10", "15", "20"]);
        assert_eq!(ticks(&[17.61, f64::INFINITY, 18.2]), ["17.6", "17.8", "18.0", "18.2"]);
        assert_eq!(ticks(&[-7.0, 3.0]), ["−8", "−6", "−4", "−2", "0", "2", "4"]);
        for odd in [&[][..], &[5.0], &[0.0, 0.0], &[f64::NAN], &[-1e300, 1e300]] {
            let axis = Axis::holding(odd.iter().copied(), 5.0);
            assert!((2..20).contains(&axis.ticks().count()), "{odd:?}");
            assert!((0.0..=1.0).contains(&axis.place(5.0)));
        }
    }
}
