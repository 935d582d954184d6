//! A bar per tensor, under the name of its layer.

use super::axis::Axis;
use super::frame::{CHAR, WIDTH, decibels, label, line};
use super::point::Point;
use crate::markup::{Markup, Px};
use crate::text::names::shortened;

/// Height of a tensor's row, and of a layer's name.
const ROW: f64 = 17.0;
const STACK: f64 = 26.0;
/// Maximum length of a name. Longer names are shortened in the middle.
const LONGEST: usize = 48;
/// Left and right margin.
const MARGIN: f64 = 24.0;

/// Draws bars below `top`. Returns their bottom.
pub(super) fn draw(m: &mut Markup, points: &[Point<'_>], total: f64, top: f64) -> f64 {
    let longest = points.iter().map(|point| point.place.rest.chars().count().min(LONGEST)).max().unwrap_or(0);
    let left = MARGIN + longest.max(12) as f64 * CHAR + 12.0;
    let right = WIDTH - MARGIN - 66.0;
    let values = points.iter().map(|point| point.sqnr_db);
    let axis = Axis::holding(values.chain([0.0, total]), 6.0);
    let x = |value: f64| left + axis.place(value) * (right - left);

    // The grid is drawn first, so the positions of the bars are computed before it.
    let first = top + 34.0;
    let mut y = first;
    let mut rows = Vec::new();
    let mut stack = "";
    for point in points {
        if point.place.stack != stack {
            stack = &point.place.stack;
            y += if stack.is_empty() { 8.0 } else { STACK };
        }
        rows.push(y);
        y += ROW;
    }
    let last = y + 4.0;
    for (tick, text) in axis.ticks() {
        line(m, "grid", [x(tick), first - 4.0], [x(tick), last]);
        label(m, "muted", "middle", [x(tick), first - 10.0], &text);
        label(m, "muted", "middle", [x(tick), last + 16.0], &text);
    }
    label(m, "muted", "end", [left - 10.0, first - 10.0], "SQNR, dB");
    label(m, "muted", "end", [left - 10.0, last + 16.0], "SQNR, dB");

    let mut stack = "";
    for (point, y) in points.iter().zip(rows) {
        let place = &point.place;
        if place.stack != stack {
            stack = &place.stack;
            label(m, "name stack", "start", [MARGIN, y - 6.0], shortened(stack, LONGEST));
        }
        let name = if place.rest.is_empty() { point.name } else { &place.rest };
        label(m, "name", "end", [left - 10.0, y + 12.0], shortened(name, LONGEST));
        let (from, to) = (x(point.sqnr_db.min(0.0)), x(point.sqnr_db.max(0.0)));
        let size = [Px(from), Px(y + 2.0), Px(to - from), Px(ROW - 4.0)];
        let bar: [(&str, &dyn std::fmt::Display); 5] =
            [("class", &"bar"), ("x", &size[0]), ("y", &size[1]), ("width", &size[2]), ("height", &size[3])];
        m.element("rect", &bar, |m| {
            m.leaf("title", &[], format_args!("{}: {}", point.name, decibels(point.sqnr_db)))
        });
        let value = format!("{:.2}", point.sqnr_db).replace('-', "−");
        label(m, "value", "end", [WIDTH - MARGIN, y + 12.0], value);
    }
    line(m, "axis", [x(0.0), first - 4.0], [x(0.0), last]);
    if !total.is_finite() {
        return last + 22.0;
    }
    line(m, "total", [x(total), first - 4.0], [x(total), last + 22.0]);
    let anchor = if axis.place(total) > 0.8 { "end" } else { "middle" };
    label(m, "", anchor, [x(total), last + 36.0], format_args!("all values: {}", decibels(total)));
    last + 42.0
}
