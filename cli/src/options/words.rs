//! Command-line values that are one word of a list: the list is the library's. Case does not matter.

use std::ffi::OsStr;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, Error};
use microscale::{Format, Numerics, UnknownWord, Words, choice};
use microscale_checkpoint::{CheckpointFormat, Choice, Selection, Written};

/// Accepts the words of a list in any case.
#[derive(Clone)]
struct AnyCase(PossibleValuesParser);

impl TypedValueParser for AnyCase {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, Error> {
        let lower = value.to_str().map(str::to_lowercase);
        self.0.parse_ref(command, arg, lower.as_deref().map_or(value, OsStr::new))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}

/// Accepts the words of a type, and lists the `offered` words in `--help` and in errors. Later checks
/// refuse the other words with a better message.
fn among<T>(offered: impl Fn(&T) -> bool) -> impl TypedValueParser<Value = T>
where
    T: Words + FromStr<Err = UnknownWord> + Send + Sync,
{
    let words = T::WORDS.iter().map(|(word, known)| PossibleValue::new(*word).hide(!offered(known)));
    AnyCase(PossibleValuesParser::new(words.collect::<Vec<_>>())).try_map(|word| word.parse())
}

/// Accepts the words of a type.
pub(crate) fn words<T>() -> impl TypedValueParser<Value = T>
where
    T: Words + FromStr<Err = UnknownWord> + Send + Sync,
{
    among(|_| true)
}

/// The other name of MXFP8, which has one kind of elements in checkpoints.
const MXFP8: &str = "mxfp8";

/// Accepts every format, and lists the `offered` ones.
fn formats_among(offered: impl Fn(&Format) -> bool) -> impl TypedValueParser<Value = Format> {
    let word = |(word, format): &(&'static str, Format)| {
        let value = PossibleValue::new(*word).hide(!offered(format));
        if *format == Format::Mxfp8E4m3 { value.alias(MXFP8) } else { value }
    };
    let words = PossibleValuesParser::new(Format::WORDS.iter().map(word).collect::<Vec<_>>());
    AnyCase(words).try_map(|word| if word == MXFP8 { Ok(Format::Mxfp8E4m3) } else { word.parse() })
}

/// Accepts the words of formats.
pub(crate) fn formats() -> impl TypedValueParser<Value = Format> {
    formats_among(|_| true)
}

/// The formats that checkpoints can store.
fn stored() -> impl Iterator<Item = Format> {
    CheckpointFormat::WORDS.iter().flat_map(|(_, checkpoint_format)| checkpoint_format.formats())
}

/// Returns whether checkpoints can store a format.
pub(crate) fn is_stored_format(format: Format) -> bool {
    stored().any(|stored| stored == format)
}

/// Accepts the words of formats, and lists the formats that checkpoints can store.
pub(crate) fn stored_formats() -> impl TypedValueParser<Value = Format> {
    formats_among(|format| is_stored_format(*format))
}

/// Accepts the words of formats that checkpoints can store, and the word for unquantized tensors.
pub(crate) fn choices() -> impl TypedValueParser<Value = Choice> {
    let formats = Format::WORDS.iter().filter(|(_, format)| is_stored_format(*format));
    let formats = formats.map(|(word, format)| {
        let value = PossibleValue::new(*word);
        if *format == Format::Mxfp8E4m3 { value.alias(MXFP8) } else { value }
    });
    let words = formats.chain([PossibleValue::new(Choice::UNQUANTIZED)]);
    AnyCase(PossibleValuesParser::new(words.collect::<Vec<_>>())).try_map(|word| match &*word {
        Choice::UNQUANTIZED => Ok(Choice::Unquantized),
        MXFP8 => Ok(Choice::Format(Format::Mxfp8E4m3)),
        word => word.parse().map(Choice::Format),
    })
}

/// The words of formats that checkpoints can store, as a list.
pub(crate) fn stored_formats_list() -> String {
    choice(Format::values().filter(|format| is_stored_format(*format)).map(Format::word))
}

/// Accepts the words of numerics, and lists the numerics of formats that checkpoints can store.
pub(crate) fn stored_numerics() -> impl TypedValueParser<Value = Numerics> {
    among(|numerics: &Numerics| is_stored(*numerics))
}

/// Returns whether a format that checkpoints can store has these numerics.
pub(crate) fn is_stored(numerics: Numerics) -> bool {
    stored().any(|format| numerics.scheme(format).is_some())
}

/// Accepts the words of checkpoint formats, and lists the ones that quantizing writes.
pub(crate) fn written_formats() -> impl TypedValueParser<Value = CheckpointFormat> {
    among(is_written)
}

/// The words of checkpoint formats that quantizing writes, as a list.
pub(crate) fn written_formats_list() -> String {
    choice(CheckpointFormat::values().filter(is_written).map(CheckpointFormat::word))
}

/// Returns whether quantizing writes a checkpoint format.
fn is_written(known: &CheckpointFormat) -> bool {
    known.formats().next().is_some()
}

/// Accepts the words of checkpoint formats, and lists the ones that converting writes.
pub(crate) fn converted_formats() -> impl TypedValueParser<Value = CheckpointFormat> {
    among(|known: &CheckpointFormat| known.written() != Written::No)
}

/// Accepts a pattern of tensor names.
pub(crate) fn pattern(pattern: &str) -> Result<String, String> {
    let checked = Selection::new(&[pattern], &[""; 0]);
    checked.map(|_| pattern.to_string()).map_err(|error| error.to_string())
}
