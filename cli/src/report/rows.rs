//! Tables of the report: captions, headers, groups of rows, and cells with text or drawings.

use std::fmt::Display;

use crate::markup::Markup;

/// Names up to this number of characters stay on one line.
const LONGEST: usize = 52;

/// Maximum number of columns of a table that stays one on narrow screens.
const NARROW: usize = 4;

/// Writer of a table's rows.
pub(super) struct Rows<'m> {
    pub(super) m: &'m mut Markup,
    columns: &'m [&'m str],
}

/// Writer of a row's cells.
pub(super) struct Row<'m> {
    m: &'m mut Markup,
    columns: &'m [&'m str],
    at: usize,
}

/// Writes a table with a caption and a header. `body` writes `tbody` elements.
///
/// Columns whose names start with `>` are aligned to the right, without the `>`. On narrow screens
/// the rows of a table with more than [`NARROW`] columns become lists of labelled values.
pub(super) fn table(m: &mut Markup, caption: &str, header: &[&str], body: impl FnOnce(&mut Rows<'_>)) {
    // A table that is still too wide scrolls, also by keyboard.
    m.element(
        "div",
        &[("class", &"scroll"), ("role", &"region"), ("aria-label", &caption), ("tabindex", &0)],
        |m| {
            let wide: &[(&str, &dyn Display)] = if is_wide(header) { &[("class", &"wide")] } else { &[] };
            m.element("table", wide, |m| {
                m.leaf("caption", &[], caption);
                m.element("thead", &[], |m| {
                    m.element("tr", &[], |m| {
                        for name in header {
                            let class = class(name.starts_with('>'));
                            m.leaf(
                                "th",
                                &[&[("scope", &"col" as &dyn Display)], class].concat(),
                                name.trim_start_matches('>'),
                            );
                        }
                    });
                });
                body(&mut Rows { m, columns: header });
            });
        },
    );
}

/// Returns whether a table's rows are lists on narrow screens.
fn is_wide(header: &[&str]) -> bool {
    header.len() > NARROW
}

fn class(right: bool) -> &'static [(&'static str, &'static dyn Display)] {
    if right { &[("class", &"n")] } else { &[] }
}

impl Rows<'_> {
    /// Writes a `tbody`.
    pub(super) fn body(&mut self, rows: impl FnOnce(&mut Rows<'_>)) {
        let columns = self.columns;
        self.m.element("tbody", &[], |m| rows(&mut Rows { m, columns }));
    }

    /// Writes a row.
    pub(super) fn row(&mut self, cells: impl FnOnce(&mut Row<'_>)) {
        let columns = self.columns;
        self.m.element("tr", &[], |m| cells(&mut Row { m, columns, at: 0 }));
    }

    /// Writes a row of plain cells. The first one names the row.
    pub(super) fn plain(&mut self, name: &str, cells: &[&str]) {
        self.row(|row| {
            row.name(name, false);
            cells.iter().for_each(|cell| row.cell(cell));
        });
    }

    /// Writes a row that names the following rows.
    pub(super) fn group(&mut self, title: &str) {
        let columns = self.columns.len();
        self.m.element("tr", &[("class", &"group")], |m| {
            m.leaf("th", &[("scope", &"rowgroup"), ("colspan", &columns)], title);
        });
    }
}

impl Row<'_> {
    /// Writes a cell.
    pub(super) fn cell(&mut self, text: impl Display) {
        self.drawn("", |m| m.text(text));
    }

    /// Writes a cell with any content, of a class unless `class_name` is empty.
    pub(super) fn drawn(&mut self, class_name: &str, content: impl FnOnce(&mut Markup)) {
        let column = self.columns.get(self.at).copied().unwrap_or_default();
        self.at += 1;
        let label = column.trim_start_matches('>');
        let named: &[(&str, &dyn Display)] = &[("class", &class_name)];
        let class = if class_name.is_empty() { class(column.starts_with('>')) } else { named };
        // Narrow screens show the label in place of the header.
        let labelled: &[(&str, &dyn Display)] =
            if is_wide(self.columns) { &[("data-label", &label)] } else { &[] };
        self.m.element("td", &[class, labelled].concat(), content);
    }

    /// Writes the cell that names the row, as code if it is a name from a file.
    pub(super) fn name(&mut self, name: &str, code: bool) {
        self.at += 1;
        let named: &[(&str, &dyn Display)] = &[("scope", &"row"), ("class", &code_class(name))];
        self.m.element("th", &named[..if code { 2 } else { 1 }], |m| breakable(m, name));
    }

    /// Writes a name as code in a cell that does not name the row.
    pub(super) fn code(&mut self, name: &str) {
        self.drawn(code_class(name), |m| breakable(m, name));
    }
}

/// Returns the class of a name. Names up to [`LONGEST`] stay on one line on wide screens.
fn code_class(name: &str) -> &'static str {
    if name.chars().count() > LONGEST { "code long" } else { "code" }
}

/// Writes a name that may break after a dot, a slash or an underscore.
fn breakable(m: &mut Markup, name: &str) {
    for part in name.split_inclusive(['.', '/', '_']) {
        m.text(part);
        if part.len() < name.len() && part.ends_with(['.', '/', '_']) {
            m.empty("wbr", &[]);
        }
    }
}
