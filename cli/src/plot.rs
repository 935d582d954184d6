//! Drawing SQNR by tensor: a bar each, or for many tensors dots by layer and kind.

mod axis;
mod bars;
mod dots;

pub(crate) use axis::Axis;

use crate::markup::{Markup, Px};
use crate::names::Place;

/// Colours for light and dark, which plots and pages share.
pub(crate) const THEME: &str = include_str!("plot/theme.css");
/// How the parts of a plot look.
pub(crate) const STYLE: &str = include_str!("plot/plot.css");

/// Plots are as wide as this, in CSS pixels if nobody scales them.
pub(crate) const WIDTH: f64 = 960.0;
/// Room that characters of names take: fixed-width fonts differ little.
const CHAR: f64 = 7.0;
/// More tensors than these are drawn as dots.
const MOST_BARS: usize = 80;

/// A tensor and its SQNR in dB.
pub(crate) struct Point<'a> {
    name: &'a str,
    sqnr_db: f64,
    place: Place,
}

impl<'a> Point<'a> {
    /// `None` if there is no place for it on an axis: without any error, or with nothing but errors.
    pub(crate) fn new(name: &'a str, sqnr_db: f64) -> Option<Self> {
        sqnr_db.is_finite().then(|| Self { name, sqnr_db, place: Place::of(name) })
    }
}

/// A plot as a file of its own.
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    /// Said under the title.
    pub(crate) lines: &'a [String],
    /// In the order in which they are to be drawn.
    pub(crate) points: &'a [Point<'a>],
    /// SQNR over all values, in dB.
    pub(crate) total: f64,
    /// Said at the foot.
    pub(crate) notes: &'a [String],
}

impl Plot<'_> {
    /// As SVG.
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

/// Whether dots by layer would show anything: some tensors are in layers.
pub(crate) fn has_layers(points: &[Point<'_>]) -> bool {
    let mut layers: Vec<_> = points.iter().filter_map(|point| point.place.layer).collect();
    layers.sort_unstable();
    layers.dedup();
    layers.len() > 1
}

/// Dots by layer and kind, as a part of a page that has the styles.
pub(crate) fn dots_by_layer(m: &mut Markup, points: &[Point<'_>], total: f64) {
    let mut plot = Markup::default();
    let height = dots::draw(&mut plot, points, total, 4.0);
    let what = "each quantized tensor's SQNR by layer; the table has the same numbers";
    framed(m, "SQNR by layer", what, height, &[], |m| m.verbatim(&plot.into_text()));
}

/// The `svg` element around a drawing, with its name for those who do not see it.
pub(crate) fn framed(
    m: &mut Markup,
    title: &str,
    description: &str,
    height: f64,
    size: super::markup::Attributes<'_>,
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
fn decibels(sqnr_db: f64) -> String {
    super::table::decibels(sqnr_db).replace('-', "−")
}
