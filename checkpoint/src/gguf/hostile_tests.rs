//! Tests with invalid files. Reading one must fail with an error that names the file and the key or
//! tensor, without a panic, and without memory for claimed but missing data.

use std::path::Path;

use super::draft::{Draft, array, entry, string, tensor};
use super::header::read;
use crate::error::Error;
use crate::error::file::FileError;

const F32: u32 = 0;
const Q4_0: u32 = 2;
const U8: u32 = 0;
const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

/// A valid file with two tensors and one entry of every kind that the tests change.
fn good() -> Draft {
    Draft {
        entries: vec![
            entry("general.architecture", STRING, string("llama")),
            entry("tokens", ARRAY, array(STRING, 2, [string("a"), string("bc")].concat())),
            entry("numbers", ARRAY, array(U32, 3, [0; 12])),
            entry("small", U8, [7]),
        ],
        tensors: vec![tensor("a.weight", &[3, 2], F32, 0), tensor("b.weight", &[32], Q4_0, 32)],
        data: vec![0; 32 + 18],
        ..Draft::default()
    }
}

fn refusal(bytes: &[u8]) -> Error {
    read(Path::new("bad.gguf"), bytes).expect_err("a file that lies")
}

/// Checks that reading the file fails with an error that contains `parts`.
#[track_caller]
fn refused(draft: &Draft, parts: &[&str]) {
    let refusal = refusal(&draft.bytes()).to_string();
    for part in ["bad.gguf"].iter().chain(parts) {
        assert!(refusal.contains(part), "{part:?} is not in: {refusal}");
    }
}

/// Checks that a valid file with one more entry is refused.
#[track_caller]
fn refused_entry(entry: Vec<u8>, parts: &[&str]) {
    let mut draft = good();
    draft.entries.push(entry);
    refused(&draft, parts);
}

/// Checks that a file with one tensor is refused, and that the error names the tensor.
#[track_caller]
fn refused_tensor(tensor: Vec<u8>, data: usize, parts: &[&str]) {
    let draft = Draft { tensors: vec![tensor], data: vec![0; data], ..Draft::default() };
    assert!(matches!(refusal(&draft.bytes()), Error::File(FileError::GgufTensor { .. })));
    refused(&draft, parts);
}

#[test]
fn valid_files_are_read() {
    let bytes = good().bytes();
    let header = read(Path::new("good.gguf"), &bytes).unwrap();
    assert_eq!((header.entries.len(), header.tensors.len(), header.alignment), (4, 2, 32));
    assert_eq!((&header.tensors[0].shape[..], &header.tensors[1].shape[..]), (&[2, 3][..], &[32][..]));
    assert_eq!(
        header.tensors[1].range,
        bytes.len() - 18..bytes.len(),
        "the last tensor's padding may be missing"
    );
    assert_eq!(bytes[header.entries[3].raw.clone()], entry("small", U8, [7]));
    let empty = read(Path::new("good.gguf"), &Draft::default().bytes()).unwrap();
    assert!(empty.entries.is_empty() && empty.tensors.is_empty());
    let old = Draft { version: Some(2), ..good() };
    assert_eq!(read(Path::new("good.gguf"), &old.bytes()).unwrap(), header);
}

#[test]
fn every_file_that_is_cut_off_is_refused() {
    let bytes = good().bytes();
    for length in 0..bytes.len() {
        refusal(&bytes[..length]);
    }
    assert!(refusal(&[]).to_string().contains("4 bytes are expected at byte 0"));
    let missing = refusal(&bytes[..bytes.len() - 1]).to_string();
    assert!(missing.contains("tensor b.weight: q4_0 of shape [32] needs 18 bytes at offset 32"), "{missing}");
}

#[test]
fn magic_and_version() {
    refused(&Draft { magic: Some(*b"GGML"), ..good() }, &["starts with \"GGML\""]);
    refused(&Draft { magic: Some([0, b'"', 0xFF, b'\n']), ..good() }, &["starts with \"\\x00\\\"\\xff\\n\""]);
    refused(&Draft { version: Some(1), ..good() }, &["version 1", "convert the model again"]);
    refused(&Draft { version: Some(0), ..good() }, &["version 0"]);
    refused(&Draft { version: Some(4), ..good() }, &["version 4", "2 and 3"]);
    refused(&Draft { version: Some(3u32.swap_bytes()), ..good() }, &["big-endian"]);
}

