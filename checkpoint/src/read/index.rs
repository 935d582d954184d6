//! The index of a checkpoint with several files, `model.safetensors.index.json`: the shard of each
//! tensor.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::directory::DirectoryError;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::{check_name, check_tensors};

/// The name of the index in Hugging Face libraries.
const NAME: &str = "model.safetensors.index.json";
const SUFFIX: &str = ".safetensors.index.json";
/// The suffix of the index of PyTorch files.
const PICKLED_SUFFIX: &str = ".bin.index.json";

/// The files of a whole model that transformers saves.
pub(crate) const WHOLE: &str = "model.safetensors";
pub(crate) const WHOLE_PICKLE: &str = "pytorch_model.bin";

/// An index: the file's JSON, checked as far as possible without the shards.
pub(crate) struct Index {
    /// The file.
    pub(crate) file: PathBuf,
    json: Map<String, Value>,
    /// The first path with other components than names, such as `./a`, as the file has it. Entries
    /// have `a` instead.
    pub(crate) respelled: Option<String>,
}

/// The path of a shard without components such as `.`; `None` for paths that may lead out of the
/// directory.
fn inside(shard: &str) -> Option<String> {
    let mut names = Vec::new();
    for component in Path::new(shard).components() {
        match component {
            Component::Normal(name) => names.push(name.to_str()?),
            Component::CurDir => {}
            _ => return None,
        }
    }
    (!names.is_empty() && !shard.contains('\0')).then(|| names.join("/"))
}

impl Index {
    /// Finds the index among a directory's files.
    ///
    /// # Errors
    /// [`DirectoryError::Ambiguous`](crate::DirectoryError::Ambiguous) if there are several and
    /// none has the usual name, and the errors of reading it.
    pub(crate) fn find(files: &[PathBuf]) -> Result<Option<Self>> {
        let ends =
            |file: &Path, end| file.file_name().is_some_and(|name| name.to_string_lossy().ends_with(end));
        // safetensors and GGUF weights take precedence over PyTorch files.
        let pickled = !files.iter().any(|file| {
            ends(file, SUFFIX)
                || file.extension().is_some_and(|found| found == "safetensors" || found == "gguf")
        });
        let is_index = |file: &&PathBuf| ends(file, if pickled { PICKLED_SUFFIX } else { SUFFIX });
        let usual = files.iter().find(|file| file.file_name().is_some_and(|name| name == NAME));
        let mut found = files.iter().filter(is_index);
        match (usual, found.next(), found.next()) {
            (Some(file), ..) | (None, Some(file), None) => Self::read(file).map(Some),
            (None, Some(first), Some(second)) => Err(Error::Directory(DirectoryError::Ambiguous {
                first: first.clone(),
                second: second.clone(),
            })),
            (None, None, _) => Ok(None),
        }
    }

    fn read(file: &Path) -> Result<Self> {
        let mut json = super::json::Object::read(file)?.json;
        let entries = json.get_mut("weight_map").and_then(Value::as_object_mut);
        let Some(entries) = entries.filter(|entries| entries.values().all(Value::is_string)) else {
            let why = "\"weight_map\" must be an object that names a file for each tensor; correct the index";
            return Err(Error::File(FileError::JsonContent { file: file.into(), why }));
        };
        let too_many = |why| Error::File(FileError::Index { file: file.into(), why });
        check_tensors(entries.len()).map_err(too_many)?;
        let mut respelled = None;
        for (tensor, shard) in entries {
            let Value::String(shard) = shard else { continue };
            check_name(tensor).and_then(|()| check_name(shard)).map_err(too_many)?;
            let Some(plain) = inside(shard) else {
                let (index, tensor, shard) = (file.into(), tensor.into(), shard.clone());
                return Err(Error::Directory(DirectoryError::ShardPath { index, tensor, shard }));
            };
            if *shard != plain {
                respelled = respelled.or(Some(std::mem::replace(shard, plain)));
            }
        }
        Ok(Self { file: file.into(), json, respelled })
    }

