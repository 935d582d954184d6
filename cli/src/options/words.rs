//! Command-line values that are one word of a list: the list is the library's.

use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use microscale::{UnknownWord, Words};
use microscale_checkpoint::Selection;

/// Accepts the words of a type. They appear in `--help` and in the message about a wrong one.
pub(crate) fn words<T>() -> impl TypedValueParser<Value = T>
where
    T: Words + FromStr<Err = UnknownWord> + Send + Sync,
{
    let words = PossibleValuesParser::new(T::WORDS.iter().map(|(word, _)| *word));
    words.try_map(|word| word.parse())
}

/// Accepts a pattern of tensor names.
pub(crate) fn pattern(pattern: &str) -> Result<String, String> {
    let checked = Selection::new(&[pattern], &[""; 0]);
    checked.map(|_| pattern.to_string()).map_err(|error| error.to_string())
}
