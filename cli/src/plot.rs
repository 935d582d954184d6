//! Plots of SQNR by tensor: bars, or dots by layer and kind for many tensors.

pub(crate) mod axis;
mod bars;
mod dots;
pub(crate) mod frame;
pub(crate) mod point;

use crate::markup::{Markup, Px};
use crate::plot::frame::{WIDTH, framed};
use crate::plot::point::Point;

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
        let mut m = Markup::default();
        let mut y = 36.0;
        m.leaf("text", &[("class", &"title"), ("x", &24), ("y", &Px(y))], self.title);
        for line in self.lines {
            y += 19.0;
            m.leaf("text", &[("class", &"muted"), ("x", &24), ("y", &Px(y))], line);
        }
        y += 14.0;
        if self.points.is_empty() {
            y += 24.0;
            m.leaf("text", &[("x", &24), ("y", &Px(y))], "There is nothing to draw.");
        } else if self.points.len() <= MOST_BARS || !has_layers(self.points) {
            y = bars::draw(&mut m, self.points, self.total, y);
        } else {
            y = dots::draw(&mut m, self.points, self.total, y);
        }
        for note in self.notes {
            y += 19.0;
            m.leaf("text", &[("class", &"muted"), ("x", &24), ("y", &Px(y))], note);
        }
        let mut document = Markup::default();
        document.verbatim("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let size: &[_] = &[("width", &Px(WIDTH) as _), ("height", &Px(y + 20.0) as _)];
        framed(&mut document, self.title, &self.lines.join(", "), y + 20.0, size, |document| {
            document.element("style", &[], |document| {
                document.verbatim(THEME);
                document.verbatim(STYLE);
            });
            document.empty("rect", &[("class", &"page"), ("width", &"100%"), ("height", &"100%")]);
            document.verbatim(&m.into_text());
        });
        document.into_text()
    }
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
