//! Loss against size: a curve, and points next to it.

use super::axis::Axis;
use super::dots::shape;
use super::frame::{WIDTH, label, line};
use crate::markup::{Markup, Px};

const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 40.0;
const HEIGHT: f64 = 400.0;

/// A point of size and loss.
pub(crate) struct Mark {
    pub(crate) name: String,
    /// Bits per weight.
    pub(crate) bits: f64,
    /// Relative squared error.
    pub(crate) loss: f64,
}

/// Draws a curve of bits and losses, and marks. The first mark stands out. Returns the bottom.
pub(super) fn draw(m: &mut Markup, curve: &[(f64, f64)], marks: &[Mark], top: f64) -> f64 {
    let top = top + 26.0;
    let percent = |loss: f64| 100.0 * loss;
    let losses = curve.iter().map(|(_, loss)| *loss).chain(marks.iter().map(|mark| mark.loss));
    let bits = curve.iter().map(|(bits, _)| *bits).chain(marks.iter().map(|mark| mark.bits));
    let (across, up) = (Axis::holding(bits, 8.0), Axis::holding(losses.map(percent).chain([0.0]), 6.0));
    let x = |bits: f64| LEFT + across.place(bits) * (RIGHT - LEFT);
    let y = |loss: f64| top + (1.0 - up.place(percent(loss))) * HEIGHT;
    label(m, "muted", "start", [24.0, top - 14.0], "relative squared error, %");
    for (tick, text) in up.ticks() {
        line(m, "grid", [LEFT, y(tick / 100.0)], [RIGHT, y(tick / 100.0)]);
        label(m, "muted", "end", [LEFT - 8.0, y(tick / 100.0) + 4.0], text);
    }
    let bottom = top + HEIGHT;
    for (tick, text) in across.ticks() {
        line(m, "axis", [x(tick), bottom], [x(tick), bottom + 4.0]);
        label(m, "muted", "middle", [x(tick), bottom + 18.0], text);
    }
    line(m, "axis", [LEFT, bottom], [RIGHT, bottom]);
    label(m, "muted", "middle", [(LEFT + RIGHT) / 2.0, bottom + 36.0], "bits per weight");
    let corners: Vec<_> =
        curve.iter().map(|(bits, loss)| format!("{},{}", Px(x(*bits)), Px(y(*loss)))).collect();
    m.empty("polyline", &[("class", &"curve s0"), ("points", &corners.join(" "))]);
    for (number, mark) in marks.iter().enumerate() {
        let (at, ends) = ([x(mark.bits), y(mark.loss)], across.place(mark.bits) > 0.8);
        let title = format!("{}: {:.3} bits per weight, loss {:.4e}", mark.name, mark.bits, mark.loss);
        shape(m, if number == 0 { 3 } else { 1 }, at, &title);
        // The curve falls, so there is room above it on the right.
        let (anchor, dx) = if ends { ("end", -8.0) } else { ("start", 8.0) };
        let class = if number == 0 { "stack" } else { "name" };
        label(m, class, anchor, [at[0] + dx, at[1] - 8.0], &mark.name);
    }
    bottom + 42.0
}
