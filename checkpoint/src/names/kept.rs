//! Weights that are left alone by default: norms, embeddings, output heads and routers, known by their names.

/// Kinds of weights that are left alone by default, told by a part of the name: **the table of exceptions**.
///
/// Their errors cost more than their bytes save, and serving engines expect them unquantized.
const KEPT: &[(&str, Kept)] = &[
    ("norm", Kept::Norm),
    ("embed", Kept::Embedding),
    ("wte", Kept::Embedding),
    ("wpe", Kept::Embedding),
    ("lm_head", Kept::OutputHead),
    ("token_embd", Kept::Embedding),
    ("ffn_gate_inp", Kept::Router),
    ("router", Kept::Router),
    (".gate.weight", Kept::Router),
    ("_expert_gate.weight", Kept::Router),
];

/// A kind of weight that is left alone by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kept {
    /// Scales of a normalisation.
    Norm,
    /// A table of token or position embeddings.
    Embedding,
    /// The last layer, which gives the logits.
    OutputHead,
    /// A layer that assigns tokens to experts.
    Router,
}

/// The kind of a tensor that is left alone by default, by its name.
pub fn kept(name: &str) -> Option<Kept> {
    // GGUF's head; attention has outputs too.
    if name == "output.weight" {
        return Some(Kept::OutputHead);
    }
    KEPT.iter().find(|(part, _)| name.contains(part)).map(|(_, kept)| *kept)
}
