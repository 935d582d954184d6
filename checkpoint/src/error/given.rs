//! Errors of files that are given beside a checkpoint: global scales, and importance.

use std::path::PathBuf;

use microscale::{GlobalScale, Words};

use crate::dtype::FileDtype;

/// Global scales and importance that are given in files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GivenError {
    /// A file of global scales that lacks one.
    #[error(
        "{} has no global scale for tensor {tensor}; call it {tensor}, {tensor}_global_scale (a divisor) or \
         {tensor}_scale_2 (a multiplier), or leave {tensor} out with --exclude",
        .file.display()
    )]
    NoGlobalScale {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },

    /// A file with two global scales for one tensor.
    #[error(
        "{} has two global scales for tensor {tensor}, {first} and {second}; remove one",
        .file.display()
    )]
    GlobalScaleTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of one.
        first: String,
        /// The name of the other.
        second: String,
    },

    /// Importance by column, and no search whose errors it could weight.
    #[error(
        "importance weights the errors of a search for block scales; search for them with --search \
         four-six, window or full"
    )]
    ImportanceUnused,

    /// A file with two vectors of importance for one tensor.
    #[error(
        "{} has two vectors of importance for tensor {tensor}, {first} and {second}; remove one",
        .file.display()
    )]
    ImportanceTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of one.
        first: String,
        /// The name of the other.
        second: String,
    },

    /// Importance by column that is no vector of floats with the tensor's columns, nor one for each of its experts.
    #[error(
        "{}: tensor {name} must be a vector of {columns} numbers (F32, F16 or BF16), one for each column of \
         {tensor}, or one vector for each of its experts, but is {dtype} of shape {shape:?}; write one number a column, or leave \
         it out",
        .file.display()
    )]
    ImportanceShape {
        /// The file.
        file: PathBuf,
        /// The tensor in it.
        name: String,
        /// The tensor that it is for.
        tensor: String,
        /// The columns of that.
        columns: usize,
        /// The dtype found.
        dtype: FileDtype,
        /// The shape found.
        shape: Vec<usize>,
    },

    /// An importance matrix that does not fit a tensor.
    #[error(
        "{}: tensor {tensor} {why}; make the importance matrix from the same model, with all its layers and experts",
        .file.display()
    )]
    Imatrix {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The misfit.
        why: String,
    },

    /// An importance matrix of which no tensor that is searched is called as there.
    #[error(
        "{} is for none of the tensors to quantize: it has {other}, and they have {tensor}; an importance matrix has the names of          the GGUF file that it was made from, so quantize that",
        .file.display()
    )]
    ImatrixOfOthers {
        /// The file.
        file: PathBuf,
        /// One of the tensors to quantize.
        tensor: String,
        /// One of those that there is importance for.
        other: String,
    },

    /// A number of importance that is negative or not finite.
    #[error(
        "{}: tensor {name} has the number {weight} for column {column} of {tensor}; importance must be \
         finite and not negative, such as mean squared activations are",
        .file.display()
    )]
    ImportanceNumber {
        /// The file.
        file: PathBuf,
        /// The tensor in it.
        name: String,
        /// The tensor that it is for.
        tensor: String,
        /// The column, counted from 0.
        column: usize,
        /// The number found.
        weight: f32,
    },

    /// Scales of inputs, and no weights that could have one.
    #[error(
        "{tensor} can have no scale of its inputs: NVFP4 in the conventions compressed-tensors and modelopt has one for weights \
         called *.weight, and in GGUF files for those of layers that llama.cpp loads scales of; leave it out with --exclude, or leave \
         --input-scale out"
    )]
    InputScaleUnheld {
        /// The tensor, or all.
        tensor: String,
    },

    /// A file of scales of inputs that lacks one.
    #[error(
        "{} has no scale of the inputs of tensor {tensor}; call it {layer} (the largest magnitude), {layer}.input_global_scale (a \
         divisor) or {layer}.input_scale (a multiplier), or leave {tensor} out with --exclude",
        .file.display()
    )]
    NoInputScale {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its layer.
        layer: String,
    },

    /// A file with two scales of the inputs of one tensor.
    #[error("{} has two scales of the inputs of tensor {tensor}, {first} and {second}; remove one", .file.display())]
    InputScaleTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of one.
        first: String,
        /// The name of the other.
        second: String,
    },

    /// A file of scales of inputs that has one name twice.
    #[error("{}: {name} is there twice; remove one", .file.display())]
    InputScaleRepeated {
        /// The file.
        file: PathBuf,
        /// The name.
        name: String,
    },

    /// A value in a file of scales of inputs that is no number.
    #[error("{}: {name} is {value}, and must be a number: the largest magnitude of a layer's inputs, or a scale", .file.display())]
    InputScaleFile {
        /// The file.
        file: PathBuf,
        /// The name in it.
        name: String,
        /// The start of the value.
        value: String,
    },

    /// A scale of inputs that is 0, negative, not finite, or beyond what its inverse can be.
    #[error(
        "the scale of the inputs of tensor {tensor}, {source_of}, would be the {} {}, which no global scale can be; give the largest \
         magnitude of the inputs, a positive number",
        .scale.direction().word(), .scale.value()
    )]
    InputScaleNumber {
        /// Where it is from, in words.
        source_of: String,
        /// The tensor.
        tensor: String,
        /// The scale.
        scale: GlobalScale,
    },
}
