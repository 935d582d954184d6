//! Plots: SQNR by tensor, as bars, or as dots by layer and kind for many tensors; and loss against
//! size.

pub(crate) mod axis;
mod bars;
mod dots;
pub(crate) mod frame;
pub(crate) mod point;
pub(crate) mod sizes;

use crate::markup::{Markup, Px};
use crate::plot::frame::{WIDTH, framed};
use crate::plot::point::Point;
use crate::plot::sizes::Mark;

/// Light and dark colours, shared by plots and pages.
pub(crate) const THEME: &str = include_str!("plot/theme.css");
/// The style sheet of plots.
pub(crate) const STYLE: &str = include_str!("plot/plot.css");

/// Maximum number of bars. More tensors are drawn as dots.
const MOST_BARS: usize = 80;

/// A plot as a file of its own.
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    /// Lines under the title.
    pub(crate) lines: &'a [String],
    /// The points in drawing order.
    pub(crate) points: &'a [Point<'a>],
    /// SQNR over all values, in dB.
    pub(crate) total: f64,
    /// Lines at the bottom.
    pub(crate) notes: &'a [String],
}

impl Plot<'_> {
    /// Draws the plot as SVG.
    pub(crate) fn svg(&self) -> String {
        document(self.title, self.lines, self.notes, |m, top| {
            if self.points.is_empty() {
                let y = top + 24.0;
                m.leaf("text", &[("x", &24), ("y", &Px(y))], "There is nothing to draw.");
                y
            } else if self.points.len() <= MOST_BARS || !has_layers(self.points) {
                bars::draw(m, self.points, self.total, top)
            } else {
                dots::draw(m, self.points, self.total, top)
            }
        })
    }
}

/// Draws loss against size as a file of its own: a curve of bits and losses, and marks. The first
/// mark stands out.
pub(crate) fn sizes_svg(title: &str, lines: &[String], curve: &[(f64, f64)], marks: &[Mark]) -> String {
    document(title, lines, &[], |m, top| sizes::draw(m, curve, marks, top))
}

/// Writes a file with a title, lines under it, a drawing and notes. `draw` gets its top and returns
/// its bottom.
fn document(
    title: &str,
    lines: &[String],
    notes: &[String],
    draw: impl FnOnce(&mut Markup, f64) -> f64,
) -> String {
    let mut m = Markup::default();
    let mut y = 36.0;
    m.leaf("text", &[("class", &"title"), ("x", &24), ("y", &Px(y))], title);
    for line in lines {
        y += 19.0;
        m.leaf("text", &[("class", &"muted"), ("x", &24), ("y", &Px(y))], line);
    }
    y = draw(&mut m, y + 14.0);
    for note in notes {
        y += 19.0;
        m.leaf("text", &[("class", &"muted"), ("x", &24), ("y", &Px(y))], note);
    }
    let mut document = Markup::default();
    document.verbatim("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let size: &[_] = &[("width", &Px(WIDTH) as _), ("height", &Px(y + 20.0) as _)];
    framed(&mut document, title, &lines.join(", "), y + 20.0, size, |document| {
        document.element("style", &[], |document| {
            document.verbatim(THEME);
            document.verbatim(STYLE);
        });
        document.empty("rect", &[("class", &"page"), ("width", &"100%"), ("height", &"100%")]);
        document.verbatim(&m.into_text());
    });
    document.into_text()
}

/// Returns whether tensors are in more than one layer.
pub(crate) fn has_layers(points: &[Point<'_>]) -> bool {
    let mut layers: Vec<_> = points.iter().filter_map(|point| point.place.layer).collect();
    layers.sort_unstable();
    layers.dedup();
    layers.len() > 1
}

/// Draws dots by layer and kind, as a part of a page that has the styles.
pub(crate) fn dots_by_layer(m: &mut Markup, points: &[Point<'_>], total: f64) {
    let mut plot = Markup::default();
    let height = dots::draw(&mut plot, points, total, 4.0);
    let what = "SQNR of each quantized tensor by layer; the table has the same numbers";
    framed(m, "SQNR by layer", what, height, &[], |m| m.verbatim(&plot.into_text()));
}
