//! Runs a Llama, Mistral or Qwen from a checkpoint directory, quantized in any format or not.
//!
//!     cargo run --release -p microscale-models --example generate -- OUT --prompt "It was"
//!     cargo run --release -p microscale-models --example generate -- sample/tiny-story \
//!         --layers plain,q4_k,mxfp4,nvfp4,nvfp4-full --perplexity sample/tiny-story/heldout.txt
//!     cargo run --release -p microscale-models --example generate -- random \
//!         --layers plain,q4_k,nvfp4
//!     cargo run --release -p microscale-models --example generate --features cuda -- \
//!         OUT --device cuda --dtype bf16
//!
//! Pass `--layers` to choose how linear layers are held:
//!
//! - `stored`: as in the checkpoint
//! - `plain`: candle's `Linear`, dequantized if necessary
//! - `q4_0`, `q4_k`, `q8_0`: quantized in memory by candle
//! - `mxfp4`, `nvfp4`, `mxfp4-full`, `nvfp4-full`: quantized in memory by microscale, from the same
//!   values
//! - any of `stored` and the last four with `-int8` at the end: activations are rounded to INT8, as
//!   candle does for its types
//!
//! Several choices alternate. `--dtype` is the dtype of activations and unquantized tensors.
//! `--device cuda` is the first GPU: an extra first round, which is not measured, has its driver
//! compile the kernels. `--tokens` is the number of tokens to generate, and `--rounds` the number
//! of rounds, for speeds. `random` is a model with 8 layers of 2048 and random weights; it has no
//! vocabulary of words.

mod layers;
mod random;

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, fs};

use candle_core::{DType, Device};
use layers::{Held, Stored};
use microscale_candle::Weights;
use microscale_models::{
    Config, EvaluateOptions, Evaluated, Model, Source, Text, TextOptions, Window, evaluate,
};
use random::Random;
use tokenizers::Tokenizer;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const HELP: &str = "\
Generates text with a Llama, Mistral or Qwen whose linear layers are quantized

Usage: generate <MODEL> [OPTIONS]

  MODEL                A checkpoint directory, or `random` for 8 layers of random weights

Options:
  --layers LIST        How to hold linear layers, separated by commas [default: stored]:
                       stored, plain, q4_0, q4_k, q8_0, mxfp4, nvfp4, mxfp4-full, nvfp4-full;
                       stored-int8, mxfp4-int8 and so on round activations to INT8
  --dtype DTYPE        Dtype of activations: f32, f16 or bf16 [default: f32]
  --device DEVICE      cpu or cuda [default: cpu]
  --prompt TEXT        The start of the text [default: It was a truth]
  --tokens N           Number of tokens to generate, at least 2 [default: 40]
  --rounds N           Number of rounds, for speeds [default: 1]
  --perplexity FILE    Report the perplexity of a text
  -h, --help           Print this help";

/// The hint that ends messages about the command line.
const HINT: &str = "pass --help to list the options";

struct Options {
    model: String,
    layers: Vec<(String, Held)>,
    dtype: DType,
    device: Device,
    prompt: String,
    tokens: usize,
    rounds: usize,
    perplexity: Option<String>,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self {
            model: words
                .next()
                .filter(|word| !word.starts_with('-'))
                .ok_or_else(|| format!("pass MODEL first; {HINT}"))?,
            layers: vec![("stored".into(), Held::Stored(None))],
            dtype: DType::F32,
            device: Device::Cpu,
            prompt: "It was a truth".into(),
            tokens: 40,
            rounds: 1,
            perplexity: None,
        };
        while let Some(word) = words.next() {
            let value = words.next().ok_or_else(|| format!("{word} needs a value; {HINT}"))?;
            let number = || value.parse().map_err(|_| format!("{word} needs a number, and not {value:?}"));
            match &*word {
                "--layers" => {
                    let each = value.split(',').map(|word| Ok((word.into(), word.parse()?)));
                    options.layers = each.collect::<Result<_>>()?;
                }
                "--dtype" => {
                    let dtypes = [DType::F32, DType::F16, DType::BF16];
                    options.dtype = dtypes
                        .into_iter()
                        .find(|dtype| dtype.as_str() == value)
                        .ok_or_else(|| format!("{value:?} is not a dtype; pass f32, f16 or bf16"))?;
                }
                "--device" if value == "cuda" => options.device = Device::new_cuda(0)?,
                "--device" if value == "cpu" => options.device = Device::Cpu,
                "--prompt" => options.prompt = value,
                "--tokens" => options.tokens = number()?,
                "--rounds" => options.rounds = number()?,
                "--perplexity" => options.perplexity = Some(value),
                _ => return Err(format!("{word} {value} is not an option; {HINT}").into()),
            }
        }
        if options.tokens < 2 || options.rounds < 1 {
            return Err("pass at least 2 --tokens and 1 --rounds".into());
        }
        Ok(options)
    }
}

