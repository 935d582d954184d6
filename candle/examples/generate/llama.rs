//! A Llama. Also Qwen2 and Qwen3, which add biases and per-head norms.

use candle_core::{D, DType, Device, Module, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use serde_json::Value;

/// The source of a model's tensors, and how its linear layers are held.
pub(crate) trait Source {
    /// A tensor by name.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor>;
    /// Returns whether there is a tensor.
    fn has(&self, name: &str) -> bool;
    /// The linear layer of `name.weight`, and `name.bias` if there is one.
    fn linear(&self, name: &str, inputs: usize, outputs: usize) -> Result<Box<dyn Module>>;
}

/// The sizes and constants of config.json.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocabulary: usize,
    pub(crate) context: usize,
    pub(crate) eps: f32,
    pub(crate) theta: f64,
    pub(crate) tied: bool,
    pub(crate) bos: Option<u32>,
}

impl Config {
    /// Reads a config.json's text.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let config: Value = serde_json::from_str(text).map_err(candle_core::Error::wrap)?;
        let architecture = config["model_type"].as_str().unwrap_or_default();
        if !["llama", "qwen2", "qwen3", "mistral"].contains(&architecture) {
            bail!("model_type {architecture:?}: this example runs llama, mistral, qwen2 and qwen3");
        }
        if !config["rope_scaling"].is_null() {
            bail!("rope_scaling is more than this example does");
        }
        let number = |name: &str| match config[name].as_u64() {
            Some(number) => Ok(number as usize),
            None => bail!("config.json has no number {name}"),
        };
        let (hidden, heads) = (number("hidden_size")?, number("num_attention_heads")?);
        let theta = config["rope_theta"].as_f64().or(config["rope_parameters"]["rope_theta"].as_f64());
        Ok(Self {
            hidden,
            intermediate: number("intermediate_size")?,
            layers: number("num_hidden_layers")?,
            heads,
            kv_heads: number("num_key_value_heads").unwrap_or(heads),
            head_dim: number("head_dim").unwrap_or(hidden / heads),
            vocabulary: number("vocab_size")?,
            context: number("max_position_embeddings")?,
            eps: config["rms_norm_eps"].as_f64().unwrap_or(1e-5) as f32,
            theta: theta.unwrap_or(10_000.0),
            tied: config["tie_word_embeddings"].as_bool().unwrap_or(false),
            bos: config["bos_token_id"].as_u64().map(|token| token as u32),
        })
    }
}

/// The weights, and the keys and values of previous tokens.
pub(crate) struct Llama {
    embeddings: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    head: Box<dyn Module>,
    cos: Tensor,
    sin: Tensor,
}

struct Norm(Tensor, f32);

impl Norm {
    fn of(source: &dyn Source, name: &str, size: usize, config: &Config) -> Result<Self> {
        Ok(Self(source.tensor(name, &[size])?, config.eps))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(&x.contiguous()?, &self.0, self.1)
    }
}

struct Layer {
    norms: [Norm; 2],
    qkv: [Box<dyn Module>; 3],
    head_norms: [Option<Norm>; 2],
    out: Box<dyn Module>,
    mlp: [Box<dyn Module>; 3],
    heads: [usize; 2],
    head_dim: usize,
    cache: KvCache,
}

impl Layer {
    fn of(source: &dyn Source, layer: usize, config: &Config) -> Result<Self> {
        let name = |end: &str| format!("model.layers.{layer}.{end}");
        let Config { hidden, intermediate, heads, kv_heads, head_dim, .. } = *config;
        let linear = |end: &str, inputs, outputs| source.linear(&name(end), inputs, outputs);
        let norm = |end: &str, size| Norm::of(source, &name(end), size, config);
        let head_norm = |end: &str| source.has(&name(end)).then(|| norm(end, head_dim)).transpose();
        Ok(Self {
            norms: [
                norm("input_layernorm.weight", hidden)?,
                norm("post_attention_layernorm.weight", hidden)?,
            ],
            qkv: [
                linear("self_attn.q_proj", hidden, heads * head_dim)?,
                linear("self_attn.k_proj", hidden, kv_heads * head_dim)?,
                linear("self_attn.v_proj", hidden, kv_heads * head_dim)?,
            ],
            head_norms: [head_norm("self_attn.q_norm.weight")?, head_norm("self_attn.k_norm.weight")?],
            out: linear("self_attn.o_proj", heads * head_dim, hidden)?,
            mlp: [
                linear("mlp.gate_proj", hidden, intermediate)?,
                linear("mlp.up_proj", hidden, intermediate)?,
                linear("mlp.down_proj", intermediate, hidden)?,
            ],
            heads: [heads, kv_heads],
            head_dim,
            cache: KvCache::new(2, config.context),
        })
    }

    /// `x` is `[tokens, hidden]`, with the cosines and sines of its positions.
    fn forward(&mut self, x: &Tensor, cos: &Tensor, sin: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let x = (x + self.attend(&self.norms[0].forward(x)?, cos, sin, mask)?)?;
        let normed = self.norms[1].forward(&x)?;
        let [gate, up, down] = &self.mlp;
        x + down.forward(&(silu(&gate.forward(&normed)?)? * up.forward(&normed)?)?)?
    }

