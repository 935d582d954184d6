//! Errors of single files.

use std::path::PathBuf;

use crate::dtype::FileDtype;

/// A file is invalid, or cannot hold a tensor.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file is not safetensors, or damaged.
    #[error("{} is not a valid safetensors file: {why}; download or write it again", .file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// The defect of the header.
        why: String,
    },

    /// The file is of a kind that microscale does not read.
    #[error("{} holds no tensors that are read here: it is {what}; {instead}", .file.display())]
    OtherKind {
        /// The file.
        file: PathBuf,
        /// The kind.
        what: &'static str,
        /// What to do instead.
        instead: &'static str,
    },

    /// The header describes a tensor wrongly.
    #[error(
        "{} is not a valid safetensors file: tensor {tensor}: {why}; download or write it again",
        .file.display()
    )]
    HeaderTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The defect of the description.
        why: String,
    },

    /// The file is not a dictionary of tensors as `torch.save` writes it, or damaged.
    #[error(
        "{} is not read as a PyTorch file of tensors: {why}; save it as safetensors, as from_pretrained and save_pretrained of \
         transformers do, or save only a dictionary of tensors with torch.save",
        .file.display()
    )]
    Pytorch {
        /// The file.
        file: PathBuf,
        /// The defect.
        why: String,
    },

    /// A PyTorch file describes a tensor wrongly, or in a way that microscale does not read.
    #[error(
        "{} is not read as a PyTorch file of tensors: tensor {tensor}: {why}; download or write it again",
        .file.display()
    )]
    PytorchTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The defect.
        why: String,
    },

    /// The file is not GGUF, is damaged, or is one that ggml refuses too.
    #[error("{} is not a valid GGUF file: {why}; download or write it again", .file.display())]
    Gguf {
        /// The file.
        file: PathBuf,
        /// The defect of the header, with the metadata key if there is one.
        why: String,
    },

    /// A GGUF header describes a tensor wrongly.
    #[error(
        "{} is not a valid GGUF file: tensor {tensor}: {why}; download or write it again",
        .file.display()
    )]
    GgufTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The defect of the description.
        why: String,
    },

    /// The file is not an importance matrix, or damaged.
    #[error("{} is not a valid importance matrix of llama.cpp's (.dat): {why}; make it again", .file.display())]
    Imatrix {
        /// The file.
        file: PathBuf,
        /// The defect, with the entry if there is one.
        why: String,
    },

    /// The number of tensors would change in one of the files of a split GGUF model.
    #[error(
        "{} is one of the {parts} files of a model, and each states the number of tensors in all of them; {before} tensors would \
         become {after} here: give the directory that holds all {parts}, or put them together with llama-gguf-split \
         --merge",
        .file.display()
    )]
    PartOfGguf {
        /// The file.
        file: PathBuf,
        /// The number of files of the model.
        parts: u64,
        /// The number of tensors.
        before: usize,
        /// The number of tensors after the change.
        after: usize,
    },

    /// A GGUF file cannot hold the tensor.
    #[error(
        "{}: GGUF cannot hold tensor {tensor}: {why}; leave it as it is with --exclude, or rename it",
        .file.display()
    )]
    NotInGguf {
        /// The output file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },

    /// A safetensors file cannot hold the tensor.
    #[error("{}: safetensors files cannot hold tensor {tensor}, which is {dtype}", .file.display())]
    NotInSafetensors {
        /// The output file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The dtype.
        dtype: FileDtype,
    },

    /// The file is too long for its kind.
    #[error(
        "{} has more than the {most} bytes allowed of {what}; name the file that was meant, or shorten it",
        .file.display()
    )]
    TooLong {
        /// The file.
        file: PathBuf,
        /// The expected kind of file.
        what: &'static str,
        /// The limit in bytes.
        most: u64,
    },

    /// The file should be JSON and is not.
    #[error("{} is not valid JSON", .file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// The position and the reason.
        source: serde_json::Error,
    },

    /// An index exceeds a limit.
    #[error("{} is not a valid index: {why}; download or write it again", .file.display())]
    Index {
        /// The file.
        file: PathBuf,
        /// The limit.
        why: String,
    },

    /// A JSON file does not have the expected content.
    #[error("{}: {why}", .file.display())]
    JsonContent {
        /// The file.
        file: PathBuf,
        /// The expected content.
        why: &'static str,
    },
}
