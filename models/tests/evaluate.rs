//! Evaluations of the sample that was trained, `sample/tiny-story`.

mod story;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Module, Tensor};
use microscale::{Format, Numerics};
use microscale_models::{
    Error, EvaluateOptions, Evaluated, Evaluation, InputFormat, Layer, LayerName, Model, QuantizedInputs,
    Source, Window, Wrapped, evaluate,
};
use story::{Story, quantized, sample};

fn evaluation(story: &Story, others: &[Evaluated<'_>], windows: &[Window]) -> Evaluation {
    let options = EvaluateOptions { dtype: DType::F32, layers: true };
    evaluate(story.model(), others, windows, options, &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn the_perplexity_is_that_of_pytorch() {
    let story = Story::open(&sample());
    let found = evaluation(&story, &[], &story.windows(None));
    assert_eq!(found.tokens, 24_468);
    // `scripts/quality/train_tiny_story.py` prints it: PyTorch with the weights as stored.
    assert!((found.perplexity.mean - 31.667).abs() < 0.001, "{:?}", found.perplexity);
    assert!(found.perplexity.margin > 0.5 && found.perplexity.margin < 5.0, "{:?}", found.perplexity);
}

#[test]
fn a_model_does_not_differ_from_itself() {
    let story = Story::open(&sample());
    let found = evaluation(&story, &[story.model()], &story.windows(Some(3)));
    let other = &found.others[0];
    assert_eq!((other.loss, other.perplexity), (found.loss, found.perplexity));
    assert_eq!((other.increase.mean, other.divergence.mean), (0.0, 0.0));
    assert_eq!((other.agreement.mean, other.agreement.margin), (1.0, 0.0));
    assert_eq!(other.layers.len(), 4 * 7, "four decoder layers of seven linear layers");
    assert!(other.layers.iter().all(|layer| layer.errors == 0.0 && layer.squares > 0.0));
}

/// The quantities from the logits of whole models, token by token.
#[test]
fn differences_are_those_of_whole_models_in_memory() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    quantized(directory.path(), Format::Nvfp4, Numerics::CompressedTensors);
    let other = Story::open(directory.path());
    let windows = story.windows(Some(3));
    let found = evaluation(&story, &[other.model()], &windows);

    let mut models =
        [&story, &other].map(|story| Model::load(&story.source, &story.config, DType::F32).unwrap());
    let (mut losses, mut divergence, mut agreement, mut tokens) = ([0.0; 2], 0.0, 0.0, 0.0);
    for window in &windows {
        let rows = models.each_mut().map(|model| {
            model.reset();
            let logits = model.forward(&window.inputs, false).unwrap().to_dtype(DType::F64).unwrap();
            let log_p = candle_nn::ops::log_softmax(&logits, 1).unwrap();
            log_p.to_vec2::<f64>().unwrap()
        });
        for (i, target) in window.targets.iter().enumerate() {
            let [p, q] = [&rows[0][i], &rows[1][i]];
            losses[0] -= p[*target as usize];
            losses[1] -= q[*target as usize];
            divergence += p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            let largest = |row: &[f64]| row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let at = |row: &[f64]| row.iter().position(|x| *x == largest(row));
            agreement += f64::from(u8::from(at(p) == at(q)));
            tokens += 1.0;
        }
    }
    let near = |found: f64, expected: f64| {
        assert!((found - expected).abs() < 1e-5 * expected.abs().max(0.01), "{found}, expected {expected}");
    };
    let difference = &found.others[0];
    near(found.loss.mean, losses[0] / tokens);
    near(difference.loss.mean, losses[1] / tokens);
    near(difference.perplexity.mean, (losses[1] / tokens).exp());
    near(difference.increase.mean, ((losses[1] - losses[0]) / tokens).exp() - 1.0);
    near(difference.divergence.mean, divergence / tokens);
    near(difference.agreement.mean, agreement / tokens);
    assert!(difference.divergence.mean > 0.0 && difference.agreement.mean < 1.0);
    // The paired interval is much narrower than the intervals of both perplexities.
    assert!(difference.increase.margin * 5.0 < found.perplexity.margin / found.perplexity.mean);
}

/// Keeps the inputs of a layer.
struct Kept(Layer, Arc<Mutex<Vec<Tensor>>>);

impl Module for Kept {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.lock().unwrap().push(x.clone());
        self.0.forward(x)
    }
}

#[test]
fn a_layers_error_is_that_of_its_dequantized_weights() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    quantized(directory.path(), Format::Mxfp4, Numerics::CompressedTensors);
    let other = Story::open(directory.path());
    let windows = story.windows(Some(1));
    let found = evaluation(&story, &[other.model()], &windows);

    let weight = "model.layers.2.mlp.down_proj.weight";
    let inputs = Arc::new(Mutex::new(Vec::new()));
    let kept = Wrapped {
        source: &story.source,
        layers: |name: &LayerName, layers: Vec<Layer>| {
            if name.weight() != weight {
                return Ok(layers);
            }
            Ok(layers.into_iter().map(|layer| Box::new(Kept(layer, inputs.clone())) as Layer).collect())
        },
        cache: |_: &str| None,
    };
    let mut model = Model::load(&kept, &story.config, DType::F32).unwrap();
    model.forward(&windows[0].inputs, false).unwrap();
    let x = inputs.lock().unwrap()[0].to_dtype(DType::F64).unwrap();
    let y = |story: &Story| {
        let weight = story.source.weights().stored((256, 768), weight).unwrap();
        x.matmul(&weight.to_dtype(DType::F64).unwrap().t().unwrap()).unwrap()
    };
    let squares = |x: &Tensor| x.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    let (exact, rounded) = (y(&story), y(&other));
    let expected = 10.0 * (squares(&exact) / squares(&(&rounded - &exact).unwrap())).log10();
    let layer = found.others[0].layers.iter().find(|layer| layer.weight == weight).unwrap();
    assert!((layer.sqnr_db() - expected).abs() < 1e-3, "{} dB, expected {expected}", layer.sqnr_db());
}

