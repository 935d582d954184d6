//! Layers of language models that products are tuned for and reported on: `layers.txt`, which
//! documents their selection.

use std::sync::OnceLock;

const TEXT: &str = include_str!("layers.txt");

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerExperts {
    /// Number of experts.
    pub count: usize,
    /// Experts per token.
    pub top_k: usize,
}

/// Weights of a language model's layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer<'t> {
    /// The model, or several, joined by `+`.
    pub model: &'t str,
    /// The layer's role, such as `down_proj`.
    pub role: &'t str,
    /// Rows of the weights, of one expert if there are several.
    pub rows: usize,
    /// Columns of the weights.
    pub cols: usize,
    /// The experts of a mixture; `None` for dense layers.
    pub experts: Option<LayerExperts>,
    /// Whether configurations may be tuned for the layer. The others are held out.
    pub tuned: bool,
}

/// Layers, and the numbers of tokens to measure them with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers<'t> {
    /// The layers.
    pub all: Vec<Layer<'t>>,
    /// Numbers of tokens to tune for, ascending.
    pub tuned_tokens: Vec<usize>,
    /// Numbers of tokens to report, ascending.
    pub reported_tokens: Vec<usize>,
}

impl Layers<'static> {
    /// The built-in layers.
    pub fn built_in() -> &'static Self {
        static READ: OnceLock<Layers<'static>> = OnceLock::new();
        // A test reads them.
        READ.get_or_init(|| Self::read(TEXT).unwrap_or_default())
    }
}

impl<'t> Layers<'t> {
    /// Reads layers as `layers.txt` has them; `None` if a line is no layer and no list of tokens.
    pub fn read(text: &'t str) -> Option<Self> {
        let mut layers = Self::default();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["tuned-tokens", ref tokens @ ..] => layers.tuned_tokens = counts(tokens)?,
                ["reported-tokens", ref tokens @ ..] => layers.reported_tokens = counts(tokens)?,
                [model, role, ref sizes @ .., half] => {
                    let (rows, cols, experts) = match counts(sizes)?[..] {
                        [rows, cols] => (rows, cols, None),
                        [rows, cols, count, top_k] => (rows, cols, Some(LayerExperts { count, top_k })),
                        _ => return None,
                    };
                    let tuned = match half {
                        "tuned" => true,
                        "held-out" => false,
                        _ => return None,
                    };
                    layers.all.push(Layer { model, role, rows, cols, experts, tuned });
                }
                _ => return None,
            }
        }
        Some(layers)
    }

    /// The dense layers.
    pub fn dense(&self) -> impl Iterator<Item = &Layer<'t>> {
        self.all.iter().filter(|layer| layer.experts.is_none())
    }

    /// Returns whether a dense layer of this shape is held out.
    pub fn holds_out(&self, rows: usize, cols: usize) -> bool {
        self.dense().any(|layer| !layer.tuned && (layer.rows, layer.cols) == (rows, cols))
    }
}

/// Reads positive numbers.
fn counts(words: &[&str]) -> Option<Vec<usize>> {
    words.iter().map(|word| word.parse().ok().filter(|count| *count > 0)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn built_in_layers_are_read() {
        let layers = Layers::read(TEXT).unwrap();
        assert_eq!(&layers, Layers::built_in());
        let first = Layer {
            model: "Llama-3.1-8B",
            role: "qkv_proj",
            rows: 6144,
            cols: 4096,
            experts: None,
            tuned: true,
        };
        assert_eq!(layers.all[0], first);
        let experts = layers.all.iter().filter_map(|layer| layer.experts);
        assert!(experts.clone().count() > 0);
        assert!(experts.into_iter().all(|of| of.top_k <= of.count));
    }

    #[test]
    fn lines_that_are_no_layers_are_refused() {
        assert!(Layers::read("# a comment\n\nmodel role 1 2 held-out\nmodel role 1 2 3 4 tuned").is_some());
        for wrong in [
            "model",
            "model role 1 2",
            "model role 1 tuned",
            "model role 1 2 3 tuned",
            "model role 0 2 tuned",
            "model role 1 x tuned",
            "model role 1 2 half",
            "tuned-tokens 1 two",
            "reported-tokens 0",
        ] {
            assert_eq!(Layers::read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn no_shape_is_in_both_halves_and_no_layer_is_listed_twice() {
        let layers = &Layers::built_in().all;
        let of_half = |tuned: bool| {
            let of = layers.iter().filter(move |layer| layer.tuned == tuned);
            of.map(|layer| (layer.rows, layer.cols)).collect::<BTreeSet<_>>()
        };
        assert!(of_half(true).is_disjoint(&of_half(false)));
        let of = |layer: &Layer<'_>| (layer.rows, layer.cols, layer.experts.map(|of| (of.count, of.top_k)));
        assert_eq!(layers.iter().map(of).collect::<BTreeSet<_>>().len(), layers.len());
    }

    #[test]
    fn halves_have_the_same_number_of_shapes() {
        for dense in [true, false] {
            let shapes = |tuned: bool| {
                let layers = Layers::built_in().all.iter();
                let of = layers.filter(|layer| layer.experts.is_none() == dense && layer.tuned == tuned);
                of.map(|layer| (layer.rows, layer.cols)).collect::<BTreeSet<_>>().len()
            };
            assert!(shapes(true) > 0 && shapes(true) == shapes(false), "dense: {dense}");
        }
    }

    #[test]
    fn tokens_ascend_to_8192_and_some_reported_ones_are_not_tuned() {
        let Layers { tuned_tokens, reported_tokens, .. } = Layers::built_in();
        for tokens in [tuned_tokens, reported_tokens] {
            assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
            assert_eq!((tokens.first(), tokens.last()), (Some(&1), Some(&8192)));
        }
        assert!(reported_tokens.iter().any(|tokens| !tuned_tokens.contains(tokens)));
    }
}
