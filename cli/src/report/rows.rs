//! Tables of the report: captions, headers, groups of rows, and cells with text or drawings.

use std::fmt::Display;

use crate::markup::Markup;

/// Characters of a name that no screen should break.
const LONGEST: usize = 52;

/// A table that is being written.
pub(super) struct Rows<'m> {
    pub(super) m: &'m mut Markup,
    /// True, by column, if cells are aligned to the right.
    right: Vec<bool>,
}

/// A row that is being written.
pub(super) struct Row<'m> {
    m: &'m mut Markup,
    right: &'m [bool],
    at: usize,
}

/// A table with a caption and a header. Columns whose names start with `>` are aligned to the right, without
/// the `>`. `body` writes `tbody` elements.
pub(super) fn table(m: &mut Markup, caption: &str, header: &[&str], body: impl FnOnce(&mut Rows<'_>)) {
    // Wide tables are scrolled on narrow screens, which must be possible with a keyboard too.
    m.element(
        "div",
        &[("class", &"scroll"), ("role", &"region"), ("aria-label", &caption), ("tabindex", &0)],
        |m| {
            m.element("table", &[], |m| {
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
                let right = header.iter().map(|name| name.starts_with('>')).collect();
                body(&mut Rows { m, right });
            });
        },
    );
}

fn class(right: bool) -> &'static [(&'static str, &'static dyn Display)] {
    if right { &[("class", &"n")] } else { &[] }
}

impl Rows<'_> {
    /// A `tbody`.
    pub(super) fn body(&mut self, rows: impl FnOnce(&mut Rows<'_>)) {
        let right = self.right.clone();
        self.m.element("tbody", &[], |m| rows(&mut Rows { m, right }));
    }

    /// A row.
    pub(super) fn row(&mut self, cells: impl FnOnce(&mut Row<'_>)) {
        let right = &self.right;
        self.m.element("tr", &[], |m| cells(&mut Row { m, right, at: 0 }));
    }

    /// A row of plain cells, named by its first one.
    pub(super) fn plain(&mut self, name: &str, cells: &[&str]) {
        self.row(|row| {
            row.name(name, false);
            cells.iter().for_each(|cell| row.cell(cell));
        });
    }

    /// A row that names those that follow it.
    pub(super) fn group(&mut self, title: &str) {
        let columns = self.right.len();
        self.m.element("tr", &[("class", &"group")], |m| {
            m.leaf("th", &[("scope", &"rowgroup"), ("colspan", &columns)], title);
        });
    }
}

impl Row<'_> {
    /// A cell.
    pub(super) fn cell(&mut self, text: impl Display) {
        self.drawn("", |m| m.text(text));
    }

    /// A cell with more than text in it, of a class unless that is empty.
    pub(super) fn drawn(&mut self, class_name: &str, content: impl FnOnce(&mut Markup)) {
        let right = self.right.get(self.at).copied().unwrap_or(false);
        self.at += 1;
        let named: &[(&str, &dyn Display)] = &[("class", &class_name)];
        self.m.element("td", if class_name.is_empty() { class(right) } else { named }, content);
    }

    /// The cell that names the row; as code, if it is the name of something in a file.
    pub(super) fn name(&mut self, name: &str, code: bool) {
        self.at += 1;
        let named: &[(&str, &dyn Display)] = &[("scope", &"row"), ("class", &code_class(name))];
        self.m.element("th", &named[..if code { 2 } else { 1 }], |m| breakable(m, name));
    }

    /// A name in a cell that does not name the row.
    pub(super) fn code(&mut self, name: &str) {
        self.drawn(code_class(name), |m| breakable(m, name));
    }
}

/// Names of the usual length stay on one line where there is room.
fn code_class(name: &str) -> &'static str {
    if name.chars().count() > LONGEST { "code long" } else { "code" }
}

/// A name that may go on in the next line behind a dot, a slash or an underscore.
fn breakable(m: &mut Markup, name: &str) {
    for part in name.split_inclusive(['.', '/', '_']) {
        m.text(part);
        if part.len() < name.len() && part.ends_with(['.', '/', '_']) {
            m.empty("wbr", &[]);
        }
    }
}
