//! Means over the tokens of a text, with confidence intervals.

/// A mean per token, and half the width of its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Half the width of the interval. Infinite for a single window, NaN if a value is not finite.
    pub margin: f64,
}

impl Estimate {
    /// The mean over all tokens of windows, each a sum over its tokens and the number of them.
    ///
    /// The interval is Student's for the windows' sums around the mean, which takes the windows to
    /// be independent. Tokens of one window are not.
    pub(crate) fn of(windows: &[(f64, usize)]) -> Self {
        let tokens: f64 = windows.iter().map(|(_, tokens)| *tokens as f64).sum();
        let mean = windows.iter().map(|(sum, _)| sum).sum::<f64>() / tokens;
        let count = windows.len() as f64;
        let squares: f64 = windows.iter().map(|(sum, tokens)| (sum - mean * *tokens as f64).powi(2)).sum();
        let freedom = count - 1.0;
        let error = (count / freedom * squares).sqrt() / tokens;
        Self { mean, margin: if freedom < 1.0 { f64::INFINITY } else { quantile(freedom) * error } }
    }

    /// Returns the estimate of a function of the mean that has this slope.
    pub(crate) fn map(self, value: f64, slope: f64) -> Self {
        Self { mean: value, margin: self.margin * slope.abs() }
    }
}

/// The 97.5 % quantile of Student's distribution, within 0.004 from 3 degrees of freedom on
/// (Cornish and Fisher's expansion; Abramowitz and Stegun 26.7.5). The first two are exact.
fn quantile(freedom: f64) -> f64 {
    if freedom < 1.5 {
        return 12.706_204_736;
    }
    if freedom < 2.5 {
        return 4.302_652_730;
    }
    let z = 1.959_963_984_540_054_f64;
    let (z3, z5, z7, z9) = (z.powi(3), z.powi(5), z.powi(7), z.powi(9));
    z + (z3 + z) / (4.0 * freedom)
        + (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * freedom.powi(2))
        + (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * z) / (384.0 * freedom.powi(3))
        + (79.0 * z9 + 776.0 * z7 + 1482.0 * z5 - 1920.0 * z3 - 945.0 * z) / (92_160.0 * freedom.powi(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_tables() {
        let table = [(1.0, 12.706), (2.0, 4.303), (3.0, 3.182), (5.0, 2.571), (10.0, 2.228), (120.0, 1.980)];
        for (freedom, expected) in table {
            let found = quantile(freedom);
            assert!((found - expected).abs() < 0.004, "{freedom}: {found}");
        }
    }

    #[test]
    fn windows_with_the_same_mean_leave_no_margin() {
        assert_eq!(Estimate::of(&[(2.0, 1), (6.0, 3)]), Estimate { mean: 2.0, margin: 0.0 });
        assert_eq!(Estimate::of(&[(3.0, 3)]).margin, f64::INFINITY);
    }

    #[test]
    fn the_margin_is_that_of_a_mean_of_equal_windows() {
        // 1, 2, 3, 4: a standard deviation of 1.29099, over √4, times 3.182.
        let found = Estimate::of(&[(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]);
        assert_eq!(found.mean, 2.5);
        assert!((found.margin - 3.182 * 1.290_994 / 2.0).abs() < 0.004, "{found:?}");
    }
}
