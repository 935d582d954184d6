//! The importance matrices that llama.cpp wrote before it used GGUF for them (`.dat`).
//!
//! An entry has, for each column of a weight, the mean square of the activations times the number
//! of chunks.
//!
//! | bytes | content |
//! |---|---|
//! | i32 | the number of entries, followed by the entries: |
//! | i32, that many bytes | the weight's name |
//! | i32 | the number of chunks |
//! | i32, that many f32 | one number per column, expert by expert |
//!
//! A number of chunks and the name of a text may follow, and are ignored. The format has no magic.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use super::cursor::Cursor;
use super::format::Parsed;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::{NAME_BYTES, check_name, check_tensors};

/// Name suffixes in a GGUF importance matrix: sums of squared activations, and the counts of the
/// sums.
pub(crate) const SUMS: &str = ".in_sum2";
pub(crate) const COUNTS: &str = ".counts";

/// The smallest entry in bytes: a one-character name, chunks, one number.
const MIN_ENTRY: usize = 4 + 1 + 4 + 4 + 4;

/// The entry of a weight, as ranges in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ImatrixEntry {
    /// The name of the weight.
    pub(crate) name: String,
    /// The number of chunks, an i32.
    pub(crate) chunks: Range<usize>,
    /// The numbers, f32.
    pub(crate) sums: Range<usize>,
}

/// Returns whether bytes begin like an importance matrix: with a number of entries and a name.
///
/// No safetensors file does, because its header would have gigabytes, and no archive does.
pub(crate) fn is_imatrix(bytes: &[u8]) -> bool {
    let mut cursor = Cursor::new(bytes);
    let (entries, length) = (cursor.u32().unwrap_or(0), cursor.u32().unwrap_or(0) as usize);
    let named = cursor.take(length as u64).is_ok_and(|name| !name.iter().any(u8::is_ascii_control));
    let plausible = check_tensors(entries as usize).is_ok() && (1..=NAME_BYTES).contains(&length);
    entries > 0 && plausible && named
}

/// Reads the entries of a file's bytes in the file's order.
///
/// Every range is inside the file. Memory and time are at most proportional to the bytes that are
/// really there.
///
/// # Errors
/// [`FileError::Imatrix`](crate::FileError::Imatrix) if the file is invalid.
pub(crate) fn read(file: &Path, bytes: &[u8]) -> Result<Vec<ImatrixEntry>> {
    parse(bytes).map_err(|why| Error::File(FileError::Imatrix { file: file.into(), why }))
}

fn parse(bytes: &[u8]) -> Parsed<Vec<ImatrixEntry>> {
    let mut cursor = Cursor::new(bytes);
    let count = number(&mut cursor, "a number of entries", 1)?;
    if count.saturating_mul(MIN_ENTRY) as u64 > cursor.left() {
        let left = cursor.left();
        return Err(format!("it claims {count} entries, for which the {left} bytes that follow are too few"));
    }
    check_tensors(count)?;
    let (mut entries, mut names) = (Vec::new(), HashSet::new());
    for place in 0..count {
        let name = name(&mut cursor).map_err(|why| format!("entry {place}: {why}"))?;
        let in_entry = |why| format!("entry {name}: {why}");
        if !names.insert(name) {
            return Err(in_entry("it occurs twice".into()));
        }
        let at = cursor.at();
        number(&mut cursor, "a number of chunks", 0).map_err(in_entry)?;
        let (chunks, numbers) = (at..cursor.at(), number(&mut cursor, "a number of columns", 1));
        let (numbers, at) = (numbers.map_err(in_entry)?, cursor.at());
        // This cannot overflow: the number comes from an i32.
        cursor.take(numbers as u64 * 4).map_err(in_entry)?;
        entries.push(ImatrixEntry { name: name.into(), chunks, sums: at..cursor.at() });
    }
    Ok(entries)
}

/// Reads an i32 that is at least `least`.
fn number(cursor: &mut Cursor<'_>, what: &str, least: i32) -> Parsed<usize> {
    let found = i32::from_le_bytes(cursor.array()?);
    let number = usize::try_from(found).ok().filter(|_| found >= least);
    number.ok_or_else(|| format!("{what} of {found} is less than {least}"))
}

