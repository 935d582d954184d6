//! The file and the tensor that an error is about, for callers that show them separately.

use std::path::Path;

use crate::error::Error;
use crate::error::directory::DirectoryError;
use crate::error::file::FileError;
use crate::error::format::FormatError;
use crate::error::given::GivenError;
use crate::error::output::OutputError;
use crate::error::parts::PartsError;
use crate::error::plan::PlanError;

impl Error {
    /// The file or directory that the error is about, and the tensor, if the error names them.
    ///
    /// If there are two files, it is the input file or the first one.
    pub fn place(&self) -> (Option<&Path>, Option<&str>) {
        let (file, tensor) = match self {
            Self::Io { path, .. } => (Some(path), None),
            Self::File(error) => of_file(error),
            Self::Directory(error) => of_directory(error),
            Self::Format(error) => of_format(error),
            Self::Plan(error) => of_plan(error),
            Self::Given(error) => of_given(error),
            Self::Output(error) => of_output(error),
            Self::Parts(
                PartsError::Missing { directory, .. }
                | PartsError::Differ { directory, .. }
                | PartsError::Split { directory, .. },
            ) => (Some(directory), None),
            Self::Tensor { file, tensor, .. }
            | Self::Memory { file, tensor, .. }
            | Self::ShapeMismatch { first: file, tensor, .. }
            | Self::NothingInCommon { first: file, first_name: tensor, .. } => (Some(file), Some(tensor)),
            Self::Recipe(_) | Self::Device(_) | Self::Threads(_) | Self::Interrupted => (None, None),
        };
        (file.map(|file| file.as_path()), tensor.map(String::as_str))
    }
}

/// The file and the tensor that an error names.
type Location<'a> = (Option<&'a std::path::PathBuf>, Option<&'a String>);

fn of_file(error: &FileError) -> Location<'_> {
    match error {
        FileError::HeaderTensor { file, tensor, .. }
        | FileError::GgufTensor { file, tensor, .. }
        | FileError::PytorchTensor { file, tensor, .. }
        | FileError::NotInGguf { file, tensor, .. }
        | FileError::NotInSafetensors { file, tensor, .. } => (Some(file), Some(tensor)),
        FileError::Header { file, .. }
        | FileError::OtherKind { file, .. }
        | FileError::Gguf { file, .. }
        | FileError::Imatrix { file, .. }
        | FileError::Pytorch { file, .. }
        | FileError::PartOfGguf { file, .. }
        | FileError::TooLong { file, .. }
        | FileError::Json { file, .. }
        | FileError::Index { file, .. }
        | FileError::JsonContent { file, .. } => (Some(file), None),
    }
}

fn of_directory(error: &DirectoryError) -> Location<'_> {
    match error {
        DirectoryError::NoWeights { path, .. } | DirectoryError::Ambiguous { first: path, .. } => {
            (Some(path), None)
        }
        DirectoryError::ShardPath { index, tensor, .. }
        | DirectoryError::MissingShard { index, tensor, .. }
        | DirectoryError::NotInShard { index, tensor, .. }
        | DirectoryError::Duplicate { tensor, first: index, .. } => (Some(index), Some(tensor)),
    }
}

fn of_format(error: &FormatError) -> Location<'_> {
    match error {
        FormatError::Unheld { file, tensor, .. }
        | FormatError::Packed { file, tensor, .. }
        | FormatError::NotConverted { file, tensor, .. }
        | FormatError::NotFinite { file, tensor, .. }
        | FormatError::NotInQ8_0 { file, tensor, .. }
        | FormatError::NotHeld { file, tensor, .. }
        | FormatError::NotExact { file, tensor, .. }
        | FormatError::NotExactBlocks { file, tensor, .. }
        | FormatError::NotSplit { file, tensor, .. }
        | FormatError::Scaled { file, tensor, .. } => (Some(file), Some(tensor)),
        FormatError::NoTensor { path, tensor, .. }
        | FormatError::PartOf { path, tensor, .. }
        | FormatError::NotQuantized { path, tensor, .. } => (Some(path), Some(tensor)),
        FormatError::OtherContainer { path, .. }
        | FormatError::NothingToSplit { path, .. }
        | FormatError::OnlyScaled { path, .. }
        | FormatError::NothingPacked { path, .. }
        | FormatError::Unquantized { path }
        | FormatError::Transformed { file: path, .. } => (Some(path), None),
        FormatError::NotStored { .. } | FormatError::OwnFormat { .. } | FormatError::ScaleLayout { .. } => {
            (None, None)
        }
    }
}

fn of_plan(error: &PlanError) -> Location<'_> {
    match error {
        PlanError::AlreadyQuantized { config: path, .. } | PlanError::NothingToQuantize { path, .. } => {
            (Some(path), None)
        }
        PlanError::FusedDiffer { file, first, .. } => (Some(file), Some(first)),
        PlanError::SomeExperts { file, copied, .. } => (Some(file), Some(copied)),
        PlanError::NotTransformed { tensor, .. } => (None, Some(tensor)),
        PlanError::NoGlobalSearch { .. }
        | PlanError::NothingToCheck { .. }
        | PlanError::Budget { .. }
        | PlanError::NoFormat => (None, None),
    }
}

fn of_given(error: &GivenError) -> Location<'_> {
    match error {
        GivenError::NoGlobalScale { file, tensor, .. }
        | GivenError::GlobalScaleTwice { file, tensor, .. }
        | GivenError::ImportanceTwice { file, tensor, .. }
        | GivenError::ImportanceShape { file, tensor, .. }
        | GivenError::ImportanceNumber { file, tensor, .. }
        | GivenError::Imatrix { file, tensor, .. }
        | GivenError::ImatrixOfOthers { file, tensor, .. } => (Some(file), Some(tensor)),
        GivenError::HessianShape { directory, tensor, .. }
        | GivenError::HessiansOfOthers { directory, tensor } => (Some(directory), Some(tensor)),
        GivenError::NoInputScale { file, tensor, .. } | GivenError::InputScaleTwice { file, tensor, .. } => {
            (Some(file), Some(tensor))
        }
        GivenError::InputScaleFile { file, .. } | GivenError::Incomplete { directory: file, .. } => {
            (Some(file), None)
        }
        GivenError::InputScaleNumber { tensor, .. } | GivenError::InputScaleUnheld { tensor } => {
            (None, Some(tensor))
        }
        GivenError::InputScaleRepeated { file, .. } | GivenError::Open { file, .. } => (Some(file), None),
        GivenError::ImportanceUnused => (None, None),
    }
}

fn of_output(error: &OutputError) -> Location<'_> {
    match error {
        OutputError::Exists { path, .. }
        | OutputError::Kind { path, .. }
        | OutputError::NamedLikeOther { path, .. }
        | OutputError::Parent { path, .. }
        | OutputError::Overlap { input: path, .. }
        | OutputError::Same { first: path, .. }
        | OutputError::NameTooLong { path }
        | OutputError::Lost { file: path, .. }
        | OutputError::NotParts { path, .. } => (Some(path), None),
        OutputError::NameTaken { file, tensor, .. } => (Some(file), Some(tensor)),
    }
}
