//! Grouped-query attention with rotary embeddings, sliding windows and sinks.

use candle_core::{D, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::softmax_last_dim;
use candle_nn::rotary_emb::rope;

use crate::config::Config;
use crate::error::Result as ModelResult;
use crate::norm::Norm;
use crate::rows::Rows;
use crate::source::{Layer, LayerName, Source, compute_dtype, single};

/// Queries whose scores are in memory together.
const QUERIES: usize = 256;

/// The attention of a decoder layer.
pub(crate) struct Attention {
    /// Queries, keys and values.
    projections: [Layer; 3],
    out: Layer,
    /// Norms of each head's queries and keys.
    head_norms: [Option<Norm>; 2],
    /// One more score per head, of a token that has no value.
    sinks: Option<Tensor>,
    /// What keys and values pass through.
    caches: [Option<Layer>; 2],
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    score_scale: f64,
    /// Tokens that a token attends to, itself included.
    window: usize,
}

impl Attention {
    pub(crate) fn load(
        source: &dyn Source,
        prefix: &str,
        layer: usize,
        config: &Config,
    ) -> ModelResult<Self> {
        let Config { hidden, heads, kv_heads, head_dim, .. } = *config;
        let linear = |end: &str, input: &str, inputs, outputs| {
            single(source, &LayerName::new(prefix, end, input, inputs, outputs))
        };
        let head_norm = |end: &str| {
            let name = format!("{prefix}.{end}.weight");
            source.has(&name).then(|| Norm::load(source, &name, head_dim, config)).transpose()
        };
        let sinks = format!("{prefix}.sinks");
        let sinks = source.has(&sinks).then(|| source.tensor(&sinks, &[heads])).transpose()?;
        Ok(Self {
            projections: [
                linear("q_proj", "qkv", hidden, heads * head_dim)?,
                linear("k_proj", "qkv", hidden, kv_heads * head_dim)?,
                linear("v_proj", "qkv", hidden, kv_heads * head_dim)?,
            ],
            out: linear("o_proj", "o", heads * head_dim, hidden)?,
            head_norms: [head_norm("q_norm")?, head_norm("k_norm")?],
            sinks,
            caches: ["k_cache", "v_cache"].map(|end| source.cache(&format!("{prefix}.{end}"))),
            heads,
            kv_heads,
            head_dim,
            score_scale: config.score_scale,
            window: config.windows[layer].unwrap_or(usize::MAX),
        })
    }

    /// Returns the attention's output for `x`, `[tokens, hidden]`.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        rows: &Rows<'_>,
        mut cache: Option<&mut KvCache>,
    ) -> Result<Tensor> {
        let [q, k, v] = [0, 1, 2].map(|i| self.projections[i].forward(x));
        let (q, k, v) = (q?, k?, v?);
        let dtype = compute_dtype(x);
        let mut outputs = Vec::new();
        for (start, length) in rows.sequences() {
            let part = |y: &Tensor| y.narrow(0, start, length);
            let first = cache.as_ref().map_or(0, |cache| cache.current_seq_len());
            let [cos, sin] = rows.rotations(self.window != usize::MAX, first, length, dtype)?;
            let rotated = |y: &Tensor, heads: usize, norm: Option<&Norm>| -> Result<Tensor> {
                let y = part(y)?.to_dtype(dtype)?.reshape((1, length, heads, self.head_dim))?;
                let y = norm.map_or_else(|| Ok(y.clone()), |norm| norm.forward(&y))?;
                rope(&y.transpose(1, 2)?.contiguous()?, &cos, &sin)
            };
            let [q_norm, k_norm] = &self.head_norms;
            let q = rotated(&q, self.heads, q_norm.as_ref())?;
            let k = self.cached(0, rotated(&k, self.kv_heads, k_norm.as_ref())?)?;
            let v = part(&v)?.to_dtype(dtype)?.reshape((1, length, self.kv_heads, self.head_dim))?;
            let v = self.cached(1, v.transpose(1, 2)?.contiguous()?)?;
            let (k, v) = match cache.as_deref_mut() {
                Some(cache) => cache.append(&k, &v)?,
                None => (k, v),
            };
            outputs.push(self.attend(&q.squeeze(0)?, &k.squeeze(0)?, &v.squeeze(0)?, first)?);
        }
        self.out.forward(&Tensor::cat(&outputs, 0)?.to_dtype(x.dtype())?)
    }

    /// Passes keys or values, `[1, heads, tokens, head_dim]`, through the layer of their cache.
    fn cached(&self, which: usize, x: Tensor) -> Result<Tensor> {
        let Some(layer) = &self.caches[which] else { return Ok(x) };
        let tokens = x.dim(2)?;
        let rows = x.transpose(1, 2)?.reshape((tokens, self.kv_heads * self.head_dim))?;
        let rows = layer.forward(&rows)?.reshape((1, tokens, self.kv_heads, self.head_dim))?;
        rows.transpose(1, 2)?.contiguous()
    }

    /// Returns `[tokens, heads · head_dim]` for queries `[heads, tokens, head_dim]`, and keys and
    /// values `[kv_heads, seen + tokens, head_dim]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, seen: usize) -> Result<Tensor> {
        let tokens = q.dim(1)?;
        let group = self.heads / self.kv_heads;
        let mut outputs = Vec::new();
        for start in (0..tokens).step_by(QUERIES) {
            let count = QUERIES.min(tokens - start);
            // The keys that any of these queries reads.
            let end = seen + start + count;
            let begin = (seen + start + 1).saturating_sub(self.window);
            let keys = end - begin;
            let (k, v) = (k.narrow(1, begin, keys)?, v.narrow(1, begin, keys)?);
            // Heads that share keys are adjacent.
            let q = (q.narrow(1, start, count)? * self.score_scale)?;
            let q = q.reshape((self.kv_heads, group * count, self.head_dim))?;
            let scores = q.matmul(&k.transpose(1, 2)?)?.reshape((self.heads, count, keys))?;
            let mask = self.mask(seen + start, count, begin, keys, &scores)?;
            let scores = match mask {
                Some(mask) => scores.broadcast_add(&mask)?,
                None => scores,
            };
            let shares = match &self.sinks {
                Some(sinks) => {
                    let sinks = sinks
                        .to_dtype(scores.dtype())?
                        .reshape((self.heads, 1, 1))?
                        .broadcast_as((self.heads, count, 1))?;
                    softmax_last_dim(&Tensor::cat(&[&scores, &sinks.contiguous()?], D::Minus1)?)?
                        .narrow(D::Minus1, 0, keys)?
                        .contiguous()?
                }
                None => softmax_last_dim(&scores)?,
            };
            let shares = shares.reshape((self.kv_heads, group * count, keys))?;
            let out = shares.matmul(&v.contiguous()?)?.reshape((self.heads, count, self.head_dim))?;
            outputs.push(out.transpose(0, 1)?.reshape((count, self.heads * self.head_dim))?);
        }
        Tensor::cat(&outputs, 0)
    }

    /// Returns 0 or −∞ for queries at positions from `query` on, and keys from `key` on; `None` if
    /// every query reads every key. It has the dtype and the device of `scores`.
    fn mask(
        &self,
        query: usize,
        queries: usize,
        key: usize,
        keys: usize,
        scores: &Tensor,
    ) -> Result<Option<Tensor>> {
        let is_read = |i: usize, j: usize| {
            let (query, key) = (query + i, key + j);
            key <= query && query - key < self.window
        };
        if queries == 1 && is_read(0, 0) {
            return Ok(None);
        }
        let value = |i, j| if is_read(i, j) { 0f32 } else { f32::NEG_INFINITY };
        let mask: Vec<_> = (0..queries).flat_map(|i| (0..keys).map(move |j| value(i, j))).collect();
        Tensor::from_vec(mask, (queries, keys), scores.device())?.to_dtype(scores.dtype()).map(Some)
    }
}
