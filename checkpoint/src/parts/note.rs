//! The note of a finished shard: a JSON object that starts with the checksum of its other members.

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

/// The note of a shard.
#[derive(Serialize, Deserialize)]
pub(crate) struct Note {
    /// A hash of everything that determines the output's bytes.
    pub(crate) fingerprint: String,
    pub(crate) bytes: u64,
    pub(crate) checksum: String,
    /// The names of the tensors that replaced each input tensor.
    pub(crate) names: Vec<(String, Vec<String>)>,
    pub(crate) tensor_bytes: u64,
    /// True if tensors with all experts of a layer were split.
    #[serde(default)]
    pub(crate) experts_split: bool,
    pub(crate) tensors: Vec<Value>,
    pub(crate) config: Option<Map<String, Value>>,
    pub(crate) hf_quant_config: Option<Map<String, Value>>,
}

/// The text before and after the note's own checksum.
const SEAL: (&str, &str) = (r#"{"note_checksum":""#, r#"","#);
/// The number of hexadecimal digits in a checksum.
const DIGITS: usize = 32;

/// Inserts the checksum of an object's text before its first member.
fn seal(object: &[u8]) -> Vec<u8> {
    let members = object.strip_prefix(b"{").unwrap_or(object);
    let mut sealed = format!("{}{:032x}{}", SEAL.0, xxh3_128(members), SEAL.1).into_bytes();
    sealed.extend(members);
    sealed
}

/// Returns whether the text of an object matches its checksum.
fn is_sealed(text: &[u8]) -> bool {
    let digits = text.strip_prefix(SEAL.0.as_bytes()).and_then(|rest| rest.split_at_checked(DIGITS));
    let members = digits.and_then(|(digits, rest)| Some((digits, rest.strip_prefix(SEAL.1.as_bytes())?)));
    members.is_some_and(|(digits, members)| format!("{:032x}", xxh3_128(members)).as_bytes() == digits)
}

impl Note {
    pub(crate) fn path(shard: &Path) -> PathBuf {
        shard.with_file_name(with_suffix(shard.file_name().unwrap_or_default(), ".note.json", 0))
    }

    /// Reads the note of a shard. Returns `None` if it is missing, damaged or from another version.
    ///
    /// # Errors
    /// [`Error::Io`] if the user may not read the note.
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

    /// Returns whether a file may be the shard of this note, by its size.
    pub(crate) fn may_fit(&self, shard: &Path) -> bool {
        let length = fs::metadata(shard).ok().filter(|file| file.is_file()).map(|file| file.len());
        length == Some(self.bytes) && self.tensor_bytes <= self.bytes
    }

    /// Returns whether a file is the shard of this note, by its size and checksum.
    pub(crate) fn fits(&self, shard: &Path) -> bool {
        self.may_fit(shard) && checksum(shard).is_ok_and(|(_, checksum)| checksum == self.checksum)
    }

    /// Writes the note next to the shard. It is written in `making`, a directory on the same file
    /// system, and renamed when it is complete.
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

/// The length and the checksum of a file.
pub(crate) fn checksum(path: &Path) -> std::io::Result<(u64, String)> {
    let file = File::open(path)?;
    // SAFETY: the map covers the whole file, is read-only, and lives until this function returns.
    // Its bytes are only read as `u8`. No process changes a finished shard: it is renamed into
    // place, and a run that makes it again writes a new file.
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
