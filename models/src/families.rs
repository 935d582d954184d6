//! The families of models: a row of facts each.

use microscale::formats::{Gate, Glu};

/// What distinguishes a family's decoder layers from a Llama's.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in config.json.
    pub(crate) model_types: &'static [&'static str],
    /// The gate of the MLP, of dense layers and of experts.
    pub(crate) gate: Glu,
    /// Whether norms multiply by 1 + weight.
    pub(crate) norm_adds_one: bool,
    /// Whether attention and MLP have a norm after them too, before the residual is added.
    pub(crate) norms_after: bool,
    /// Whether embeddings are multiplied by √hidden.
    pub(crate) scales_embeddings: bool,
    /// Without `layer_types` in config.json: every n-th layer has full attention, others slide.
    /// 1 means that all slide.
    pub(crate) window_pattern: Option<usize>,
    // Defaults of numbers that config.json may lack.
    /// Whether embeddings are the head's weights.
    pub(crate) tied: bool,
    /// Elements of a head; `None` for hidden / heads.
    pub(crate) head_dim: Option<usize>,
    /// The base of rotary embeddings with full attention.
    pub(crate) theta: f64,
    /// The mixture of experts.
    pub(crate) experts: Option<ExpertsFamily>,
}

/// A family's mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertsFamily {
    /// The router's name after `mlp.`.
    pub(crate) router: &'static str,
    pub(crate) order: RouterOrder,
    pub(crate) storage: ExpertsStorage,
}

/// How a router weights the experts of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RouterOrder {
    /// Softmax over all experts, then the largest.
    SoftmaxThenChoose,
    /// The largest, then softmax over them.
    ChooseThenSoftmax,
}

/// How experts' weights are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ExpertsStorage {
    /// `gate_proj`, `up_proj` and `down_proj` of each expert.
    Each,
    /// `gate_up_proj` and `down_proj` of all experts. Rows of gate and up alternate.
    Stacked,
}

const LLAMA: Family = Family {
    model_types: &["llama"],
    gate: Glu::SILU,
    norm_adds_one: false,
    norms_after: false,
    scales_embeddings: false,
    window_pattern: None,
    tied: false,
    head_dim: None,
    theta: 10_000.0,
    experts: None,
};

/// All families.
static FAMILIES: [Family; 7] = [
    LLAMA,
    Family { model_types: &["mistral"], window_pattern: Some(1), ..LLAMA },
    // Biases and norms of heads are found by their names.
    Family { model_types: &["qwen2"], ..LLAMA },
    Family { model_types: &["qwen3"], head_dim: Some(128), ..LLAMA },
    Family {
        model_types: &["qwen3_moe"],
        head_dim: Some(128),
        experts: Some(ExpertsFamily {
            router: "gate",
            order: RouterOrder::SoftmaxThenChoose,
            storage: ExpertsStorage::Each,
        }),
        ..LLAMA
    },
    Family {
        model_types: &["gemma3", "gemma3_text"],
        gate: Glu::GeluTanh,
        norm_adds_one: true,
        norms_after: true,
        scales_embeddings: true,
        window_pattern: Some(6),
        tied: true,
        head_dim: Some(256),
        theta: 1_000_000.0,
        ..LLAMA
    },
    Family {
        model_types: &["gpt_oss"],
        gate: Glu::Sigmoid(Gate::GPT_OSS),
        window_pattern: Some(2),
        head_dim: Some(64),
        theta: 150_000.0,
        experts: Some(ExpertsFamily {
            router: "router",
            order: RouterOrder::ChooseThenSoftmax,
            storage: ExpertsStorage::Stacked,
        }),
        ..LLAMA
    },
];

/// Returns the family of a `model_type`. The error is the problem in words.
pub(crate) fn family(model_type: &str) -> Result<&'static Family, String> {
    FAMILIES.iter().find(|family| family.model_types.contains(&model_type)).ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
        format!("model_type {model_type:?} is not supported; supported are {}", known.join(", "))
    })
}
