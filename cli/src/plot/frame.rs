//! The frame of a plot: the `svg` element with its description, and lines and labels in it.

use crate::markup::{Attributes, Markup, Px};
use crate::text::table;

/// Plots are as wide as this, in CSS pixels if nobody scales them.
pub(crate) const WIDTH: f64 = 960.0;
/// Room that characters of names take: fixed-width fonts differ little.
pub(crate) const CHAR: f64 = 7.0;
/// The `svg` element around a drawing, with its name for those who do not see it.
pub(crate) fn framed(
    m: &mut Markup,
    title: &str,
    description: &str,
    height: f64,
    size: Attributes<'_>,
    content: impl FnOnce(&mut Markup),
) {
    let view = format!("0 0 {} {}", Px(WIDTH), Px(height));
    let label = format!("{title}: {description}");
    let frame: [(&str, &dyn std::fmt::Display); 5] = [
        ("xmlns", &"http://www.w3.org/2000/svg"),
        ("class", &"plot"),
        ("viewBox", &view),
        ("role", &"img"),
        ("aria-label", &label),
    ];
    m.element("svg", &[&frame[..], size].concat(), content);
}

/// A line of an axis or a grid.
pub(crate) fn line(m: &mut Markup, class: &str, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) {
    let (from, to) = ([Px(x1), Px(y1)], [Px(x2), Px(y2)]);
    m.empty("line", &[("class", &class), ("x1", &from[0]), ("y1", &from[1]), ("x2", &to[0]), ("y2", &to[1])]);
}

/// Text that starts, ends or has its middle at a point.
pub(crate) fn label(
    m: &mut Markup,
    class: &str,
    anchor: &str,
    [x, y]: [f64; 2],
    text: impl std::fmt::Display,
) {
    m.leaf("text", &[("class", &class), ("x", &Px(x)), ("y", &Px(y)), ("text-anchor", &anchor)], text);
}

/// `17.90 dB`, with a minus sign that is one.
pub(crate) fn decibels(sqnr_db: f64) -> String {
    table::decibels(sqnr_db).replace('-', "−")
}
