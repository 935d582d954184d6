//! Layers of language models to measure, of `host/src/gpu/plan/layers.txt`.

use microscale::formats::words;
use microscale::gpu::internals::{Layer, Layers};

use super::contest;
use super::op::Op;
use super::size::Size;

/// The layers that configurations are tuned for, the others, or all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Half {
    /// Layers that `--tune` measures.
    #[default]
    Tuned,
    /// Layers that no configuration is tuned for.
    HeldOut,
    /// Both.
    All,
    /// None of them: the [shapes](contest) of GPU MODE's contest on NVFP4, with its tokens.
    Contest,
}

words!(Half, "half of the layers" {
    Self::Tuned = "tuned",
    Self::HeldOut = "held-out",
    Self::All = "all",
    Self::Contest = "contest",
});

impl Half {
    /// Returns whether it has a layer.
    pub(crate) fn has(self, layer: &Layer<'_>) -> bool {
        match self {
            Self::Tuned => layer.tuned,
            Self::HeldOut => !layer.tuned,
            Self::All => true,
            Self::Contest => false,
        }
    }

    /// Returns the sizes of its layers that an operation multiplies: layers of experts for experts'
    /// weights, and dense layers for the others. Sizes of layers have no tokens.
    pub(crate) fn sizes(self, op: Op) -> Vec<Size> {
        if self == Self::Contest {
            return contest::sizes(op);
        }
        let of_op = |layer: &&Layer<'_>| self.has(layer) && layer.experts.is_some() == op.is_of_experts();
        let size = |layer: &Layer<'_>| {
            let (batches, top_k) = layer.experts.map_or((1, 0), |experts| (experts.count, experts.top_k));
            Size { rows: layer.rows, cols: layer.cols, batches, tokens: None, top_k }
        };
        Layers::built_in().all.iter().filter(of_op).map(size).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_together_are_all_layers() {
        for op in [Op::GemmWeights, Op::GemmExperts] {
            let [tuned, held_out, all] = [Half::Tuned, Half::HeldOut, Half::All].map(|half| half.sizes(op));
            assert!(!tuned.is_empty() && !held_out.is_empty());
            assert_eq!(tuned.len() + held_out.len(), all.len());
            assert!(tuned.iter().chain(&held_out).all(|size| all.contains(size)));
            assert!(all.iter().all(|size| (size.top_k > 0) == (op == Op::GemmExperts)));
        }
    }
}
