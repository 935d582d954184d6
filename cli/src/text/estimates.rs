//! Estimates with confidence intervals, as text.

use microscale_models::Estimate;

/// `31.667 ± 0.120`.
pub(crate) fn interval(estimate: Estimate, digits: usize) -> String {
    let Estimate { mean, margin } = estimate;
    match margin.is_finite() {
        true => format!("{mean:.digits$} ± {margin:.digits$}"),
        false => format!("{mean:.digits$}"),
    }
}

/// `0.67 % ± 0.12`.
pub(crate) fn percent_interval(Estimate { mean, margin }: Estimate) -> String {
    let (mean, margin) = (mean * 100.0, margin * 100.0);
    if margin.is_finite() { format!("{mean:.2} % ± {margin:.2}") } else { format!("{mean:.2} %") }
}