    fn attend(&mut self, x: &Tensor, cos: &Tensor, sin: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        let [heads, kv_heads] = self.heads;
        // By head: [1, heads, tokens, head_dim].
        let by_head = |layer: &dyn Module, heads: usize, norm: Option<&Norm>| -> Result<Tensor> {
            let y = layer.forward(x)?.reshape((1, tokens, heads, self.head_dim))?;
            let y = norm.map_or(Ok(y.clone()), |norm| norm.forward(&y))?;
            y.transpose(1, 2)?.contiguous()
        };
        let [q, k, v] = &self.qkv;
        let [q_norm, k_norm] = &self.head_norms;
        let q = rope(&by_head(&**q, heads, q_norm.as_ref())?, cos, sin)?;
        let k = rope(&by_head(&**k, kv_heads, k_norm.as_ref())?, cos, sin)?;
        let v = by_head(&**v, kv_heads, None)?;
        let (k, v) = self.cache.append(&k, &v)?;
        // Heads that share keys and values are adjacent.
        let q = (q.reshape((kv_heads, heads / kv_heads * tokens, self.head_dim))?
            / (self.head_dim as f64).sqrt())?;
        let scores = q.matmul(&k.squeeze(0)?.transpose(1, 2)?)?;
        let scores = match mask {
            Some(mask) => {
                let by_token = scores.reshape((kv_heads, heads / kv_heads, tokens, ()))?;
                by_token.broadcast_add(mask)?.reshape(scores.shape())?
            }
            None => scores,
        };
        let out = softmax_last_dim(&scores)?.matmul(&v.squeeze(0)?.contiguous()?)?;
        let out = out.reshape((heads, tokens, self.head_dim))?.transpose(0, 1)?;
        self.out.forward(&out.reshape((tokens, heads * self.head_dim))?)
    }
}

impl Llama {
    /// The model of a source's tensors, in their dtype.
    pub(crate) fn of(source: &dyn Source, config: &Config) -> Result<Self> {
        let embeddings = source.tensor("model.embed_tokens.weight", &[config.vocabulary, config.hidden])?;
        let head: Box<dyn Module> = if config.tied {
            Box::new(candle_nn::Linear::new(embeddings.clone(), None))
        } else {
            source.linear("lm_head", config.hidden, config.vocabulary)?
        };
        let rate = |i: usize| config.theta.powf(-2.0 * i as f64 / config.head_dim as f64) as f32;
        let rates: Vec<_> = (0..config.head_dim / 2).map(rate).collect();
        let positions = Tensor::arange(0, config.context as u32, &Device::Cpu)?.to_dtype(DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&Tensor::new(rates, &Device::Cpu)?.unsqueeze(0)?)?;
        let (dtype, device) = (embeddings.dtype(), &embeddings.device().clone());
        Ok(Self {
            layers: (0..config.layers)
                .map(|layer| Layer::of(source, layer, config))
                .collect::<Result<_>>()?,
            norm: Norm::of(source, "model.norm.weight", config.hidden, config)?,
            cos: angles.cos()?.to_dtype(dtype)?.to_device(device)?,
            sin: angles.sin()?.to_dtype(dtype)?.to_device(device)?,
            embeddings,
            head,
        })
    }

    /// Forgets previous tokens.
    pub(crate) fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.cache.reset());
    }

    /// The logits after each token, `[tokens, vocabulary]` in f32, or only after the last one.
    pub(crate) fn forward(&mut self, tokens: &[u32], last_alone: bool) -> Result<Tensor> {
        let (count, seen) = (tokens.len(), self.layers[0].cache.current_seq_len());
        let mut x = self.embeddings.index_select(&Tensor::new(tokens, self.embeddings.device())?, 0)?;
        let (cos, sin) = (self.cos.narrow(0, seen, count)?, self.sin.narrow(0, seen, count)?);
        // A token attends to itself and to previous tokens.
        let hidden =
            |i: usize| (0..seen + count).map(move |j| if j > seen + i { f32::NEG_INFINITY } else { 0.0 });
        let mask = (count > 1).then(|| {
            let mask: Vec<_> = (0..count).flat_map(hidden).collect();
            Tensor::from_vec(mask, (count, seen + count), &Device::Cpu)?
                .to_dtype(x.dtype())?
                .to_device(x.device())
        });
        let mask = mask.transpose()?;
        for layer in &mut self.layers {
            x = layer.forward(&x, &cos, &sin, mask.as_ref())?;
        }
        if last_alone {
            x = x.narrow(0, count - 1, 1)?;
        }
        self.head.forward(&self.norm.forward(&x)?)?.to_dtype(DType::F32)
    }

    /// The token with the largest logit after `tokens`.
    pub(crate) fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        self.forward(tokens, true)?.argmax(D::Minus1)?.get(0)?.to_scalar()
    }

    /// The mean of −log p of `tokens`, in chunks of the context that all begin with `first`.
    pub(crate) fn loss(&mut self, first: u32, tokens: &[u32], context: usize) -> Result<f64> {
        let mut sum = 0.0;
        for stretch in tokens.chunks(context - 1) {
            self.reset();
            let inputs = [&[first], &stretch[..stretch.len() - 1]].concat();
            let log_p = candle_nn::ops::log_softmax(&self.forward(&inputs, false)?, D::Minus1)?;
            let targets = Tensor::new(stretch, log_p.device())?.unsqueeze(1)?;
            sum -= f64::from(log_p.gather(&targets, 1)?.sum_all()?.to_scalar::<f32>()?);
        }
        Ok(sum / tokens.len() as f64)
    }
}
