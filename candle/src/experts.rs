//! The experts of a layer.

use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Result, Shape, Tensor, bail};
use microscale::Activation;

use crate::linear::part;
use crate::matrix::QMatrix;

/// Linear layers of one shape, one for each expert of a mixture: each token is multiplied with the weights of the experts that it
/// was sent to. Each expert has a global scale of its own.
///
/// Tokens are gathered by expert, so that an expert's weights are decoded once for all of them, and an expert without tokens
/// costs nothing. Results are those of a [`QLinear`](crate::QLinear) of the expert that is given its tokens together.
#[derive(Clone, Debug)]
pub struct QExperts {
    weights: Vec<QMatrix>,
    bias: Option<Tensor>,
}

impl QExperts {
    /// Experts of weights `[M, K]` each, and their biases `[E, M]`.
    ///
    /// # Errors
    /// If there are none, or shapes differ. [`QMatrix::split`] makes matrices of weights `[E·M, K]`.
    pub fn new(weights: Vec<QMatrix>, bias: Option<Tensor>) -> Result<Self> {
        let Some(first) = weights.first() else { bail!("no experts") };
        let (rows, cols) = (first.view().rows(), first.view().cols());
        let other = weights.iter().map(|weight| [weight.view().rows(), weight.view().cols()]);
        if let Some((expert, shape)) = other.enumerate().find(|(_, shape)| *shape != [rows, cols]) {
            bail!("expert {expert} has weights of shape {shape:?}, and expert 0 of shape [{rows}, {cols}]");
        }
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [weights.len(), rows]) {
            bail!("biases of shape {:?} do not fit {} experts of {rows} rows", bias.dims(), weights.len());
        }
        Ok(Self { weights, bias })
    }

    /// The weights, by expert.
    pub fn weights(&self) -> &[QMatrix] {
        &self.weights
    }

    /// The results of each token with each of its experts: `[tokens, k, M]`.
    ///
    /// `x` is `[tokens, K]`, or `[tokens, k, K]` where each pair of a token and an expert has an input of its own; it is f32, f16
    /// or bf16. `experts` is `[tokens, k]`, whole numbers, as `candle_core::quantized::QMatMul::indexed_moe_forward` has them.
    ///
    /// # Errors
    /// If shapes do not fit, or a number is no expert's.
    pub fn forward(&self, x: &Tensor, experts: &Tensor) -> Result<Tensor> {
        let y = x
            .contiguous()?
            .apply_op2_no_bwd(&experts.to_dtype(DType::U32)?.contiguous()?, &Products(&self.weights))?;
        let Some(bias) = &self.bias else { return Ok(y) };
        let indices = experts.to_dtype(DType::U32)?.flatten_all()?;
        let bias = bias.to_dtype(y.dtype())?.index_select(&indices, 0)?.reshape(y.shape())?;
        y + bias
    }

    /// The sum of each token's results, weighted: `[tokens, M]`. `weights` is `[tokens, k]`, a router's probabilities for instance.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_weighted(&self, x: &Tensor, experts: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let y = self.forward(x, experts)?;
        y.broadcast_mul(&weights.to_dtype(y.dtype())?.unsqueeze(D::Minus1)?)?.sum(1)
    }
}

/// The products of inputs without gaps and the weights of experts.
struct Products<'a>(&'a [QMatrix]);

impl CustomOp2 for Products<'_> {
    fn name(&self) -> &'static str {
        "microscale-experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        experts: &CpuStorage,
        experts_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, cols) = (self.0[0].view().rows(), self.0[0].view().cols());
        let (x_dims, dims) = (x_layout.dims(), experts_layout.dims());
        let &[tokens, k] = dims else { bail!("experts of shape {dims:?}: expected [tokens, k]") };
        // Pairs that share a row of the input.
        let shared = match *x_dims {
            [n, found] if n == tokens && found == cols => k,
            [n, m, found] if n == tokens && m == k && found == cols => 1,
            _ => bail!(
                "an input of shape {x_dims:?} does not fit experts of shape {dims:?} with weights of shape [{rows}, {cols}]: \
                 expected [{tokens}, {cols}] or [{tokens}, {k}, {cols}]"
            ),
        };
        let CpuStorage::U32(experts) = experts else { bail!("the numbers of experts are not u32") };
        let pairs = self.by_expert(part(experts, experts_layout)?)?;
        let out = match x {
            CpuStorage::F32(x) => {
                CpuStorage::F32(self.multiply(part(x, x_layout)?, &pairs, tokens * k, shared)?)
            }
            CpuStorage::F16(x) => {
                CpuStorage::F16(self.multiply(part(x, x_layout)?, &pairs, tokens * k, shared)?)
            }
            CpuStorage::BF16(x) => {
                CpuStorage::BF16(self.multiply(part(x, x_layout)?, &pairs, tokens * k, shared)?)
            }
            _ => bail!("an input is f32, f16 or bf16 here; convert it"),
        };
        Ok((out, (tokens, k, rows).into()))
    }
}

impl Products<'_> {
    /// The pairs of a token and an expert, by expert.
    fn by_expert(&self, experts: &[u32]) -> Result<Vec<Vec<usize>>> {
        let mut pairs = vec![Vec::new(); self.0.len()];
        for (pair, expert) in experts.iter().enumerate() {
            match pairs.get_mut(*expert as usize) {
                Some(pairs) => pairs.push(pair),
                None => bail!("expert {expert} of {}: numbers of experts begin at 0", self.0.len()),
            }
        }
        Ok(pairs)
    }

    /// The products of all pairs, of which so many share a row of `x`.
    fn multiply<T: Activation>(
        &self,
        x: &[T],
        pairs: &[Vec<usize>],
        count: usize,
        shared: usize,
    ) -> Result<Vec<T>> {
        let (rows, cols) = (self.0[0].view().rows(), self.0[0].view().cols());
        let mut out = vec![T::default(); count * rows];
        let (mut gathered, mut products) = (Vec::new(), Vec::new());
        for (weights, pairs) in self.0.iter().zip(pairs) {
            let input = |pair: usize| &x[pair / shared * cols..][..cols];
            match pairs[..] {
                [] => {}
                [pair] => weights.multiply(input(pair), 1, &mut out[pair * rows..][..rows])?,
                _ => {
                    gathered.clear();
                    pairs.iter().for_each(|pair| gathered.extend_from_slice(input(*pair)));
                    products.resize(pairs.len() * rows, T::default());
                    weights.multiply(&gathered, pairs.len(), &mut products)?;
                    for (i, pair) in pairs.iter().enumerate() {
                        out[pair * rows..][..rows].copy_from_slice(&products[i * rows..][..rows]);
                    }
                }
            }
        }
        Ok(out)
    }
}
