//! Reports on a quantized checkpoint, an evaluation and a calibration: one HTML page each, without
//! scripts and external resources.

mod blocks;
#[cfg(feature = "models")]
pub(crate) mod calibration;
mod copied;
mod distributions;
#[cfg(feature = "models")]
pub(crate) mod evaluation;
mod figures;
mod rows;
pub(crate) mod run;
mod strips;
mod tensors;
mod totals;

use std::path::Path;

use microscale::Words;
use microscale_checkpoint::Outcome;

use crate::markup::Markup;
use crate::plot;
use crate::report::figures::{date, share};
use crate::report::run::Run;
use crate::text::table::{bytes, count, decibels, figure, seconds};

/// The style sheet of the page, except the plots.
const STYLE: &str = include_str!("report/page.css");

impl Run<'_> {
    /// Returns the page, which is also well-formed XML.
    pub(crate) fn html(&self) -> String {
        let name = model_name(self.input);
        let opening = |m: &mut Markup| self.opening(m, &name);
        page(&format!("{name}: quantization report"), opening, |m| self.sections(m))
    }

    /// Writes the title and the most important figures.
    fn opening(&self, m: &mut Markup, name: &str) {
        let totals = self.summary.totals();
        let all = totals.quantized.with(totals.copied);
        let formats = self.summary.formats();
        let formats: Vec<_> = formats.iter().map(|(format, _)| format.word().to_uppercase()).collect();
        let formats = formats.join(" and ");
        m.element("header", &[], |m| {
            m.leaf("h1", &[], name);
            let when = date(self.started);
            m.leaf("p", &[("class", &"lead")], format_args!("Quantized to {formats} on {when}"));
            m.element("dl", &[("class", &"tiles")], |m| {
                let error = figure(totals.errors.relative_squared_error());
                tile(
                    m,
                    "SQNR",
                    &decibels(totals.errors.sqnr_db()),
                    &format!("relative squared error {error}"),
                );
                let (before, after) = (bytes(all.bytes_before), bytes(all.bytes_after));
                let quantized = format!("quantized tensors {:.2} times smaller", totals.quantized.ratio());
                tile(m, "Size", &format!("{before} → {after}"), &quantized);
                let of = format!("{} of {}", count(totals.quantized.tensors), count(all.tensors));
                tile(
                    m,
                    "Tensors quantized",
                    &of,
                    &share(totals.quantized.elements, all.elements, "of all elements"),
                );
                let time = format!("{} for quantizing", seconds(totals.seconds));
                tile(m, "Time", &seconds(self.summary.seconds), &time);
            });
        });
    }

    fn sections(&self, m: &mut Markup) {
        let summary = self.summary;
        let copied = summary.tensors.iter().any(|tensor| matches!(tensor.outcome, Outcome::Copied(_)));
        section(m, "totals", "Totals", |m| totals::write(m, summary));
        section(m, "settings", "Settings", |m| totals::settings(m, self));
        section(m, "tensors", "Loss by tensor", |m| tensors::write(m, summary));
        let histograms = summary.histograms();
        if !histograms.is_empty() {
            section(m, "distributions", "Scales and codes", |m| distributions::write(m, &histograms));
            section(m, "blocks", "Worst blocks", |m| blocks::write(m, summary));
        }
        if copied {
            section(m, "copied", "Copied tensors", |m| copied::write(m, summary));
        }
        if !summary.skipped.is_empty() {
            section(m, "skipped", "Files left out", |m| copied::skipped(m, summary));
        }
    }
}

/// Returns a page with a title, an opening and sections.
fn page(title: &str, opening: impl FnOnce(&mut Markup), sections: impl FnOnce(&mut Markup)) -> String {
    let mut page = Markup::default();
    page.verbatim("<!DOCTYPE html>\n");
    page.element("html", &[("xmlns", &"http://www.w3.org/1999/xhtml"), ("lang", &"en")], |m| {
        m.element("head", &[], |m| head(m, title));
        m.element("body", &[], |m| {
            opening(m);
            m.element("main", &[], sections);
            let version = env!("CARGO_PKG_VERSION");
            m.leaf("footer", &[], format_args!("Written by microscale {version}."));
        });
    });
    page.into_text()
}

fn head(m: &mut Markup, title: &str) {
    m.empty("meta", &[("charset", &"utf-8")]);
    // The page loads nothing. The policy has the browser enforce that.
    let policy = "default-src 'none'; style-src 'unsafe-inline'";
    m.empty("meta", &[("http-equiv", &"Content-Security-Policy"), ("content", &policy)]);
    m.empty("meta", &[("name", &"viewport"), ("content", &"width=device-width, initial-scale=1")]);
    m.leaf("title", &[], title);
    m.element("style", &[], |m| [plot::THEME, plot::STYLE, STYLE].iter().for_each(|style| m.verbatim(style)));
}

fn section(m: &mut Markup, id: &str, title: &str, content: impl FnOnce(&mut Markup)) {
    let heading = format!("{id}-heading");
    m.element("section", &[("id", &id), ("aria-labelledby", &heading)], |m| {
        m.leaf("h2", &[("id", &heading)], title);
        content(m);
    });
}

fn tile(m: &mut Markup, what: &str, figure: &str, more: &str) {
    m.element("div", &[], |m| {
        m.leaf("dt", &[], what);
        m.leaf("dd", &[("class", &"figure")], figure);
        m.leaf("dd", &[], more);
    });
}

/// Returns the name of a model: the name of its directory or file.
fn model_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.into());
    full.file_name().map_or_else(|| full.display().to_string(), |name| name.to_string_lossy().into_owned())
}