/// A loaded model and its measurements.
struct Run {
    name: String,
    source: Box<dyn Source>,
    model: Model,
    tokens: Vec<u32>,
    prompt: Vec<Duration>,
    each: Vec<Duration>,
}

impl Run {
    /// Generates tokens after a prompt.
    fn round(&mut self, prompt: &[u32], count: usize) -> Result<()> {
        self.model.reset();
        let start = Instant::now();
        let mut tokens = vec![self.model.next(prompt)?];
        self.prompt.push(start.elapsed());
        while tokens.len() < count {
            let start = Instant::now();
            tokens.push(self.model.next(&tokens[tokens.len() - 1..])?);
            self.each.push(start.elapsed());
        }
        self.tokens = tokens;
        Ok(())
    }
}

/// The median and the minimum.
fn median(times: &mut [Duration]) -> [f64; 2] {
    times.sort();
    [times[times.len() / 2], times[0]].map(|time| time.as_secs_f64())
}

fn main() -> ExitCode {
    if env::args().any(|word| word == "--help" || word == "-h") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    // A `main` that returns an error would print its `Debug` form.
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let options = Options::parse(env::args().skip(1))?;
    let directory = (options.model != "random").then(|| Path::new(&options.model));
    let (config, weights) = match directory {
        Some(directory) => {
            let config = Config::read(directory)?;
            (config, Some(Weights::open(directory, options.dtype, &options.device)?))
        }
        None => (Config::parse(RANDOM)?, None),
    };
    let tokenizer = directory.map(|directory| directory.join("tokenizer.json")).filter(|path| path.exists());
    let tokenizer = tokenizer.map(Tokenizer::from_file).transpose()?;
    let prompt = match &tokenizer {
        Some(tokenizer) => {
            let prompt = tokenizer.encode(&*options.prompt, false)?;
            config.bos.into_iter().chain(prompt.get_ids().iter().copied()).collect()
        }
        None => (0..64).collect::<Vec<u32>>(),
    };

    let mut runs = Vec::new();
    for (name, held) in &options.layers {
        let start = Instant::now();
        let source: Box<dyn Source> = match &weights {
            Some(weights) => Box::new(Stored(weights.clone(), *held)),
            None => Box::new(Random(*held, options.dtype, options.device.clone())),
        };
        let model = Model::load(&*source, &config, options.dtype)?;
        eprintln!("{name}: loaded in {:.2} s", start.elapsed().as_secs_f64());
        let (tokens, prompt, each) = (Vec::new(), Vec::new(), Vec::new());
        runs.push(Run { name: name.clone(), source, model, tokens, prompt, each });
    }
    if !options.device.is_cpu() {
        for run in &mut runs {
            run.round(&prompt, 2)?;
            run.prompt.clear();
            run.each.clear();
        }
    }
    for _ in 0..options.rounds {
        for run in &mut runs {
            run.round(&prompt, options.tokens)?;
        }
    }
    for run in &runs {
        match &tokenizer {
            Some(tokenizer) => {
                println!("{}: {}{}\n", run.name, options.prompt, tokenizer.decode(&run.tokens, true)?)
            }
            None => println!("{}: {:?}\n", run.name, run.tokens),
        }
    }

    let windows = match (&options.perplexity, directory) {
        (Some(file), Some(directory)) => {
            let cut = TextOptions { window: config.context, windows: None, documents: true };
            Some(Text::open(directory)?.windows(&fs::read_to_string(file)?, &config, &cut)?)
        }
        (Some(_), None) => return Err("--perplexity needs a tokenizer.json next to the model".into()),
        (None, _) => None,
    };
    let place = match options.device {
        Device::Cpu => format!("{} threads", std::thread::available_parallelism()?),
        _ => "the first GPU".into(),
    };
    println!("{place}, activations in {}, prompt of {} tokens", options.dtype.as_str(), prompt.len());
    println!("| layers | prompt, tokens/s | tokens/s, median | best | perplexity |\n|---|---|---|---|---|");
    for run in &mut runs {
        let [prompted, _] = median(&mut run.prompt);
        let [middle, least] = median(&mut run.each);
        let perplexity = match &windows {
            Some(windows) => format!("{:.3}", perplexity(run, &config, windows, options.dtype)?),
            None => "–".into(),
        };
        let (name, prompt) = (&run.name, prompt.len() as f64 / prompted);
        println!("| {name} | {prompt:.0} | {:.1} | {:.1} | {perplexity} |", 1.0 / middle, 1.0 / least);
    }
    Ok(())
}

/// The perplexity of a text.
fn perplexity(run: &Run, config: &Config, windows: &[Window], dtype: DType) -> Result<f64> {
    let model = Evaluated { name: &run.name, source: &*run.source, config };
    let options = EvaluateOptions { dtype, layers: false };
    Ok(evaluate(model, &[], windows, options, &mut |_| ControlFlow::Continue(()))?.perplexity.mean)
}

/// A model for measurements.
const RANDOM: &str = r#"{
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 2048,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": false
}"#;