fn name<'a>(cursor: &mut Cursor<'a>) -> Parsed<&'a str> {
    let length = number(cursor, "a name's length", 1)?;
    if length > NAME_BYTES {
        return Err(format!("its name has {length} bytes, more than the {NAME_BYTES} allowed"));
    }
    let bytes = cursor.take(length as u64)?;
    let name =
        str::from_utf8(bytes).map_err(|_| format!("its name is not UTF-8: {}", bytes.escape_ascii()))?;
    if name.contains('\0') {
        return Err(format!("its name has a zero byte: {name:?}"));
    }
    check_name(name).map(|()| name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file with these entries: name, chunks, numbers.
    fn file(entries: &[(&str, i32, &[f32])], end: &[u8]) -> Vec<u8> {
        let mut bytes = (entries.len() as i32).to_le_bytes().to_vec();
        for (name, chunks, numbers) in entries {
            bytes.extend((name.len() as i32).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend(chunks.to_le_bytes());
            bytes.extend((numbers.len() as i32).to_le_bytes());
            numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        }
        [&bytes, end].concat()
    }

    fn good() -> Vec<u8> {
        file(&[("blk.0.ffn_up.weight", 3, &[1.0, 2.5]), ("output.weight", 0, &[4.0])], &[7, 0, 0, 0, 9])
    }

    #[track_caller]
    fn refused(bytes: &[u8], part: &str) {
        let refused = read(Path::new("bad.dat"), bytes).unwrap_err().to_string();
        assert!(refused.contains("bad.dat") && refused.contains(part), "{part:?} is not in: {refused}");
    }

    #[test]
    fn entries_have_the_ranges_in_the_file() {
        let bytes = good();
        assert!(is_imatrix(&bytes));
        let entries = read(Path::new("x.dat"), &bytes).unwrap();
        let found: Vec<_> = entries
            .iter()
            .map(|entry| (&*entry.name, &bytes[entry.chunks.clone()], &bytes[entry.sums.clone()]))
            .collect();
        let (first, second) = ([1f32.to_le_bytes(), 2.5f32.to_le_bytes()].concat(), 4f32.to_le_bytes());
        assert_eq!(
            found,
            [
                ("blk.0.ffn_up.weight", &3i32.to_le_bytes()[..], &first[..]),
                ("output.weight", &0i32.to_le_bytes()[..], &second[..])
            ]
        );
    }

    #[test]
    fn invalid_files_are_refused() {
        refused(b"", "4 bytes are expected");
        refused(&0i32.to_le_bytes(), "a number of entries of 0 is less than 1");
        refused(&(-1i32).to_le_bytes(), "a number of entries of -1");
        refused(&[&i32::MAX.to_le_bytes()[..], &[0; 64]].concat(), "claims 2147483647 entries");
        refused(&file(&[("", 1, &[1.0])], &[0; 9]), "entry 0: a name's length of 0");
        refused(&file(&[("a\0b", 1, &[1.0])], &[]), "zero byte");
        refused(&file(&[(&"x".repeat(2000), 1, &[1.0])], &[]), "2000 bytes, more than the 1024 allowed");
        refused(&file(&[("a.weight", -1, &[1.0])], &[]), "entry a.weight: a number of chunks of -1");
        refused(&file(&[("a.weight", 1, &[])], &[0; 9]), "entry a.weight: a number of columns of 0");
        refused(&file(&[("a", 1, &[1.0]), ("a", 1, &[1.0])], &[]), "entry a: it occurs twice");
        let mut bytes = good();
        bytes[4 + 4 + 19 + 4..][..4].copy_from_slice(&i32::MAX.to_le_bytes());
        refused(&bytes, "entry blk.0.ffn_up.weight: 8589934588 bytes are expected");
        let mut bytes = good();
        bytes[8] = 0xFF;
        refused(&bytes, "not UTF-8");
    }

    #[test]
    fn other_files_are_not_taken_for_one() {
        for other in [&b"GGUF\x03\0\0\0\x01\0\0\0"[..], b"PK\x03\x04\x14\0\0\0", b"\x80\x02}q\0X\x01\0", b""]
        {
            assert!(!is_imatrix(other), "{other:?}");
        }
        assert!(!is_imatrix(&[&12u64.to_le_bytes()[..], br#"{"a":{}}    "#].concat()), "safetensors");
        assert!(!is_imatrix(b"version https://git-lfs.github.com/spec/v1"));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic_or_leave_the_file(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            end in any::<prop::sample::Index>(),
            bytes in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut mutated = good();
            mutated.truncate(end.index(mutated.len()) + 1);
            for (at, byte) in changes {
                let at = at.index(mutated.len());
                mutated[at] = byte;
            }
            for bytes in [mutated, bytes] {
                let _ = is_imatrix(&bytes);
                for entry in read(Path::new("bad.dat"), &bytes).unwrap_or_default() {
                    prop_assert_eq!(entry.chunks.len(), 4);
                    prop_assert!(entry.sums.end <= bytes.len() && entry.sums.len().is_multiple_of(4));
                }
            }
        }
    }
}
