//! Writer of HTML and SVG that is also well-formed XML: all elements are closed.

use std::fmt::{self, Display, Write};

/// Attributes of an element: names and unescaped values.
pub(crate) type Attributes<'a> = &'a [(&'a str, &'a dyn Display)];

/// Writer of a document. Everything except [`Markup::verbatim`] is escaped, because tensor names
/// come from untrusted files.
#[derive(Default)]
pub(crate) struct Markup {
    text: String,
}

impl Markup {
    /// Writes an element with the output of `content`.
    pub(crate) fn element(
        &mut self,
        name: &str,
        attributes: Attributes<'_>,
        content: impl FnOnce(&mut Self),
    ) {
        self.open(name, attributes);
        self.text.push('>');
        content(self);
        self.text += "</";
        self.text += name;
        self.text.push('>');
    }

    /// Writes an element with text.
    pub(crate) fn leaf(&mut self, name: &str, attributes: Attributes<'_>, text: impl Display) {
        self.element(name, attributes, |m| m.text(text));
    }

    /// Writes an element that never has content, such as an SVG shape or HTML's `meta`. HTML
    /// accepts this form only for such elements.
    pub(crate) fn empty(&mut self, name: &str, attributes: Attributes<'_>) {
        self.open(name, attributes);
        self.text += "/>";
    }

    /// Writes text.
    pub(crate) fn text(&mut self, text: impl Display) {
        // Writing to a string never fails.
        let _ = write!(Escaped(&mut self.text), "{text}");
    }

    /// Appends markup as it is.
    pub(crate) fn verbatim(&mut self, markup: &str) {
        self.text += markup;
    }

    /// Returns the document.
    pub(crate) fn into_text(self) -> String {
        self.text
    }

    fn open(&mut self, name: &str, attributes: Attributes<'_>) {
        self.text.push('<');
        self.text += name;
        for (name, value) in attributes {
            self.text.push(' ');
            self.text += name;
            self.text += "=\"";
            self.text(value);
            self.text.push('"');
        }
    }
}

/// Writer that escapes text and attributes in double quotes.
struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '&' => self.0.push_str("&amp;"),
                '"' => self.0.push_str("&quot;"),
                _ if is_invisible(c) => write!(self.0, "{}", c.escape_unicode())?,
                _ => self.0.push(c),
            }
        }
        Ok(())
    }
}

/// Returns whether a character is invisible, changes the text direction, or is forbidden in XML.
///
/// Such characters are written as in Rust: `\u{7f}`.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2060}'..='\u{206F}')
        || matches!(c, '\u{61C}' | '\u{FEFF}' | '\u{FFF9}'..='\u{FFFB}')
        || u32::from(c) & 0xFFFE == 0xFFFE
}

/// A coordinate, rounded to a tenth.
pub(crate) struct Px(pub(crate) f64);

impl Display for Px {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Adding 0 turns −0 into 0.
        write!(f, "{}", (self.0 * 10.0).round() / 10.0 + 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_become_markup() {
        let name = "<script>\"a\" & 'b'</script>\u{0}\n\u{1b}[1m\u{7f}\u{85}\u{202e}\u{ffff}é☃";
        let mut m = Markup::default();
        m.element("p", &[("title", &name), ("n", &1)], |m| m.text(name));
        let escaped = r"&lt;script&gt;&quot;a&quot; &amp; 'b'&lt;/script&gt;\u{0}\u{a}\u{1b}[1m\u{7f}\u{85}\u{202e}\u{ffff}é☃";
        assert_eq!(m.into_text(), format!(r#"<p title="{escaped}" n="1">{escaped}</p>"#));
    }

    #[test]
    fn elements_are_closed() {
        let mut m = Markup::default();
        m.element("g", &[], |m| {
            m.empty("rect", &[("x", &Px(-0.04)), ("y", &Px(12.25))]);
            m.leaf("text", &[], 5);
        });
        assert_eq!(m.into_text(), r#"<g><rect x="0" y="12.3"/><text>5</text></g>"#);
    }
}
