//! Errors of the output's path and names.

use std::path::{Path, PathBuf};

/// The output cannot be written where it was requested.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// The output exists.
    #[error(
        "{} exists; name an output that does not{}",
        .path.display(), if .path.is_dir() { ", or an empty directory" } else { "" }
    )]
    Exists {
        /// The output.
        path: PathBuf,
    },

    /// The output is a directory and the input a file, or the other way round.
    #[error("{} is a directory, but the input is a file: the output must be a file too", .path.display())]
    Kind {
        /// The output.
        path: PathBuf,
    },

    /// The output has the file extension of another container, such as `.gguf` for safetensors.
    #[error(
        "{} would be {}, and is named like a file of another kind; call it {}",
        .path.display(), if *.extension == "gguf" { "GGUF" } else { .extension }, .path.with_extension(.extension).display()
    )]
    NamedLikeOther {
        /// The output.
        path: PathBuf,
        /// The file extension of the output's container.
        extension: &'static str,
    },

    /// The parent directory of the output does not exist.
    #[error("there is no directory {} to write {} into; create it first", .parent.display(), .path.display())]
    Parent {
        /// The output.
        path: PathBuf,
        /// The missing directory.
        parent: PathBuf,
    },

    /// Input and output are the same, or one contains the other.
    #[error(
        "the output {} {} the input {}; name another output",
        .output.display(), overlap(.input, .output), .input.display()
    )]
    Overlap {
        /// The input, with symbolic links resolved.
        input: PathBuf,
        /// The output, with symbolic links resolved.
        output: PathBuf,
    },

    /// Two outputs are the same, or one contains the other.
    #[error(
        "the outputs {} and {} are the same file, or one lies in the other; give each a place of its own",
        .first.display(), .second.display()
    )]
    Same {
        /// The first output, with symbolic links resolved.
        first: PathBuf,
        /// The second output, with symbolic links resolved.
        second: PathBuf,
    },

    /// The file system does not accept such a long name or path.
    #[error("the file system takes no name or path as long as {}; choose a shorter one", .path.display())]
    NameTooLong {
        /// The path.
        path: PathBuf,
    },

    /// Another process removed or truncated a file of the output.
    #[error(
        "{} {}: another process removed it while this one worked, and {}; let nothing else write or remove \
         .*.microscale-* there, and run the command again",
        .file.display(), lost(*.expected, *.found),
        if .file.starts_with(.out) { format!("{} is incomplete: remove it", .out.display()) } else { "nothing was written".into() }
    )]
    Lost {
        /// The file: in the output if it already has its final name, else in the temporary
        /// directory.
        file: PathBuf,
        /// Its size when it was written.
        expected: u64,
        /// Its size now; `None` if it does not exist.
        found: Option<u64>,
        /// The output.
        out: PathBuf,
    },

    /// A directory with the name `OUT.parts` does not contain finished shards.
    #[error(
        "{} is there and was not made by `quantize --part`; move it away, or name another output",
        .path.display()
    )]
    NotParts {
        /// The directory.
        path: PathBuf,
    },

    /// The output needs a name that another tensor has.
    #[error(
        "{}: tensor {tensor} becomes {name}, but there is a tensor of that name; rename it, or leave \
         {tensor} out with --exclude",
        .file.display()
    )]
    NameTaken {
        /// The file of the tensor.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name.
        name: String,
    },
}

fn lost(expected: u64, found: Option<u64>) -> String {
    match found {
        None => "is gone".into(),
        Some(found) => format!("has {found} bytes instead of {expected}"),
    }
}

fn overlap(input: &Path, output: &Path) -> &'static str {
    if input == output {
        "is"
    } else if output.starts_with(input) {
        "lies inside"
    } else {
        "holds"
    }
}