#[test]
fn counts_that_lie() {
    for count in [u64::MAX, i64::MAX as u64, 1 << 32, 1000] {
        let claim = format!("{count} tensors");
        refused(&Draft { tensor_count: Some(count), ..good() }, &[&claim, "too few"]);
        let claim = format!("{count} entries");
        refused(&Draft { entry_count: Some(count), ..good() }, &[&claim, "too few"]);
    }
    refused(&Draft { tensor_count: Some(3), ..good() }, &["tensor 2: its name is empty"]);
    refused(&Draft { entry_count: Some(3), ..good() }, &["tensor small", "is no type"]);
}

#[test]
fn keys_and_strings() {
    refused_entry(entry("small", U8, [7]), &["metadata key small", "twice"]);
    refused_entry(entry("", U8, [7]), &["metadata entry 4", "name is empty"]);
    refused_entry(entry("a\0", U8, [7]), &["metadata entry 4", "zero byte"]);
    refused_entry([&string(b"\xFF\xFE")[..], &[0; 5]].concat(), &["metadata entry 4", "not UTF-8", "\\xff"]);
    for length in [u64::MAX, i64::MAX as u64, 1 << 40, 1 << 12] {
        let claim = format!("{length} bytes are expected");
        let claimed = length.to_le_bytes();
        refused_entry([&claimed[..], &[b'k'; 64]].concat(), &["metadata entry 4", &claim]);
        refused_entry(entry("text", STRING, claimed), &["metadata key text", &claim]);
        refused_entry(entry("texts", ARRAY, array(STRING, 1, claimed)), &["metadata key texts", &claim]);
    }
    refused_entry(
        entry(&"k".repeat(1 << 16), U8, [7]),
        &["metadata entry 4", "65536 bytes, more than the 65535"],
    );
    let template = vec![b'x'; (64 << 20) + 1];
    refused_entry(
        entry("template", STRING, string(&template)),
        &["key template", "67108865", "67108864 allowed"],
    );
    refused_entry(string(&template), &["entry 4", "67108865"]);
}

#[test]
fn values_and_arrays() {
    for kind in [13, 255, u32::MAX] {
        refused_entry(entry("odd", kind, [0; 8]), &["metadata key odd", &format!("{kind} is no type")]);
        refused_entry(entry("odd", ARRAY, array(kind, 1, [0; 8])), &["metadata key odd", "is no type"]);
    }
    let inner = array(U8, 1, [0]);
    refused_entry(
        entry("nested", ARRAY, array(ARRAY, 1, inner)),
        &["metadata key nested", "array of arrays"],
    );
    for count in [u64::MAX, 1 << 61, (1 << 30) + 1] {
        let claim = format!("{count} elements");
        for of in [U8, U32, U64, STRING] {
            refused_entry(entry("long", ARRAY, array(of, count, [])), &["metadata key long", &claim]);
        }
    }
    for of in [U8, U32, U64] {
        refused_entry(
            entry("short", ARRAY, array(of, 1 << 30, [0; 64])),
            &["metadata key short", "bytes are expected"],
        );
    }
    refused_entry(
        entry("short", ARRAY, array(STRING, 1 << 30, [0; 64])),
        &["metadata key short", "bytes are expected"],
    );
}

