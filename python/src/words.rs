//! The words of each choice. A test compares the types of the package with them.

use microscale::formats::nvfp4::Direction;
use microscale::formats::{ScaleRule, Ties};
use microscale::{Dtype, Format, NonFinite, Numerics, ScaleLayout, Search, Words};
use microscale_checkpoint::{CheckpointFormat, Gptq, KeptAs, Written};
use microscale_models::InputFormat;
use pyo3::prelude::*;

use crate::{activations, gate, kv, rounding};

/// Returns the words of each choice, by the name of its type in Python.
#[pyfunction]
pub(crate) fn words() -> Vec<(&'static str, Vec<&'static str>)> {
    let files = CheckpointFormat::WORDS.iter();
    let written = files.clone().filter(|(_, format)| format.formats().next().is_some());
    let converted = files.filter(|(_, format)| format.written() != Written::No);
    vec![
        ("AnyFormat", listed::<Format>()),
        ("ComparedFormat", compared()),
        ("Numerics", listed::<Numerics>()),
        ("ScaleRule", listed::<ScaleRule>()),
        ("Ties", listed::<Ties>()),
        ("Search", listed::<Search>()),
        ("ScaleLayout", listed::<ScaleLayout>()),
        ("NonFinite", listed::<NonFinite>()),
        ("Direction", listed::<Direction>()),
        ("RoundedActivations", rounding::all_words()),
        ("ActivationFormat", activations::FORMATS.to_vec()),
        ("RowOperation", activations::OPERATIONS.to_vec()),
        ("Norm", activations::NORMS.to_vec()),
        ("ActivationLayout", activations::LAYOUTS.to_vec()),
        ("Gate", gate::GATES.to_vec()),
        ("KvLayout", kv::ORDERS.to_vec()),
        ("CheckpointDtype", listed::<Dtype>()),
        ("Kept", listed::<KeptAs>()),
        ("GptqOrder", Gptq::ORDERS.map(|(word, _)| word).to_vec()),
        ("InputFormat", listed::<InputFormat>()),
        ("CheckpointFormat", written.map(|(word, _)| *word).collect()),
        ("ConvertedFormat", converted.map(|(word, _)| *word).collect()),
    ]
}

/// The words of a type.
fn listed<T: Words>() -> Vec<&'static str> {
    T::WORDS.iter().map(|(word, _)| *word).collect()
}

/// Formats to compare with, which no array and no checkpoint is in.
fn compared() -> Vec<&'static str> {
    let formats = Format::WORDS.iter().filter(|(_, format)| matches!(format, Format::Comparison(_)));
    formats.map(|(word, _)| *word).collect()
}
