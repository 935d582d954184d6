//! Names of files that are made of another's name and never longer than file systems allow.

use std::ffi::{OsStr, OsString};

use xxhash_rust::xxh3::xxh3_64;

/// The bytes that a name may have on the file systems in use.
const MOST: usize = 255;

/// A name with a suffix, and room for some more bytes. If that would be too long, a hash replaces
/// the end of the name.
pub(crate) fn with_suffix(name: &OsStr, suffix: &str, room: usize) -> OsString {
    let bytes = name.as_encoded_bytes();
    let fits = |bytes: usize| bytes + suffix.len() + room <= MOST;
    let mut new = if fits(bytes.len()) {
        name.to_os_string()
    } else {
        let hash = format!("~{:016x}", xxh3_64(bytes));
        let text = name.to_string_lossy();
        let end = (0..text.len()).rev().find(|end| text.is_char_boundary(*end) && fits(end + hash.len()));
        OsString::from(format!("{}{hash}", &text[..end.unwrap_or(0)]))
    };
    new.push(suffix);
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_as_they_are_or_become_as_long_as_may_be() {
        let with = |name: &str, room| with_suffix(name.as_ref(), ".parts", room).into_string().unwrap();
        assert_eq!(with("OUT", 0), "OUT.parts");
        assert_eq!(with(&"a".repeat(249), 0), "a".repeat(249) + ".parts");
        let (long, other) = (with(&("a".repeat(249) + "b"), 0), with(&("a".repeat(249) + "c"), 0));
        assert!(long.len() == 255 && long.starts_with("aaa") && long.ends_with(".parts"));
        assert_ne!(long, other);
        assert_eq!(with(&"a".repeat(249), 1).len(), 254);
        assert!((252..=255).contains(&with(&"€".repeat(85), 0).len()));
    }
}