#[test]
fn alignments() {
    for alignment in [0u32, 3, 48, 1 << 21, 1 << 31, u32::MAX] {
        let parts =
            ["metadata key general.alignment", &format!("{alignment} is no power of two up to 1048576")];
        refused_entry(entry("general.alignment", U32, alignment.to_le_bytes()), &parts);
    }
    refused_entry(
        entry("general.alignment", U64, 32u64.to_le_bytes()),
        &["general.alignment", "of type u64"],
    );
    refused_entry(entry("general.alignment", STRING, string("32")), &["general.alignment", "of type str"]);
    let page = Draft {
        entries: vec![entry("general.alignment", U32, 4096u32.to_le_bytes())],
        tensors: vec![tensor("a", &[1], F32, 0), tensor("b", &[1], F32, 4096)],
        alignment: Some(4096),
        data: vec![0; 4096 + 4],
        ..Draft::default()
    };
    assert_eq!(read(Path::new("good.gguf"), &page.bytes()).unwrap().tensors[1].range, 8192..8196);
    refused(
        &Draft { tensors: vec![tensor("a", &[1], F32, 32)], ..page },
        &["tensor a", "multiple of the alignment, 4096"],
    );
}

#[test]
fn names_of_tensors() {
    let mut draft = good();
    draft.tensors.push(tensor("a.weight", &[1], F32, 64));
    refused(&draft, &["tensor a.weight", "described twice"]);
    let long = "n".repeat(64);
    refused_tensor(tensor(&long, &[1], F32, 0), 4, &["tensor nnn", "has 64 bytes", "more than 63"]);
    let named =
        Draft { tensors: vec![tensor(&long[1..], &[1], F32, 0)], data: vec![0; 4], ..Draft::default() };
    assert!(read(Path::new("good.gguf"), &named.bytes()).is_ok());
    for (name, why) in [(&b""[..], "empty"), (b"a\0", "zero byte"), (b"a\xFF", "not UTF-8")] {
        let draft =
            Draft { tensors: vec![tensor(name, &[1], F32, 0)], data: vec![0; 64], ..Draft::default() };
        refused(&draft, &["tensor 0", why]);
    }
}

#[test]
fn shapes_and_types() {
    refused_tensor(tensor("a", &[1; 5], F32, 0), 64, &["tensor a", "5 dimensions"]);
    let mut many = tensor("a", &[], F32, 0);
    many[9..13].copy_from_slice(&u32::MAX.to_le_bytes());
    refused_tensor(many, 64, &["tensor a", "4294967295 dimensions"]);
    for size in [u64::MAX, 1 << 63] {
        refused_tensor(tensor("a", &[size], F32, 0), 64, &["tensor a", &format!("a size of {size}")]);
        refused_tensor(tensor("a", &[size, 0], F32, 0), 64, &["tensor a", &format!("a size of {size}")]);
    }
    let half = 1 << 32;
    refused_tensor(
        tensor("a", &[half, half], F32, 0),
        64,
        &["tensor a", "more elements than can be counted"],
    );
    // The shape has no elements, but the product of its sizes overflows on the way.
    for sizes in [[half, half, 0], [0, half, half], [half, 0, half]] {
        refused_tensor(tensor("a", &sizes, F32, 0), 64, &["tensor a", "more elements than can be counted"]);
    }
    refused_tensor(
        tensor("a", &[half / 4, half, 1], F32, 0),
        64,
        &["tensor a", "more bytes than can be counted"],
    );
    refused_tensor(tensor("a", &[i64::MAX as u64], U8 + 24, 0), 64, &["tensor a", "more elements"]);
    for kind in [4, 5, 31, 33, 36, 38, 43, 1000, u32::MAX] {
        refused_tensor(
            tensor("a", &[32], kind, 0),
            64,
            &["tensor a", &format!("ggml type {kind} is no type")],
        );
    }
    refused_tensor(tensor("a", &[48], Q4_0, 0), 64, &["tensor a", "rows of 48 elements", "blocks of 32"]);
    refused_tensor(
        tensor("a", &[32, 64], 40, 0),
        4096,
        &["tensor a", "rows of 32 elements", "blocks of 64", "nvfp4"],
    );
    refused_tensor(tensor("a", &[], 39, 0), 64, &["tensor a", "rows of 1 elements"]);
}

