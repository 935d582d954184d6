//! The closing tables of the program, and the run's settings.

use microscale::{ErrorStats, Words};
use microscale_checkpoint::{Summary, Totals};

use super::figures::{date, share};
use super::rows::table;
use super::run::Run;
use crate::markup::Markup;
use crate::text::table::{bytes, cosine, count, decibels, figure, left_out, rate, seconds};

pub(super) fn write(m: &mut Markup, summary: &Summary) {
    let totals = summary.totals();
    m.element("div", &[("class", &"beside")], |m| {
        sizes(m, summary, &totals);
        loss(m, &totals.errors);
        counts(m, &totals);
        search(m, summary, &totals);
    });
}

fn sizes(m: &mut Markup, summary: &Summary, totals: &Totals) {
    let header = ["", ">tensors", ">elements", ">before", ">after", ">ratio"];
    table(m, "Sizes", &header, |rows| {
        rows.body(|rows| {
            let (quantized, copied) = (totals.quantized, totals.copied);
            let formats = summary.formats();
            let several = formats.iter().filter(|_| formats.len() > 1);
            let several = several.map(|(format, sums)| (format.word(), *sums));
            let all = [("quantized", quantized), ("copied", copied), ("total", quantized.with(copied))];
            for (what, sum) in several.chain(all) {
                let cells = [
                    count(sum.tensors),
                    count(sum.elements),
                    bytes(sum.bytes_before),
                    bytes(sum.bytes_after),
                    format!("{:.2}", sum.ratio()),
                ];
                rows.plain(what, &cells.each_ref().map(String::as_str));
            }
        });
    });
}

fn loss(m: &mut Markup, errors: &ErrorStats) {
    table(m, "Loss of all quantized tensors", &["figure", ">value"], |rows| {
        rows.body(|rows| {
            rows.plain("SQNR", &[&decibels(errors.sqnr_db())]);
            rows.plain("relative squared error", &[&figure(errors.relative_squared_error())]);
            rows.plain("largest error", &[&figure(errors.max_abs_error())]);
            rows.plain("cosine", &[&cosine(errors.cosine())]);
            if let Some(left_out) = left_out(errors) {
                rows.plain("left out", &[&left_out]);
            }
        });
    });
}

fn counts(m: &mut Markup, totals: &Totals) {
    let (report, blocks) = (totals.report, totals.blocks);
    let caption = format!("Values that were not kept, of {} blocks", count(blocks));
    table(m, &caption, &["event", ">count", ">share"], |rows| {
        rows.body(|rows| {
            for (what, n) in [("NaN elements", report.nan), ("infinite elements", report.infinite)] {
                rows.plain(what, &[&count(n), &share(n, totals.quantized.elements, "")]);
            }
            for (what, n) in [
                ("blocks clipped", report.clipped_blocks),
                ("blocks flushed to zero", report.flushed_blocks),
                ("scales saturated", report.saturated_scales),
            ] {
                rows.plain(what, &[&count(n), &share(n, blocks, "")]);
            }
        });
    });
}

/// Writes the effect of a search for scales, if there was one.
fn search(m: &mut Markup, summary: &Summary, totals: &Totals) {
    // GPTQ does not minimize the error that this table shows.
    let Some(plain) = totals.plain.filter(|_| totals.outputs.is_none()) else { return };
    let (report, errors, blocks) = (totals.report, totals.errors, totals.searched_blocks);
    let of = |n: u64, all: u64| format!("{} of {}", count(n), count(all));
    table(m, "Searched scales", &["figure", ">plain scales", ">searched"], |rows| {
        rows.body(|rows| {
            let error = |errors: ErrorStats| figure(errors.relative_squared_error());
            rows.plain("relative squared error", &[&error(plain), &error(errors)]);
            rows.plain("SQNR", &[&decibels(plain.sqnr_db()), &decibels(errors.sqnr_db())]);
            rows.plain("blocks changed", &["", &of(report.rescaled_blocks, blocks)]);
            let tried = report.tried_scales as f64 / blocks.max(1) as f64;
            rows.plain("candidates tried a block", &["", &format!("{tried:.1}")]);
            if summary.has_fact("search_global") {
                rows.plain(
                    "global scales changed",
                    &["", &of(totals.rescaled_tensors, totals.quantized.tensors)],
                );
            }
            if let Some(checked) = summary.checked_blocks {
                rows.plain("scales that no other beats", &["", &of(checked, blocks)]);
            }
        });
    });
}

/// Writes the settings that decide the bytes, and the place and time of the run.
pub(super) fn settings(m: &mut Markup, run: &Run<'_>) {
    let (summary, totals) = (run.summary, run.summary.totals());
    m.element("div", &[("class", &"beside")], |m| {
        for used in &summary.recipes {
            let caption = match summary.recipes.len() {
                1 => "Settings that decide the bytes".into(),
                _ => format!("Settings that decide the bytes of {} tensors", count(used.sums.tensors)),
            };
            table(m, &caption, &["setting", "value"], |rows| {
                rows.body(|rows| {
                    for (name, fact) in &used.facts {
                        rows.plain(&name.replace('_', " "), &[fact]);
                    }
                });
            });
        }
        table(m, "The run", &["property", "value"], |rows| {
            rows.body(|rows| {
                rows.plain("program", &[concat!("microscale ", env!("CARGO_PKG_VERSION"))]);
                rows.plain("device", &[&summary.device]);
                rows.plain("started", &[&date(run.started)]);
                let quantizing = format!("{} ({})", seconds(totals.seconds), rate(totals.bytes_per_second()));
                rows.plain("time to quantize", &[&quantizing]);
                rows.plain("time in all", &[&seconds(summary.seconds)]);
                for (what, path) in [("input", run.input), ("output", run.out)] {
                    rows.row(|row| {
                        row.name(what, false);
                        row.code(&path.display().to_string());
                    });
                }
            });
        });
    });
}
