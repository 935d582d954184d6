//! A text as windows of tokens.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use crate::config::Config;
use crate::error::{Error, Result};

/// Consecutive tokens of a text: a model's inputs, and the tokens that it should predict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The tokens that the model reads.
    pub inputs: Vec<u32>,
    /// The token after each input.
    pub targets: Vec<u32>,
}

/// How a text is cut into windows.
#[derive(Clone, Copy, Debug)]
pub struct TextOptions {
    /// Tokens that a model reads at once, at least 2.
    pub window: usize,
    /// Windows to use, from the text's beginning; `None` for all.
    pub windows: Option<usize>,
    /// Whether empty lines separate documents. Each one begins with the model's first token.
    pub documents: bool,
}

/// The tokenizer of a checkpoint.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    file: PathBuf,
}

impl Text {
    /// Reads a checkpoint directory's tokenizer.json.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if it cannot be read.
    pub fn open(directory: &Path) -> Result<Self> {
        let file = directory.join("tokenizer.json");
        match Tokenizer::from_file(&file) {
            Ok(tokenizer) => Ok(Self { tokenizer, file }),
            Err(error) => Err(Error::Tokenizer { file, problem: error.to_string() }),
        }
    }

    /// Cuts a text into windows.
    ///
    /// Windows do not overlap. In a model with a first token (`bos_token_id`), each window begins
    /// with it and predicts `window` − 1 tokens of the text. Otherwise a window reads `window`
    /// tokens and predicts all but its first.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer refuses the text, and [`Error::ShortText`] if no
    /// token can be predicted.
    pub fn windows(&self, text: &str, config: &Config, options: &TextOptions) -> Result<Vec<Window>> {
        let encode = |text: &str| match self.tokenizer.encode(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(Error::Tokenizer { file: self.file.clone(), problem: error.to_string() }),
        };
        let mut tokens = Vec::new();
        if options.documents {
            for document in text.trim_end().split("\n\n").filter(|document| !document.is_empty()) {
                tokens.extend(config.bos);
                tokens.extend(encode(&format!("{document}\n"))?);
            }
        } else {
            tokens = encode(text)?;
        }
        let windows = windows_of(&tokens, config.bos, options);
        if windows.iter().all(|window| window.targets.is_empty()) {
            return Err(Error::ShortText { tokens: tokens.len() });
        }
        Ok(windows)
    }
}

/// Cuts tokens into windows.
fn windows_of(tokens: &[u32], bos: Option<u32>, options: &TextOptions) -> Vec<Window> {
    let most = options.windows.unwrap_or(usize::MAX);
    let window = options.window.max(2);
    match bos {
        Some(bos) => {
            let parts = tokens.chunks(window - 1).take(most);
            parts
                .map(|part| Window {
                    inputs: [&[bos], &part[..part.len() - 1]].concat(),
                    targets: part.to_vec(),
                })
                .collect()
        }
        None => {
            let parts = tokens.chunks(window).filter(|part| part.len() > 1).take(most);
            parts
                .map(|part| Window { inputs: part[..part.len() - 1].to_vec(), targets: part[1..].to_vec() })
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(window: usize, windows: Option<usize>) -> TextOptions {
        TextOptions { window, windows, documents: false }
    }

    #[test]
    fn windows_with_a_first_token_predict_every_token_of_the_text() {
        let tokens: Vec<u32> = (10..21).collect();
        let windows = windows_of(&tokens, Some(1), &options(5, None));
        let predicted: Vec<_> = windows.iter().flat_map(|window| window.targets.clone()).collect();
        assert_eq!(predicted, tokens);
        assert_eq!(windows[1].inputs, [1, 14, 15, 16]);
        assert_eq!(windows[2].inputs, [1, 18, 19]);
        assert_eq!(windows_of(&tokens, Some(1), &options(5, Some(2))), windows[..2]);
    }

    #[test]
    fn windows_without_a_first_token_predict_all_but_their_first() {
        let tokens: Vec<u32> = (10..19).collect();
        let windows = windows_of(&tokens, None, &options(4, None));
        assert_eq!(windows.len(), 2, "a window of one token predicts nothing");
        assert_eq!((&*windows[1].inputs, &*windows[1].targets), (&[14, 15, 16][..], &[15, 16, 17][..]));
    }
}
