//! Words that files have for the formats of their layers.

use std::collections::HashMap;

/// The word for a layer's format.
#[derive(Clone, Debug)]
pub(crate) struct LayerWord {
    pub(crate) word: String,
    /// The tensor or the key of the metadata that has the word.
    pub(crate) place: String,
}

/// Words by the names of layers, without `.weight`.
pub(crate) type LayerWords = HashMap<String, LayerWord>;