    /// The file that transformers prefers to this index, without shards: `model.safetensors` or
    /// `pytorch_model.bin`.
    pub(crate) fn whole_file(&self) -> &'static str {
        if self.file.to_string_lossy().ends_with(PICKLED_SUFFIX) { WHOLE_PICKLE } else { WHOLE }
    }

    /// Each tensor with its shard, in the file's order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        let entries = self.json.get("weight_map").and_then(Value::as_object).into_iter().flatten();
        entries.map(|(tensor, shard)| (tensor.as_str(), shard.as_str().unwrap_or_default()))
    }

    /// The shards, sorted and without duplicates, each with one of its tensors.
    pub(crate) fn shards(&self) -> Vec<(&str, &str)> {
        let shards: BTreeMap<_, _> = self.entries().map(|(tensor, shard)| (shard, tensor)).collect();
        shards.into_iter().collect()
    }

    /// The name of the output's index. PyTorch files become safetensors.
    pub(crate) fn written_name(&self) -> String {
        let name = self.file.file_name().unwrap_or_default().to_string_lossy();
        match name.strip_suffix(PICKLED_SUFFIX) {
            None => name.into_owned(),
            Some(model) => format!("{}{SUFFIX}", model.strip_prefix("pytorch_").unwrap_or(model)),
        }
    }

    /// Replaces tensors by several tensors in the same files.
    pub(crate) fn replace(&mut self, names: &HashMap<String, Vec<String>>) {
        let Some(Value::Object(entries)) = self.json.get_mut("weight_map") else { return };
        for (name, file) in std::mem::take(entries) {
            match names.get(&name) {
                Some(several) => entries.extend(several.iter().map(|name| (name.clone(), file.clone()))),
                None => _ = entries.insert(name, file),
            }
        }
    }

    /// The index of the output: tensors are replaced according to `names`, and shards according to
    /// `shards`.
    pub(crate) fn rewritten(
        &self,
        names: &HashMap<String, Vec<String>>,
        shards: &HashMap<String, String>,
        total_size: u64,
    ) -> Map<String, Value> {
        let mut entries = Map::new();
        for (tensor, shard) in self.entries() {
            for name in names.get(tensor).into_iter().flatten() {
                let written = shards.get(shard).map_or(shard, String::as_str);
                entries.insert(name.clone(), written.into());
            }
        }
        let mut json = self.json.clone();
        json.insert("weight_map".into(), entries.into());
        let metadata = json.entry("metadata").or_insert_with(|| Map::new().into());
        if let Value::Object(metadata) = metadata {
            metadata.insert("total_size".into(), total_size.into());
        }
        json
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rewritten_index_keeps_order_and_metadata() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(NAME);
        let text =
            r#"{"metadata": {"total_size": 1, "by": "x"}, "weight_map": {"b": "2", "a": "1", "c": "2"}}"#;
        std::fs::write(&file, text).unwrap();
        let index = Index::find(&[directory.path().join("config.json"), file]).unwrap().unwrap();
        assert_eq!(index.shards(), [("1", "a"), ("2", "c")]);
        let names = |new: &[&str]| new.iter().map(|name| name.to_string()).collect();
        let new = HashMap::from([("a", &["a_packed", "a_scale"][..]), ("b", &["b"]), ("c", &[])]);
        let new = new.into_iter().map(|(name, new)| (name.to_string(), names(new))).collect();
        assert_eq!(
            Value::Object(index.rewritten(&new, &HashMap::new(), 77)).to_string(),
            r#"{"metadata":{"total_size":77,"by":"x"},"weight_map":{"b":"2","a_packed":"1","a_scale":"1"}}"#
        );
    }

    #[test]
    fn of_several_indexes_the_usual_name_wins() {
        let directory = tempfile::tempdir().unwrap();
        let files = [NAME, "x.safetensors.index.json", "y.safetensors.index.json"];
        let files = files.map(|name| directory.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, r#"{"weight_map": {}}"#).unwrap());
        assert_eq!(Index::find(&files).unwrap().unwrap().file, files[0]);
        assert_eq!(Index::find(&files[2..]).unwrap().unwrap().file, files[2]);
        assert!(matches!(Index::find(&files[1..]), Err(Error::Directory(DirectoryError::Ambiguous { .. }))));
        assert!(Index::find(&[]).unwrap().is_none());
    }
}
