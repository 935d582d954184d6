//! Command-line values that are one word of a list: the list is the library's.

use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use microscale::{Format, UnknownWord, Words};
use microscale_checkpoint::{CheckpointFormat, Selection, Written};

/// Accepts the words of a type. They appear in `--help` and in the message about a wrong one.
pub(crate) fn words<T>() -> impl TypedValueParser<Value = T>
where
    T: Words + FromStr<Err = UnknownWord> + Send + Sync,
{
    let words = PossibleValuesParser::new(T::WORDS.iter().map(|(word, _)| *word));
    words.try_map(|word| word.parse())
}

/// Accepts every format, and lists the formats that a checkpoint format can store. Later checks refuse
/// the other formats with advice.
pub(crate) fn stored_formats() -> impl TypedValueParser<Value = Format> {
    let formats = CheckpointFormat::WORDS.iter().map(|(_, format)| format);
    let stored: Vec<Format> = formats.flat_map(|format| format.formats()).collect();
    let words =
        Format::WORDS.iter().map(|(word, format)| PossibleValue::new(*word).hide(!stored.contains(format)));
    PossibleValuesParser::new(words.collect::<Vec<_>>()).try_map(|word| word.parse())
}

/// Accepts the words of checkpoint formats, and offers the writable ones.
pub(crate) fn written_formats() -> impl TypedValueParser<Value = CheckpointFormat> {
    let words = CheckpointFormat::WORDS.iter();
    let words = words.map(|(word, known)| PossibleValue::new(*word).hide(known.formats().next().is_none()));
    PossibleValuesParser::new(words.collect::<Vec<_>>()).try_map(|word| word.parse())
}

/// [`written_formats`], and those that converting alone writes.
pub(crate) fn converted_formats() -> impl TypedValueParser<Value = CheckpointFormat> {
    let words = CheckpointFormat::WORDS.iter();
    let words = words.map(|(word, known)| PossibleValue::new(*word).hide(known.written() == Written::No));
    PossibleValuesParser::new(words.collect::<Vec<_>>()).try_map(|word| word.parse())
}

/// Accepts a pattern of tensor names.
pub(crate) fn pattern(pattern: &str) -> Result<String, String> {
    let checked = Selection::new(&[pattern], &[""; 0]);
    checked.map(|_| pattern.to_string()).map_err(|error| error.to_string())
}