#[test]
fn quantized_inputs_cost_more_the_fewer_bits_they_have() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    quantized(directory.path(), Format::Nvfp4, Numerics::CompressedTensors);
    let other = Story::open(directory.path());
    let formats = [InputFormat::Mxfp8, InputFormat::Fp8, InputFormat::Nvfp4, InputFormat::Mxfp4];
    let sources = formats.map(|format| QuantizedInputs::new(other.source.clone(), format));
    let model = |source| Evaluated { name: "other", source, config: &other.config };
    let mut models = vec![other.model()];
    models.extend(sources.iter().map(|source| model(source as &dyn Source)));
    let found = evaluation(&story, &models, &story.windows(Some(8)));
    let divergences: Vec<f64> = found.others.iter().map(|other| other.divergence.mean).collect();
    let [exact, mxfp8, fp8, nvfp4, mxfp4] = divergences[..] else { panic!("{divergences:?}") };
    assert!(exact < mxfp8 && exact < fp8, "{divergences:?}");
    assert!(mxfp8 < nvfp4 && fp8 < nvfp4 && nvfp4 < mxfp4, "{divergences:?}");
    // Rounding inputs to 4 bits adds an error as large as the weights' error, in every layer.
    for (without, with) in found.others[0].layers.iter().zip(&found.others[3].layers) {
        let cost = without.sqnr_db() - with.sqnr_db();
        assert!((0.5..12.0).contains(&cost), "{}: {cost} dB", with.weight);
    }
}

#[test]
fn evaluations_are_interrupted_and_refuse_other_models() {
    let story = Story::open(&sample());
    let windows = story.windows(Some(1));
    let options = EvaluateOptions { dtype: DType::F32, layers: false };
    let stop = evaluate(story.model(), &[], &windows, options, &mut |_| ControlFlow::Break(()));
    assert!(matches!(stop, Err(Error::Interrupted)), "{stop:?}");
    let llama = Story::golden("llama");
    let other =
        evaluate(story.model(), &[llama.model()], &windows, options, &mut |_| ControlFlow::Continue(()));
    let message = other.unwrap_err().to_string();
    assert!(message.contains("96 tokens in its vocabulary"), "{message}");
}
