//! Errors of the output: a place or a name that it cannot have.

use std::path::{Path, PathBuf};

/// An output that cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// The output is there already.
    #[error(
        "{} exists; name an output that does not{}",
        .path.display(), if .path.is_dir() { ", or an empty directory" } else { "" }
    )]
    Exists {
        /// The output.
        path: PathBuf,
    },

    /// A directory was asked for and a file given, or the other way round.
    #[error("{} is a directory, but the input is a file: the output must be a file too", .path.display())]
    Kind {
        /// The output.
        path: PathBuf,
    },

    /// A file of one container by the name of another, such as safetensors called `.bin` or `.gguf`.
    #[error(
        "{} would be {}, and is named like a file of another kind; call it {}",
        .path.display(), if *.extension == "gguf" { "GGUF" } else { .extension }, .path.with_extension(.extension).display()
    )]
    NamedLikeOther {
        /// The output.
        path: PathBuf,
        /// The end of the names of files of its container.
        extension: &'static str,
    },

    /// The output's directory is not there.
    #[error("there is no directory {} to write {} into; create it first", .parent.display(), .path.display())]
    Parent {
        /// The output.
        path: PathBuf,
        /// The missing directory.
        parent: PathBuf,
    },

    /// Input and output are the same, or one holds the other.
    #[error(
        "the output {} {} the input {}; name another output",
        .output.display(), overlap(.input, .output), .input.display()
    )]
    Overlap {
        /// The input, with symbolic links resolved.
        input: PathBuf,
        /// The output, likewise.
        output: PathBuf,
    },

    /// Two outputs are the same, or one holds the other.
    #[error(
        "the outputs {} and {} are the same file, or one lies in the other; give each a place of its own",
        .first.display(), .second.display()
    )]
    Same {
        /// One output, with symbolic links resolved.
        first: PathBuf,
        /// Another, likewise.
        second: PathBuf,
    },

    /// A name, or a path, that the file system does not take.
    #[error("the file system takes no name or path as long as {}; choose a shorter one", .path.display())]
    NameTooLong {
        /// The path.
        path: PathBuf,
    },

    /// A file that was written is gone or was cut.
    #[error(
        "{} {}: another process removed it while this one worked, and {}; let nothing else write or remove \
         .*.microscale-* there, and run the command again",
        .file.display(), lost(*.expected, *.found),
        if .file.starts_with(.out) { format!("{} is incomplete: remove it", .out.display()) } else { "nothing was written".into() }
    )]
    Lost {
        /// The file: below the output if that had its name already, else in the temporary directory.
        file: PathBuf,
        /// Its size when it was written.
        expected: u64,
        /// Its size now; `None` if it is gone.
        found: Option<u64>,
        /// The output.
        out: PathBuf,
    },

    /// A directory called `OUT.parts` is not one of finished shards.
    #[error(
        "{} is there and was not made by `quantize --part`; move it away, or name another output",
        .path.display()
    )]
    NotParts {
        /// The directory.
        path: PathBuf,
    },

    /// A name that the output needs is taken.
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
        /// The name that is taken.
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
