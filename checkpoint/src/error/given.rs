//! Errors of side files: global scales, input scales and importance.

use std::path::PathBuf;

use microscale::{GlobalScale, Words};

use crate::dtype::FileDtype;

/// A side file with global scales, input scales or importance is wrong.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum GivenError {
    /// The file cannot be opened.
    #[error("cannot take {what} from {}", .file.display())]
    Open {
        /// The content that the file should have.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The calibration was interrupted.
    #[error(
        "{} has an interrupted calibration; to continue it, run `microscale calibrate {model} {} --text {text}` \
         with its other options",
        .directory.display(), .directory.display()
    )]
    Incomplete {
        /// The directory.
        directory: PathBuf,
        /// The model.
        model: String,
        /// The text.
        text: String,
    },

    /// The calibration has a Hessian of other inputs.
    #[error(
        "{} has a Hessian for tensor {tensor} that is not [{columns}, {columns}] in F32; calibrate this model",
        .directory.display()
    )]
    HessianShape {
        /// The directory.
        directory: PathBuf,
        /// The tensor.
        tensor: String,
        /// Columns of the tensor.
        columns: usize,
    },

    /// No tensor has a Hessian in the calibration.
    #[error(
        "{} has no Hessian for any tensor to quantize, such as {tensor}; calibrate this model",
        .directory.display()
    )]
    HessiansOfOthers {
        /// The directory.
        directory: PathBuf,
        /// A tensor to quantize.
        tensor: String,
    },

    /// The file has no global scale for a tensor.
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

    /// The file has two global scales for a tensor.
    #[error(
        "{} has two global scales for tensor {tensor}, {first} and {second}; remove one",
        .file.display()
    )]
    GlobalScaleTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of the first.
        first: String,
        /// The name of the second.
        second: String,
    },

    /// Importance was given without a search whose errors it could weight.
    #[error(
        "importance weights the errors of a search for block scales; search for them with --search {}",
        microscale::searches()
    )]
    ImportanceUnused,

    /// The file has two importance vectors for a tensor.
    #[error(
        "{} has two vectors of importance for tensor {tensor}, {first} and {second}; remove one",
        .file.display()
    )]
    ImportanceTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of the first.
        first: String,
        /// The name of the second.
        second: String,
    },

    /// Importance must be a float vector with one number per column, or one vector per expert.
    #[error(
        "{}: tensor {name} must be a vector of {columns} numbers (F32, F16 or BF16), one for each column of \
         {tensor}, or one vector for each of its experts, but is {dtype} of shape {shape:?}; write one number a column, or leave \
         it out",
        .file.display()
    )]
    ImportanceShape {
        /// The file.
        file: PathBuf,
        /// The name of the tensor in the file.
        name: String,
        /// The tensor to quantize.
        tensor: String,
        /// The number of its columns.
        columns: usize,
        /// The dtype in the file.
        dtype: FileDtype,
        /// The shape in the file.
        shape: Vec<usize>,
    },

    /// An importance matrix does not fit a tensor.
    #[error(
        "{}: tensor {tensor} {why}; make the importance matrix from the same model, with all its layers and experts",
        .file.display()
    )]
    Imatrix {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The mismatch.
        why: String,
    },

    /// No tensor to quantize has a name that the importance matrix knows.
    #[error(
        "{} is for none of the tensors to quantize: it has {other}, and they have {tensor}; an importance \
         matrix has the names of the GGUF file that it was made from, so quantize that file",
        .file.display()
    )]
    ImatrixOfOthers {
        /// The file.
        file: PathBuf,
        /// One of the tensors to quantize.
        tensor: String,
        /// A name in the importance matrix.
        other: String,
    },

    /// An importance number is negative or not finite.
    #[error(
        "{}: tensor {name} has the number {weight} for column {column} of {tensor}; importance must be \
         finite and not negative, such as mean squared activations are",
        .file.display()
    )]
    ImportanceNumber {
        /// The file.
        file: PathBuf,
        /// The name of the tensor in the file.
        name: String,
        /// The tensor to quantize.
        tensor: String,
        /// The column, counted from 0.
        column: usize,
        /// The number.
        weight: f32,
    },

    /// Input scales were given, and no weight can have one.
    #[error(
        "{tensor} can have no scale of its inputs: NVFP4 in the checkpoint formats compressed-tensors and modelopt has one for weights \
         called *.weight, and in GGUF files for those of layers that llama.cpp loads scales of; leave it out with --exclude, or leave \
         --input-scale out"
    )]
    InputScaleUnheld {
        /// The tensor, or a word for all.
        tensor: String,
    },

    /// The file has no input scale for a tensor.
    #[error(
        "{} has no scale of the inputs of tensor {tensor}; call it {amax} (the largest magnitude), {layer}.input_global_scale (a \
         divisor) or {layer}.input_scale (a multiplier), or leave {tensor} out with --exclude",
        .file.display()
    )]
    NoInputScale {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The layer of the tensor.
        layer: String,
        /// The name of the largest magnitude.
        amax: String,
    },

    /// The file has two input scales for a tensor.
    #[error("{} has two scales of the inputs of tensor {tensor}, {first} and {second}; remove one", .file.display())]
    InputScaleTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of the first.
        first: String,
        /// The name of the second.
        second: String,
    },

    /// A file of input scales has the same name twice.
    #[error("{}: {name} is there twice; remove one", .file.display())]
    InputScaleRepeated {
        /// The file.
        file: PathBuf,
        /// The name.
        name: String,
    },

    /// A value in a file of input scales is not a number.
    #[error("{}: {name} is {value}, and must be a number: the largest magnitude of a layer's inputs, or a scale", .file.display())]
    InputScaleFile {
        /// The file.
        file: PathBuf,
        /// The name in the file.
        name: String,
        /// The beginning of the value.
        value: String,
    },

    /// An input scale is 0, negative, not finite, or has no finite inverse.
    #[error(
        "the scale of the inputs of tensor {tensor}, {source_of}, would be the {} {}, which no global scale can be; give the largest \
         magnitude of the inputs, a positive number",
        .scale.direction().word(), .scale.value()
    )]
    InputScaleNumber {
        /// Where the scale comes from, in words.
        source_of: String,
        /// The tensor.
        tensor: String,
        /// The scale.
        scale: GlobalScale,
    },
}
