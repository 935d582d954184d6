//! A dot per tensor, by layer. Each kind of tensor has a colour and a shape.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::axis::Axis;
use super::frame::{CHAR, WIDTH, decibels, label, line};
use super::point::Point;
use crate::markup::{Markup, Px};
use crate::text::names::{short_kinds, shortened};
use crate::text::table::{count, natural_order};

/// Shapes around the origin.
const SHAPES: [&str; 7] = [
    "M-3.8 0a3.8 3.8 0 1 0 7.6 0a3.8 3.8 0 1 0-7.6 0z",
    "M-3.4-3.4h6.8v6.8h-6.8z",
    "M0-4.6l4.4 7.8h-8.8z",
    "M0-5l4.6 5l-4.6 5l-4.6-5z",
    "M0 4.6l4.4-7.8h-8.8z",
    "M-1.5-4.6h3v3.1h3.1v3h-3.1v3.1h-3v-3.1h-3.1v-3h3.1z",
    "M-2.2-4.3l2.2 2.2l2.2-2.2l2.1 2.1l-2.2 2.2l2.2 2.2l-2.1 2.1l-2.2-2.2l-2.2 2.2l-2.1-2.1l2.2-2.2l-2.2-2.2z",
];
/// Number of colours, `f0` to `f7` in the style. With the shapes they make 56 pairs.
const COLOURS: usize = 8;
/// Maximum number of kinds with their own colour and shape: the most frequent ones.
const MOST_KINDS: usize = 14;
/// Maximum length of a kind's label. Longer labels are shortened in the middle.
const LONGEST: usize = 28;
const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 84.0;
const HEIGHT: f64 = 340.0;

/// A kind of tensor.
struct Kind<'a> {
    label: String,
    /// The points by layer; `None` for tensors outside layers.
    points: BTreeMap<Option<u64>, Vec<&'a Point<'a>>>,
}

