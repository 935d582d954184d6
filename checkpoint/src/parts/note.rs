//! The note beside a finished shard.

use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
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

impl Note {
    pub(crate) fn path(shard: &Path) -> PathBuf {
        shard.with_file_name(with_suffix(shard.file_name().unwrap_or_default(), ".note.json", 0))
    }

    /// The note beside a shard; `None` if there is none, or it is of another version.
    ///
    /// # Errors
    /// [`Error::Io`] if there is one and this user may not read it.
    pub(crate) fn read(shard: &Path) -> Result<Option<Self>> {
        match json::read(&Self::path(shard)) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
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
            let mut file = BufWriter::new(File::create(&unfinished)?);
            serde_json::to_writer(&mut file, self)?;
            file.flush()?;
            file.get_ref().sync_all()?;
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
