//! Splits PTX text into words and signs.
//!
//! ISA sections 4.1 to 4.5: comments as in C, identifiers, directives, constants. A word keeps its
//! dots (`ld.global.b32`, `%tid.x`, `.reg`) and its double colons (`L1::no_allocate`), so an opcode
//! is one word.

use crate::error::{Error, Result};

/// A word or a sign, with its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    /// The word, or the single sign.
    pub(crate) text: &'a str,
    /// The offset of its first byte in the text.
    pub(crate) start: usize,
    /// Its line, from 1.
    pub(crate) line: u32,
}

impl Token<'_> {
    /// Returns whether the token is a word.
    pub(crate) fn is_word(&self) -> bool {
        is_word_byte(self.text.as_bytes()[0])
    }

    /// Returns the offset after its last byte in the text.
    pub(crate) fn end(&self) -> usize {
        self.start + self.text.len()
    }
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Reads tokens one after the other.
#[derive(Clone)]
pub(crate) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    peeked: Option<Token<'a>>,
}

impl<'a> Lexer<'a> {
    /// Makes a lexer that starts at an offset of the text, in the given line.
    pub(crate) fn new(text: &'a str, at: usize, line: u32) -> Self {
        Self { text, at, line, peeked: None }
    }

    /// Returns an error at the current line.
    pub(crate) fn error(&self, message: impl Into<String>) -> Error {
        let line = self.peeked.map_or(self.line, |token| token.line);
        Error::Syntax { line, message: message.into() }
    }

    /// Returns the next token without consuming it.
    pub(crate) fn peek(&mut self) -> Result<Option<Token<'a>>> {
        if self.peeked.is_none() {
            self.peeked = self.read()?;
        }
        Ok(self.peeked)
    }

    /// Returns the next token, or `None` at the end of the text.
    pub(crate) fn next(&mut self) -> Result<Option<Token<'a>>> {
        match self.peeked.take() {
            Some(token) => Ok(Some(token)),
            None => self.read(),
        }
    }

    /// Returns the next token. The end of the text is an error.
    pub(crate) fn some(&mut self, expected: &str) -> Result<Token<'a>> {
        match self.next()? {
            Some(token) => Ok(token),
            None => Err(self.error(format!("expected {expected}, found the end of the text"))),
        }
    }

    /// Returns the next token, which must be a word.
    pub(crate) fn word(&mut self, expected: &str) -> Result<Token<'a>> {
        let token = self.some(expected)?;
        if token.is_word() {
            return Ok(token);
        }
        let message = format!("expected {expected}, found `{}`", token.text);
        Err(Error::Syntax { line: token.line, message })
    }

    /// Returns the next token, which must be this sign.
    pub(crate) fn sign(&mut self, sign: &str) -> Result<Token<'a>> {
        let token = self.some(sign)?;
        if token.text == sign {
            return Ok(token);
        }
        let message = format!("expected `{sign}`, found `{}`", token.text);
        Err(Error::Syntax { line: token.line, message })
    }

    /// Consumes the next token if it equals `text`.
    pub(crate) fn take(&mut self, text: &str) -> Result<bool> {
        let found = self.peek()?.is_some_and(|token| token.text == text);
        if found {
            self.peeked = None;
        }
        Ok(found)
    }

    fn read(&mut self) -> Result<Option<Token<'a>>> {
        self.skip_blank()?;
        let bytes = self.text.as_bytes();
        let (start, line) = (self.at, self.line);
        let Some(&first) = bytes.get(start) else { return Ok(None) };
        if is_word_byte(first) {
            loop {
                match bytes.get(self.at) {
                    Some(&byte) if is_word_byte(byte) => self.at += 1,
                    Some(b':') if bytes.get(self.at + 1) == Some(&b':') => self.at += 2,
                    _ => break,
                }
            }
        } else if first.is_ascii_punctuation() {
            self.at += 1;
        } else {
            return Err(self.error(format!("unexpected byte {first:#04x}")));
        }
        Ok(Some(Token { text: &self.text[start..self.at], start, line }))
    }

    fn skip_blank(&mut self) -> Result<()> {
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at) {
                Some(b'\n') => {
                    self.line += 1;
                    self.at += 1;
                }
                Some(byte) if byte.is_ascii_whitespace() => self.at += 1,
                Some(b'/') if bytes.get(self.at + 1) == Some(&b'/') => {
                    let rest = &bytes[self.at..];
                    self.at += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
                }
                Some(b'/') if bytes.get(self.at + 1) == Some(&b'*') => {
                    let rest = &self.text[self.at + 2..];
                    let Some(length) = rest.find("*/") else {
                        return Err(self.error("a comment without end"));
                    };
                    self.line += rest[..length].bytes().filter(|&b| b == b'\n').count() as u32;
                    self.at += length + 4;
                }
                _ => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_dots_and_double_colons() {
        let text = "$L_1:\n@!%p1 ld.global.L1::no_allocate.v2.b32 {a, _}, [%rd1+-4]; // end\n/* \n */ x";
        let mut lexer = Lexer::new(text, 0, 1);
        let mut words = Vec::new();
        while let Some(token) = lexer.next().unwrap() {
            words.push((token.text, token.line));
        }
        let second = ["@", "!", "%p1", "ld.global.L1::no_allocate.v2.b32", "{", "a", ",", "_", "}", ","];
        let third = ["[", "%rd1", "+", "-", "4", "]", ";"];
        let mut expected = vec![("$L_1", 1), (":", 1)];
        expected.extend(second.iter().chain(&third).map(|&word| (word, 2)));
        expected.push(("x", 4));
        assert_eq!(words, expected);
    }

    #[test]
    fn other_bytes_are_refused() {
        assert!(matches!(Lexer::new("\u{1}", 0, 7).next(), Err(Error::Syntax { line: 7, .. })));
        assert!(Lexer::new("/* no end", 0, 1).next().is_err());
    }
}
