//! Writes PyTorch files with any pickle and any storages, in the layout of `torch.save`.
//!
//! They are zip archives of stored entries.

/// Returns the bytes of a file with this pickle, and these storages by key.
pub fn torch_file(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    let mut entries = vec![("x/data.pkl".to_string(), pickle), ("x/byteorder".into(), b"little")];
    entries.extend(storages.iter().map(|(key, bytes)| (format!("x/data/{key}"), *bytes)));
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in &entries {
        let offset = file.len() as u32;
        // Version, flags, method (stored), time, date, checksum (not checked here), both sizes, the
        // lengths of the name and of the extra field.
        let mut facts = [20u16.to_le_bytes(), [0; 2], [0; 2], [0; 2], [0; 2]].concat();
        facts.extend([0; 4]);
        facts.extend((bytes.len() as u32).to_le_bytes());
        facts.extend((bytes.len() as u32).to_le_bytes());
        facts.extend((name.len() as u16).to_le_bytes());
        facts.extend([0; 2]);
        file.extend([&b"PK\x03\x04"[..], &facts, name.as_bytes(), bytes].concat());
        // Comment, disk, internal and external attributes.
        let more = [&[0; 10][..], &offset.to_le_bytes()].concat();
        directory.extend([&b"PK\x01\x02"[..], &20u16.to_le_bytes(), &facts, &more, name.as_bytes()].concat());
    }
    let (count, start) = ((entries.len() as u16).to_le_bytes(), file.len() as u32);
    let end =
        [&[0; 4][..], &count, &count, &(directory.len() as u32).to_le_bytes(), &start.to_le_bytes(), &[0; 2]];
    file.extend(directory);
    file.extend(b"PK\x05\x06");
    file.extend(end.concat());
    file
}

/// A tensor of a pickle: its name, storage class, storage, first element, sizes and strides.
#[derive(Clone, Debug)]
pub struct TorchTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// The class of its storage in the module torch.
    pub class: &'a str,
    /// The key of its storage.
    pub key: &'a str,
    /// Elements before the first one.
    pub offset: i64,
    /// Its sizes.
    pub shape: &'a [i64],
    /// Its strides.
    pub strides: &'a [i64],
}

/// Returns the pickle of a dictionary of tensors, which may be invalid.
pub fn torch_pickle(tensors: &[TorchTensor<'_>]) -> Vec<u8> {
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let int = |value: i64| [&b"\x8a\x08"[..], &value.to_le_bytes()].concat();
    let tuple = |values: &[i64]| {
        [&b"("[..], &values.iter().flat_map(|value| int(*value)).collect::<Vec<_>>(), b"t"].concat()
    };
    let mut pickle = b"\x80\x02}(".to_vec();
    for TorchTensor { name, class, key, offset, shape, strides } in tensors {
        pickle.extend(text(name));
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        pickle.extend(text("storage"));
        pickle.extend(format!("ctorch\n{class}\n").bytes());
        pickle.extend([text(key), text("cpu"), int(1), b"tQ".to_vec(), int(*offset)].concat());
        pickle.extend([tuple(shape), tuple(strides), b"\x89}tR".to_vec()].concat());
    }
    pickle.extend(b"u.");
    pickle
}
