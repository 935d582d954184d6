//! Tests products without rows, columns or tokens.

use microscale::cpu::{
    Isa, gemm_experts_fp4_gated_with, gemm_experts_fp4_with, gemm_experts_fp8_with, gemm_experts_with,
    gemm_fp4_gated_with, gemm_fp4_with, gemm_weights_fp8_with, gemm_weights_int8_with, gemm_weights_with,
    gemv_weights_with, gemv_with,
};
use microscale::{
    ActivationRounding, Batch, ExpertRows, Format, Fp4Weights, Fp8Options, Fp8Rows, Gate, QuantizedTensor,
    Result,
};
use microscale_test_support::operands::{Scales, tensor};

use super::inputs::instruction_sets;

/// The bias of products that have one.
const BIAS: [f32; 3] = [1.0, 2.0, 3.0];
/// Marks results that were not written.
const UNTOUCHED: f32 = 7.0;

/// The operands of every product. The product with experts' weights has two experts, and each token
/// chooses the second one.
struct Operands {
    isa: Isa,
    tokens: usize,
    weights: QuantizedTensor,
    /// Activations as values and in the format of the weights.
    x: Vec<f32>,
    quantized: QuantizedTensor,
    chosen: Vec<u32>,
}

impl Operands {
    /// Checks that a product writes the bias of each row, or zeros, and nothing else.
    fn check(&self, what: &str, biased: bool, multiply: impl FnOnce(&mut [f32]) -> Result<()>) {
        let Self { isa, tokens, weights, .. } = self;
        let of_token = if biased { BIAS } else { [0.0; 3] };
        let mut right = of_token[..weights.rows()].repeat(*tokens);
        right.push(UNTOUCHED);
        let mut out = vec![UNTOUCHED; right.len()];
        multiply(&mut out).expect("operands that fit");
        assert_eq!(out, right, "{what}, {isa:?}, {:?}, {tokens} tokens", weights.shape());
    }

    /// Checks all products.
    fn check_all(&self) {
        let Self { isa, tokens, weights, x, quantized, chosen } = self;
        let (isa, tokens) = (*isa, *tokens);
        let (order, experts) = (ExpertRows::Indexed, || [weights, weights]);
        let biased = || Fp4Weights::from(weights).bias(&BIAS[..weights.rows()]);
        self.check("gemm_weights", false, |out| gemm_weights_with(isa, weights, x, tokens, out));
        self.check("gemv_weights", false, |out| gemv_weights_with(isa, weights, x, tokens, out));
        self.check("gemm_weights_int8", false, |out| gemm_weights_int8_with(isa, weights, x, tokens, out));
        for rounding in [ActivationRounding::Exact, ActivationRounding::Int8] {
            self.check("gemm_experts", false, |out| {
                gemm_experts_with((isa, rounding), experts(), x, chosen, 1, order, out)
            });
        }
        self.check("gemm_fp4", true, |out| gemm_fp4_with(isa, quantized, biased(), out));
        let both = || [weights.into(), weights.into()];
        self.check("gemm_fp4_gated", false, |out| {
            gemm_fp4_gated_with(isa, quantized, both(), Gate::SILU, out)
        });
        self.check("gemm_experts_fp4", true, |out| {
            gemm_experts_fp4_with(isa, [biased(), biased()], quantized, chosen, 1, order, out)
        });
        self.check("gemm_experts_fp4_gated", false, |out| {
            let how = (isa, Gate::SILU);
            gemm_experts_fp4_gated_with(how, [both(), both()], quantized, chosen, 1, order, out)
        });
        for per_group in [false, true] {
            let options = Fp8Options { per_group, round_weights: true, ..Fp8Options::default() };
            self.check("gemm_weights_fp8", false, |out| {
                gemm_weights_fp8_with(isa, weights, Fp8Rows::Values(x), tokens, options, out)
            });
            self.check("gemm_experts_fp8", false, |out| {
                let x = Fp8Rows::Values(x);
                gemm_experts_fp8_with((isa, options), experts(), x, chosen, 1, order, out)
            });
        }
        if tokens == 1 {
            let one = Batch::default();
            self.check("gemv", false, |out| gemv_with(isa, weights, quantized, one, out));
        }
    }
}

#[test]
fn products_without_rows_columns_or_tokens_give_zeros_or_the_bias() {
    let sizes = [(0, 64, 9), (3, 0, 1), (3, 0, 9), (3, 0, 13), (3, 0, 17), (0, 0, 1), (0, 0, 17), (3, 64, 0)];
    for format in Format::MULTIPLIED {
        for (rows, cols, tokens) in sizes {
            for isa in instruction_sets() {
                let operands = Operands {
                    isa,
                    tokens,
                    weights: tensor(format, rows, cols, Scales::Common, 2),
                    x: vec![1.0; tokens * cols],
                    quantized: tensor(format, tokens, cols, Scales::Common, 2),
                    chosen: vec![1; tokens],
                };
                operands.check_all();
            }
        }
    }
}
