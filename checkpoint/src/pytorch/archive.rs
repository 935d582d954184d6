//! A zip archive from `torch.save`: its entries, and the ranges of their bytes.

use std::collections::HashMap;
use std::io::Cursor;
use std::ops::Range;

use zip::{CompressionMethod, ZipArchive};

use super::Parsed;
use crate::limits::check_tensors;

/// The first bytes of a zip archive.
pub(crate) const MAGIC: &[u8] = b"PK\x03\x04";

const PICKLE: &str = "data.pkl";

/// The entries of an archive.
pub(super) struct Archive<'a> {
    bytes: &'a [u8],
    /// The ranges of the entries' bytes, by name without the archive's top-level folder.
    entries: HashMap<String, Range<usize>>,
}

impl<'a> Archive<'a> {
    /// Finds the entries of a file.
    pub(super) fn open(bytes: &'a [u8]) -> Parsed<Self> {
        let damaged = |error: zip::result::ZipError| format!("its zip archive is damaged: {error}");
        let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(damaged)?;
        check_tensors(archive.len())?;
        let mut all = Vec::with_capacity(archive.len());
        for index in 0..archive.len() {
            let entry = archive.by_index_raw(index).map_err(damaged)?;
            let name = entry.name().map_err(damaged)?.into_owned();
            let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
            let range =
                start.and_then(|start| Some(start..start.checked_add(usize::try_from(entry.size()).ok()?)?));
            let range = range.filter(|range| bytes.get(range.clone()).is_some());
            let range = range.ok_or_else(|| format!("its zip entry {name:?} ends beyond the file"))?;
            let stored = entry.compression() == CompressionMethod::Stored && !entry.encrypted();
            all.push((name, range, stored));
        }
        let pickle =
            all.iter().find_map(|(name, ..)| name.split_once('/').filter(|(_, entry)| *entry == PICKLE));
        let Some((folder, _)) = pickle else {
            return Err("it is a zip archive without the data.pkl of torch.save".into());
        };
        let folder = format!("{folder}/");
        let mut entries = HashMap::new();
        for (name, range, stored) in &all {
            let Some(name) = name.strip_prefix(&folder) else { continue };
            if !stored {
                return Err(format!(
                    "its zip entry {name:?} is compressed or encrypted, which torch.save never does"
                ));
            }
            entries.insert(name.to_string(), range.clone());
        }
        if entries.contains_key("constants.pkl") {
            return Err("it is a TorchScript program and not a dictionary of tensors".into());
        }
        let archive = Self { bytes, entries };
        match archive.entry("byteorder") {
            Some(order) if order != b"little" => Err("its numbers are not little-endian".into()),
            _ => Ok(archive),
        }
    }

    fn entry(&self, name: &str) -> Option<&'a [u8]> {
        self.bytes.get(self.entries.get(name)?.clone())
    }

    /// The pickle.
    pub(super) fn pickle(&self) -> &'a [u8] {
        self.entry(PICKLE).unwrap_or_default()
    }

    /// The range of a storage's bytes in the file.
    pub(super) fn storage(&self, key: &str) -> Parsed<Range<usize>> {
        let found = self.entries.get(&format!("data/{key}")).cloned();
        found.ok_or_else(|| format!("its storage, data/{key}, is missing"))
    }
}
