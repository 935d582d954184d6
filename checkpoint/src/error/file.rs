//! Errors of single files: one that is not what it should be, or cannot hold what it should.

use std::path::PathBuf;

use crate::dtype::FileDtype;

/// A file that is not what it should be, or cannot hold what it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A file that is not safetensors, or a damaged one.
    #[error("{} is not a valid safetensors file: {why}; download or write it again", .file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// The defect of its header.
        why: String,
    },

    /// A file of another kind.
    #[error("{} holds no tensors that are read here: it is {what}; {instead}", .file.display())]
    OtherKind {
        /// The file.
        file: PathBuf,
        /// Its kind.
        what: &'static str,
        /// The way out.
        instead: &'static str,
    },

    /// A header that describes a tensor wrongly.
    #[error(
        "{} is not a valid safetensors file: tensor {tensor}: {why}; download or write it again",
        .file.display()
    )]
    HeaderTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The defect of its description.
        why: String,
    },

    /// A file that holds something else than a dictionary of tensors as `torch.save` writes it, or a damaged one.
    #[error(
        "{} is not read as a PyTorch file of tensors: {why}; save it as safetensors, as from_pretrained and save_pretrained of \
         transformers do, or save a dictionary of tensors alone with torch.save",
        .file.display()
    )]
    Pytorch {
        /// The file.
        file: PathBuf,
        /// The fault.
        why: String,
    },

    /// A PyTorch file that describes a tensor wrongly, or has one that is not read.
    #[error(
        "{} is not read as a PyTorch file of tensors: tensor {tensor}: {why}; download or write it again",
        .file.display()
    )]
    PytorchTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The fault.
        why: String,
    },

    /// A file that is not GGUF, or a damaged one, or one that ggml would not read either.
    #[error("{} is not a valid GGUF file: {why}; download or write it again", .file.display())]
    Gguf {
        /// The file.
        file: PathBuf,
        /// The defect of its header, with the key of the metadata if that is to blame.
        why: String,
    },

    /// A header of GGUF that describes a tensor wrongly.
    #[error(
        "{} is not a valid GGUF file: tensor {tensor}: {why}; download or write it again",
        .file.display()
    )]
    GgufTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The defect of its description.
        why: String,
    },

    /// A file that is not an importance matrix, or a damaged one.
    #[error("{} is not a valid importance matrix of llama.cpp's (.dat): {why}; make it again", .file.display())]
    Imatrix {
        /// The file.
        file: PathBuf,
        /// The defect, with the entry if one is to blame.
        why: String,
    },

    /// One of the files that a GGUF model was split into, whose number of tensors would change.
    #[error(
        "{} is one of the {parts} files of a model, each of which states the tensors of all; {before} tensors would \
         become {after} here: give the directory that holds all {parts}, or put them together with llama-gguf-split \
         --merge",
        .file.display()
    )]
    PartOfGguf {
        /// The file.
        file: PathBuf,
        /// The number of files.
        parts: u64,
        /// Its tensors.
        before: usize,
        /// The tensors that it would have.
        after: usize,
    },

    /// A tensor that a GGUF file cannot hold.
    #[error(
        "{}: GGUF cannot hold tensor {tensor}: {why}; leave it as it is with --exclude, or rename it",
        .file.display()
    )]
    NotInGguf {
        /// The file to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The obstacle.
        why: String,
    },

    /// A tensor that a safetensors file cannot hold.
    #[error("{}: safetensors files cannot hold tensor {tensor}, which is {dtype}", .file.display())]
    NotInSafetensors {
        /// The file to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: FileDtype,
    },

    /// A file that is longer than any of its kind.
    #[error(
        "{} has more than the {most} bytes allowed of {what}; name the file that was meant, or shorten it",
        .file.display()
    )]
    TooLong {
        /// The file.
        file: PathBuf,
        /// The kind of file that was expected.
        what: &'static str,
        /// The bytes that are allowed.
        most: u64,
    },

    /// A JSON file that is not JSON.
    #[error("{} is not valid JSON", .file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// The place and the reason.
        source: serde_json::Error,
    },

    /// An index beyond what any has.
    #[error("{} is not a valid index: {why}; download or write it again", .file.display())]
    Index {
        /// The file.
        file: PathBuf,
        /// The limit that it passes.
        why: String,
    },

    /// A JSON file that holds something else than it should.
    #[error("{}: {why}", .file.display())]
    JsonContent {
        /// The file.
        file: PathBuf,
        /// The content that was expected.
        why: &'static str,
    },
}