/// Draws a legend and dots below `top`. Returns their bottom.
pub(super) fn draw(m: &mut Markup, points: &[Point<'_>], total: f64, top: f64) -> f64 {
    let kinds = kinds(points);
    let top = legend(m, &kinds, top) + 26.0;
    let axis = Axis::holding(points.iter().map(|point| point.sqnr_db).chain([total]), 6.0);
    let y = |value: f64| top + (1.0 - axis.place(value)) * HEIGHT;
    label(m, "muted", "start", [24.0, top - 14.0], "SQNR, dB");
    for (tick, text) in axis.ticks() {
        line(m, "grid", [LEFT, y(tick)], [RIGHT, y(tick)]);
        label(m, "muted", "end", [LEFT - 8.0, y(tick) + 4.0], text);
    }
    let columns = Columns::of(points);
    columns.axis(m, top + HEIGHT);
    if total.is_finite() {
        line(m, "total", [LEFT, y(total)], [RIGHT, y(total)]);
        label(m, "", "start", [RIGHT + 8.0, y(total) - 2.0], "all values");
        label(m, "", "start", [RIGHT + 8.0, y(total) + 12.0], decibels(total));
    }
    for (i, kind) in kinds.iter().enumerate() {
        let x = |layer| columns.middle(layer) + columns.shift(i, kinds.len());
        links(m, i, kind, |layer, value| [x(layer), y(value)]);
        for (layer, points) in &kind.points {
            mark(m, i, kind, *layer, points, |value| [x(*layer), y(value)]);
        }
    }
    top + HEIGHT + 44.0
}

/// Returns the kinds in natural order. If there are too many, rare ones are merged.
fn kinds<'a>(points: &'a [Point<'a>]) -> Vec<Kind<'a>> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    points.iter().for_each(|point| *counts.entry(&point.place.kind).or_default() += 1);
    let mut names: Vec<_> = counts.into_iter().collect();
    names.sort_by(|(a, n), (b, m)| m.cmp(n).then_with(|| natural_order(a, b)));
    let rare = if names.len() > MOST_KINDS { names.split_off(MOST_KINDS - 1).len() } else { 0 };
    let mut names: Vec<_> = names.into_iter().map(|(name, _)| name).collect();
    names.sort_by(|a, b| natural_order(a, b));
    let labels = short_kinds(&names).into_iter().map(|label| shortened(label, LONGEST));
    let mut kinds: Vec<_> = labels.map(|label| Kind { label, points: BTreeMap::new() }).collect();
    if rare > 0 {
        kinds.push(Kind { label: format!("{} other kinds", count(rare as u64)), points: BTreeMap::new() });
    }
    let places: HashMap<_, _> = names.into_iter().zip(0..).collect();
    let last = kinds.len() - 1;
    for point in points {
        let kind = places.get(point.place.kind.as_str()).copied().unwrap_or(last);
        kinds[kind].points.entry(point.place.layer).or_default().push(point);
    }
    for points in kinds.iter_mut().flat_map(|kind| kind.points.values_mut()) {
        points.sort_by(|a, b| a.sqnr_db.total_cmp(&b.sqnr_db));
    }
    kinds
}

/// Draws rows of shapes with the names of the kinds. Returns their bottom.
fn legend(m: &mut Markup, kinds: &[Kind<'_>], top: f64) -> f64 {
    let longest = kinds.iter().map(|kind| kind.label.chars().count()).max().unwrap_or(0);
    let width = longest as f64 * CHAR + 34.0;
    let in_row = (((WIDTH - 48.0) / width) as usize).clamp(1, kinds.len().max(1));
    for (i, kind) in kinds.iter().enumerate() {
        let x = 28.0 + (i % in_row) as f64 * width;
        let y = top + 12.0 + (i / in_row) as f64 * 19.0;
        shape(m, i, [x, y], "");
        label(m, "name", "start", [x + 11.0, y + 4.0], &kind.label);
    }
    top + 12.0 + kinds.len().div_ceil(in_row) as f64 * 19.0
}

/// The columns of layers.
struct Columns {
    layers: Vec<u64>,
    width: f64,
}

impl Columns {
    fn of(points: &[Point<'_>]) -> Self {
        let layers: BTreeSet<_> = points.iter().filter_map(|point| point.place.layer).collect();
        let outside = points.iter().any(|point| point.place.layer.is_none());
        // Tensors outside layers have a column of their own, after an empty one.
        let columns = layers.len() + if outside { 2 } else { 0 };
        Self { layers: layers.into_iter().collect(), width: (RIGHT - LEFT) / columns.max(1) as f64 }
    }

    fn middle(&self, layer: Option<u64>) -> f64 {
        let at = layer.and_then(|layer| self.layers.binary_search(&layer).ok());
        LEFT + self.width * (at.unwrap_or(self.layers.len() + 1) as f64 + 0.5)
    }

    /// Returns the horizontal offset of a kind, so that kinds do not overlap.
    fn shift(&self, kind: usize, kinds: usize) -> f64 {
        (kind as f64 - (kinds - 1) as f64 / 2.0) * (self.width * 0.7 / kinds as f64).min(14.0)
    }

    fn axis(&self, m: &mut Markup, y: f64) {
        line(m, "axis", [LEFT, y], [RIGHT, y]);
        let digits = self.layers.last().map_or(1, |layer| layer.to_string().len());
        let room = (digits as f64 * CHAR + 12.0) / self.width;
        let step =
            [1, 2, 5, 10, 20, 50].into_iter().find(|step| *step as f64 >= room).unwrap_or(room as usize + 1);
        for layer in self.layers.iter().step_by(step) {
            let x = self.middle(Some(*layer));
            line(m, "axis", [x, y], [x, y + 4.0]);
            label(m, "muted", "middle", [x, y + 18.0], layer);
        }
        let end = LEFT + self.width * self.layers.len() as f64;
        label(m, "muted", "middle", [(LEFT + end) / 2.0, y + 36.0], "layer");
        if end < RIGHT - 1.0 {
            label(m, "muted", "middle", [self.middle(None).min(RIGHT - 20.0), y + 18.0], "none");
        }
    }
}

/// Draws thin lines from each layer's median to the median of the next layer.
fn links(m: &mut Markup, i: usize, kind: &Kind<'_>, at: impl Fn(Option<u64>, f64) -> [f64; 2]) {
    let layers = kind.points.iter().filter(|(layer, _)| layer.is_some());
    let path: Vec<_> = layers
        .map(|(layer, points)| {
            let [x, y] = at(*layer, points[points.len() / 2].sqnr_db);
            format!("{},{}", Px(x), Px(y))
        })
        .collect();
    if path.len() > 1 {
        let class = format!("link s{}", i % COLOURS);
        m.empty("polyline", &[("class", &class), ("points", &path.join(" "))]);
    }
}

/// Draws a tensor's dot. Several tensors of a kind in one layer, such as experts, have a dot at the
/// median on a line from the minimum to the maximum.
fn mark(
    m: &mut Markup,
    i: usize,
    kind: &Kind<'_>,
    layer: Option<u64>,
    points: &[&Point<'_>],
    at: impl Fn(f64) -> [f64; 2],
) {
    let (first, last) = (points[0], points[points.len() - 1]);
    let median = points[points.len() / 2].sqnr_db;
    if points.len() == 1 {
        return shape(m, i, at(median), &format!("{}: {}", first.name, decibels(median)));
    }
    line(m, &format!("range s{}", i % COLOURS), at(first.sqnr_db), at(last.sqnr_db));
    let layer = layer.map_or("no layer".into(), |layer| format!("layer {layer}"));
    let (tensors, low, high) = (count(points.len() as u64), decibels(first.sqnr_db), decibels(last.sqnr_db));
    let about =
        format!("{}, {layer}: {tensors} tensors, {low} to {high}, median {}", kind.label, decibels(median));
    shape(m, i, at(median), &about);
}

/// Draws the shape of a kind's number around a point, with a title unless it is empty.
pub(super) fn shape(m: &mut Markup, i: usize, [x, y]: [f64; 2], title: &str) {
    let (class, place) = (format!("f{}", i % COLOURS), format!("translate({} {})", Px(x), Px(y)));
    let path = SHAPES[i % SHAPES.len()];
    m.element("path", &[("class", &class), ("transform", &place), ("d", &path)], |m| {
        if !title.is_empty() {
            m.leaf("title", &[], title);
        }
    });
}
