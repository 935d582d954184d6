//! Model architectures: the layer names in their files, and facts that no name shows.
//!
//! Each `model_type` of the [table] was compared with transformers 5.24: scripts/readers/architectures.py
//! builds a model of each class and checks that every weight gets the role and the name of its
//! module. For other architectures the names decide.
//!
//! | file | contents |
//! |---|---|
//! | `table` | all architectures |
//! | `renames` | how names in files differ from module names |

mod renames;
mod table;

/// Facts about one architecture, or several with the same facts.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// One or more `model_type`s of config.json, separated by blanks.
    pub(crate) types: &'static str,
    /// Prefixes of names in files, with the prefixes of transformers' module names.
    ///
    /// `*` stands for a number. The longest prefix of a name counts, with all its replacements.
    pub(crate) renamed: &'static [(&'static str, &'static str)],
    /// The modules of output heads. A head that is tied to an embedding has no weight in the file.
    pub(crate) heads: &'static [&'static str],
    /// Name endings of linear layers that are unquantized because their names show that role.
    pub(crate) linear: &'static [&'static str],
    /// Name endings of linear layers that are quantized although their names show another role.
    pub(crate) plain: &'static [&'static str],
    /// Name endings of embeddings whose names do not show it.
    pub(crate) embeddings: &'static [&'static str],
    /// Name endings of layers with transposed weights (Conv1D).
    pub(crate) transposed: &'static [&'static str],
    /// Parts of the names of linear layers that transformers does not load quantized: it splits or
    /// joins them while loading, or the class of a tower initializes them.
    pub(crate) converted: &'static [&'static str],
    /// How transformers loads quantized files.
    pub(crate) loading: Loading,
    /// How transformers reads the experts of a layer.
    pub(crate) experts: Experts,
}

/// How transformers 5.24 reads the experts of a layer that its modules have in one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Experts {
    /// One tensor per expert, quantized or not.
    Apart,
    /// One tensor per expert in quantized files, and one tensor for all in others.
    ApartIfQuantized,
    /// Only one tensor for all.
    Joined,
}

/// How transformers 5.24 loads files that compressed-tensors describes: dequantized while loading
/// (`dequantize=True`), or packed and dequantized when a layer first runs (the default).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loading {
    /// Both ways give the right values.
    Both,
    /// Only with `dequantize=True`: the class reads the weights of layers, to initialize or tie them.
    Dequantized,
    /// Neither way: weights that are joined or split while loading are lost.
    Never,
}

impl Loading {
    /// The problem for users; `None` if there is none.
    pub(crate) fn problem(self) -> Option<&'static str> {
        match self {
            Self::Both => None,
            Self::Dequantized => Some(
                "transformers 5.24 fails to load or run this architecture with packed weights, because its class reads the \
                 weights of layers: load it with CompressedTensorsConfig(dequantize=True), or with vLLM",
            ),
            Self::Never => Some(
                "transformers 5.24 does not load this architecture from quantized files, because it joins or splits weights while \
                 loading: dequantize it first (microscale dequantize), or load it with vLLM",
            ),
        }
    }
}

/// An architecture whose files use its module names.
const PLAIN: Architecture = Architecture {
    types: "",
    renamed: &[],
    heads: &["lm_head"],
    linear: &[],
    embeddings: &[],
    transposed: &[],
    plain: &[],
    converted: &[],
    loading: Loading::Both,
    experts: Experts::Apart,
};
