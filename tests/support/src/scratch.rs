//! Scratch directories for tests: writes files and checkpoints, and compares contents.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tensor for a file: name, dtype, shape, bytes.
pub type TensorData = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// A directory that is removed at the end of the test.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Makes an empty directory.
    ///
    /// # Panics
    /// Panics if it cannot be created. The other functions here panic too if they fail.
    #[expect(clippy::new_without_default, reason = "it touches the disk")]
    pub fn new() -> Self {
        Self(TempDir::with_prefix("microscale-test-").unwrap())
    }

    /// Returns a path in the directory.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, and creates its parent directories.
    pub fn write(&self, name: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Writes a safetensors file with the format's reference library.
    pub fn write_tensors(&self, name: impl AsRef<Path>, tensors: &[TensorData]) -> PathBuf {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        self.write(name, safetensors::serialize(views, None).unwrap())
    }

    /// Writes an index that assigns tensors to shards.
    pub fn write_index(&self, directory: &str, entries: &[(&str, &str)]) -> PathBuf {
        let map: serde_json::Map<String, Value> =
            entries.iter().map(|(tensor, shard)| (tensor.to_string(), json!(shard))).collect();
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
        self.write(Path::new(directory).join("model.safetensors.index.json"), index.to_string())
    }

    /// Returns every file and directory, hidden ones included, with the files' contents.
    ///
    /// Comparing two results shows whether anything changed. Symlinks have the contents of their
    /// targets. Other file types are not opened.
    pub fn contents(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let (mut found, mut open) = (BTreeMap::new(), vec![self.0.path().to_path_buf()]);
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let kind = fs::symlink_metadata(&path).unwrap().file_type();
                let contents = if kind.is_symlink() {
                    Some(fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes())
                } else if kind.is_file() {
                    Some(fs::read(&path).unwrap_or_default())
                } else {
                    None
                };
                if kind.is_dir() {
                    open.push(path.clone());
                }
                found.insert(path, contents);
            }
        }
        found
    }
}

/// Returns the bytes of a safetensors file with any header, valid or not, and any data.
pub fn raw_file(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Returns a header with tensors as (name, dtype, shape, start, end). Numbers are JSON text.
pub fn header(tensors: &[(&str, &str, &str, &str, &str)]) -> String {
    let entries = tensors.iter().map(|(name, dtype, shape, start, end)| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    });
    format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
}

/// Makes a pipe without a writer on systems that have pipes.
///
/// # Panics
/// Panics if it cannot be made.
pub fn make_pipe(path: &Path) {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, Mode, mkfifoat};
        mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
    }
    #[cfg(not(target_os = "linux"))]
    let _ = path;
}
