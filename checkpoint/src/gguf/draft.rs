//! Builds files for tests part by part, so that any part can be wrong.

/// The parts of a file. The counts follow from the parts unless they are set.
#[derive(Clone, Default)]
pub(super) struct Draft {
    pub(super) magic: Option<[u8; 4]>,
    pub(super) version: Option<u32>,
    pub(super) tensor_count: Option<u64>,
    pub(super) entry_count: Option<u64>,
    pub(super) entries: Vec<Vec<u8>>,
    pub(super) tensors: Vec<Vec<u8>>,
    pub(super) alignment: Option<usize>,
    pub(super) data: Vec<u8>,
}

impl Draft {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.unwrap_or(*b"GGUF").to_vec();
        bytes.extend(self.version.unwrap_or(3).to_le_bytes());
        bytes.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.entry_count.unwrap_or(self.entries.len() as u64).to_le_bytes());
        bytes.extend(self.entries.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment.unwrap_or(32)), 0);
        bytes.extend(&self.data);
        bytes
    }
}

/// A string with its length.
pub(super) fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    [&(text.as_ref().len() as u64).to_le_bytes(), text.as_ref()].concat()
}

/// A metadata entry with the given bytes as its value.
pub(super) fn entry(key: &str, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    [&string(key)[..], &kind.to_le_bytes(), value.as_ref()].concat()
}

/// An array value with the given bytes as its elements.
pub(super) fn array(of: u32, count: u64, elements: impl AsRef<[u8]>) -> Vec<u8> {
    [&of.to_le_bytes()[..], &count.to_le_bytes(), elements.as_ref()].concat()
}

/// A tensor's description, with sizes fastest first.
pub(super) fn tensor(name: impl AsRef<[u8]>, ne: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = [&string(name)[..], &(ne.len() as u32).to_le_bytes()].concat();
    ne.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}