#[test]
fn offsets_and_sizes() {
    let two = |first, second, data| Draft {
        tensors: vec![tensor("a", &[3], F32, first), tensor("b", &[8], F32, second)],
        data: vec![0; data],
        ..Draft::default()
    };
    assert!(read(Path::new("good.gguf"), &two(0, 32, 64).bytes()).is_ok());
    refused(&two(0, 0, 64), &["tensor b", "offset 0, inside the tensors before it, which end at 32"]);
    refused(&two(0, 64, 128), &["tensor b", "offset 64, 32 bytes too late"]);
    refused(&two(0, 12, 128), &["tensor b", "offset 12", "no multiple of the alignment, 32"]);
    refused(&two(32, 0, 128), &["tensor a", "offset 32, 32 bytes too late"]);
    refused(&two(0, u64::MAX - 31, 128), &["tensor b", "too late"]);
    refused(&two(0, 32, 63), &["tensor b", "needs 32 bytes at offset 32", "only 63 bytes of data"]);
    refused(&two(0, 32, 11), &["tensor a", "needs 12 bytes at offset 0", "only 11 bytes of data"]);
    // A shape larger than the data: bytes past the end of the file must not become weights.
    refused_tensor(tensor("a", &[1 << 20, 1 << 20], F32, 0), 64, &["tensor a", "needs 4398046511104 bytes"]);
    // Sums that would wrap.
    let large = |name: &str, offset| tensor(name, &[1 << 60], 27, offset);
    refused_tensor(large("a", 0), 64, &["tensor a", "needs 9223372036854775808 bytes"]);
    let wraps =
        Draft { tensors: vec![large("a", 0), large("b", 1 << 63), large("c", 0)], ..Draft::default() };
    refused(&wraps, &["tensor a", "needs"]);
    // A data section that would start after the end of the file.
    let mut bytes = Draft { tensors: vec![tensor("none", &[0], F32, 0)], ..Draft::default() }.bytes();
    assert!(read(Path::new("good.gguf"), &bytes).is_ok());
    bytes.pop();
    assert!(refusal(&bytes).to_string().contains("tensor none: f32 of shape [0] needs 0 bytes"));
}

#[test]
fn names_and_keys_by_the_hundred_thousand_take_no_square_of_time() {
    let count = 200_000u64;
    let entries = (0..count).map(|i| entry(&format!("key.{i}"), U8, [0])).collect();
    let tensors = (0..count).map(|i| tensor(format!("t.{i}"), &[0], F32, 0)).collect();
    let bytes = Draft { entries, tensors, ..Draft::default() }.bytes();
    let start = std::time::Instant::now();
    let header = read(Path::new("good.gguf"), &bytes).unwrap();
    assert_eq!((header.entries.len(), header.tensors.len()), (200_000, 200_000));
    // Quadratic time would need 4·10^10 comparisons.
    assert!(start.elapsed().as_secs() < 5);
}

/// Overwrites random bytes: reading must either fail or return ranges inside the file.
#[test]
fn mutations_never_panic_and_never_leave_the_file() {
    let bytes = good().bytes();
    let mut random = fastrand::Rng::with_seed(0x6775_6667);
    let mut accepted = 0;
    for round in 0..200_000 {
        let mut mutated = bytes.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..mutated.len());
            mutated[at] = match random.u8(..4) {
                0 => random.u8(..),
                1 => mutated[at] ^ 1 << random.u8(..8),
                2 => [0, 1, 0x7F, 0x80, 0xFF][random.usize(..5)],
                _ => mutated[random.usize(..mutated.len())],
            };
        }
        if round % 4 == 0 {
            mutated.truncate(random.usize(..mutated.len()));
        }
        if let Ok(header) = read(Path::new("bad.gguf"), &mutated) {
            accepted += 1;
            let mut end = 0;
            for tensor in &header.tensors {
                assert!(end <= tensor.range.start && tensor.range.end <= mutated.len());
                assert_eq!(tensor.kind.bytes_of(&tensor.shape), Ok(tensor.range.len() as u64));
                end = tensor.range.end;
            }
            assert!(header.entries.iter().all(|entry| entry.raw.end <= mutated.len()));
        }
    }
    assert!(accepted > 1000, "only {accepted} of the files were read: mutations change too much");
}
