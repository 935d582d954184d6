//! The frame of a plot: the `svg` element with its description, lines and labels.

use crate::markup::{Attributes, Markup, Px};
use crate::text::table;

/// Width of plots, in CSS pixels if they are not scaled.
pub(crate) const WIDTH: f64 = 960.0;
/// Width of a character of a name. Fixed-width fonts differ little.
pub(crate) const CHAR: f64 = 7.0;
/// Writes the `svg` element around a drawing, with a label for screen readers.
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

/// Draws a line of an axis or a grid.
pub(crate) fn line(m: &mut Markup, class: &str, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) {
    let (from, to) = ([Px(x1), Px(y1)], [Px(x2), Px(y2)]);
    m.empty("line", &[("class", &class), ("x1", &from[0]), ("y1", &from[1]), ("x2", &to[0]), ("y2", &to[1])]);
}

/// Writes text that starts, ends or is centred at a point.
pub(crate) fn label(
    m: &mut Markup,
    class: &str,
    anchor: &str,
    [x, y]: [f64; 2],
    text: impl std::fmt::Display,
) {
    m.leaf("text", &[("class", &class), ("x", &Px(x)), ("y", &Px(y)), ("text-anchor", &anchor)], text);
}

/// `17.90 dB`, with a minus sign instead of a hyphen.
pub(crate) fn decibels(sqnr_db: f64) -> String {
    table::decibels(sqnr_db).replace('-', "−")
}
