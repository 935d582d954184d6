//! The note of a finished shard: one JSON object, which begins with the checksum of the rest of its text.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result};
use crate::read::json;
use crate::write::file_name::with_suffix;

/// The note that is kept beside a shard.
#[derive(Serialize, Deserialize)]
pub(crate) struct Note {
    /// A hash of everything that decides the bytes of the output.
    pub(crate) fingerprint: String,
    pub(crate) bytes: u64,
    pub(crate) checksum: String,
    /// The names that took each tensor's place.
    pub(crate) names: Vec<(String, Vec<String>)>,
    pub(crate) tensor_bytes: u64,
    /// True if experts that lie in one tensor were split.
    #[serde(default)]
    pub(crate) experts_split: bool,
    pub(crate) tensors: Vec<Value>,
    pub(crate) config: Option<Map<String, Value>>,
    pub(crate) hf_quant_config: Option<Map<String, Value>>,
}

/// The text before and after a note's own checksum.
const SEAL: (&str, &str) = (r#"{"note_checksum":""#, r#"","#);
/// The hexadecimal digits of a checksum.
const DIGITS: usize = 32;

/// Puts the checksum of an object's text in front of its first member.
fn seal(object: &[u8]) -> Vec<u8> {
    let members = object.strip_prefix(b"{").unwrap_or(object);
    let mut sealed = format!("{}{:032x}{}", SEAL.0, xxh3_128(members), SEAL.1).into_bytes();
    sealed.extend(members);
    sealed
}

/// Returns whether an object's text is the one that was sealed.
fn is_sealed(text: &[u8]) -> bool {
    let digits = text.strip_prefix(SEAL.0.as_bytes()).and_then(|rest| rest.split_at_checked(DIGITS));
    let members = digits.and_then(|(digits, rest)| Some((digits, rest.strip_prefix(SEAL.1.as_bytes())?)));
    members.is_some_and(|(digits, members)| format!("{:032x}", xxh3_128(members)).as_bytes() == digits)
}

impl Note {
    pub(crate) fn path(shard: &Path) -> PathBuf {
        shard.with_file_name(with_suffix(shard.file_name().unwrap_or_default(), ".note.json", 0))
    }

    /// Reads the note of a shard. `None` if there is none, if it was changed, or if another version wrote it.
    ///
    /// # Errors
    /// [`Error::Io`] if there is one and this user may not read it.
    pub(crate) fn read(shard: &Path) -> Result<Option<Self>> {
        match json::read(&Self::path(shard)) {
            Ok(bytes) if is_sealed(&bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Ok(_) => Ok(None),
            Err(Error::Io { doing, path, source }) if source.kind() == ErrorKind::PermissionDenied => {
                Err(Error::Io { doing, path, source })
            }
            Err(_) => Ok(None),
        }
    }

    /// Returns whether a file can be the shard that the note describes, without reading it.
    pub(crate) fn may_fit(&self, shard: &Path) -> bool {
        let length = fs::metadata(shard).ok().filter(|file| file.is_file()).map(|file| file.len());
        length == Some(self.bytes) && self.tensor_bytes <= self.bytes
    }

    /// Returns whether a file is the shard that the note describes, and can hold as many tensors as it says.
    pub(crate) fn fits(&self, shard: &Path) -> bool {
        self.may_fit(shard) && checksum(shard).is_ok_and(|(_, checksum)| checksum == self.checksum)
    }

    /// Puts the note beside a shard. It is written in another directory of the same file system, and appears
    /// when it is complete.
    pub(crate) fn write(&self, shard: &Path, making: &Path) -> Result<()> {
        let (path, unfinished) = (Self::path(shard), making.join("note"));
        let write = || {
            let mut file = File::create(&unfinished)?;
            file.write_all(&seal(&serde_json::to_vec(self)?))?;
            file.sync_all()?;
            drop(file);
            fs::rename(&unfinished, &path)
        };
        write().map_err(Error::io("write", &path))
    }
}

/// A file's length and checksum.
pub(crate) fn checksum(path: &Path) -> std::io::Result<(u64, String)> {
    let file = File::open(path)?;
    // SAFETY: the map is private and read-only and only read as bytes. Nobody changes a finished shard: it is
    // renamed into its place, and whoever makes it again makes another file.
    let map = unsafe { Mmap::map(&file) }?;
    Ok((map.len() as u64, format!("{:032x}", xxh3_128(&map))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_with_any_byte_changed_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let shard = directory.path().join("x.safetensors");
        let note = Note {
            fingerprint: "f".into(),
            bytes: 7,
            checksum: "c".into(),
            names: vec![("a".into(), vec!["b".into()])],
            tensor_bytes: 5,
            experts_split: false,
            tensors: vec![Value::from(0.1)],
            config: Some(Map::from_iter([("rope_theta".into(), Value::from(1e-5))])),
            hf_quant_config: None,
        };
        note.write(&shard, directory.path()).unwrap();
        let read = || Note::read(&shard).unwrap();
        assert_eq!(read().unwrap().config, note.config);
        let honest = fs::read(Note::path(&shard)).unwrap();
        assert!(serde_json::from_slice::<Value>(&honest).unwrap()["note_checksum"].is_string());
        for place in 0..honest.len() {
            let mut changed = honest.clone();
            changed[place] ^= 1;
            fs::write(Note::path(&shard), &changed).unwrap();
            assert!(read().is_none(), "byte {place}");
            fs::write(Note::path(&shard), &honest[..place]).unwrap();
            assert!(read().is_none(), "cut at {place}");
        }
        fs::write(Note::path(&shard), serde_json::to_vec(&note).unwrap()).unwrap();
        assert!(read().is_none(), "a note without a checksum");
    }
}
