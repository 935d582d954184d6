//! A forward-only cursor over a file's bytes. It checks lengths before it returns anything.

use super::format::Parsed;

/// The longest string to read. Metadata store vocabularies as arrays, so long strings are templates
/// or licenses.
const MAX_STRING: u64 = 64 << 20;

/// The longest name: the format's limit for metadata keys.
const MAX_LABEL: usize = (1 << 16) - 1;

/// The unread rest of a file, and its offset.
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, at: 0 }
    }

    /// The offset in the file.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The number of bytes to the end of the file.
    pub(super) fn left(&self) -> u64 {
        self.rest.len() as u64
    }

    /// Returns the next `count` bytes.
    pub(super) fn take(&mut self, count: u64) -> Parsed<&'a [u8]> {
        let split = usize::try_from(count).ok().and_then(|count| self.rest.split_at_checked(count));
        let (taken, rest) = split.ok_or_else(|| {
            format!(
                "{count} bytes are expected at byte {}, but the file has only {} more",
                self.at,
                self.rest.len()
            )
        })?;
        (self.rest, self.at) = (rest, self.at + taken.len());
        Ok(taken)
    }

    /// Returns the next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Parsed<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Returns the bytes of a string, which is stored with its length.
    pub(super) fn string(&mut self) -> Parsed<&'a [u8]> {
        let (at, length) = (self.at, self.u64()?);
        if length > MAX_STRING && length <= self.left() {
            return Err(format!(
                "the string at byte {at} has {length} bytes, more than the {MAX_STRING} allowed"
            ));
        }
        self.take(length)
    }

    /// Returns a name: UTF-8, not empty, and without a zero byte, where C programs would cut it.
    pub(super) fn label(&mut self) -> Parsed<&'a str> {
        let bytes = self.string()?;
        // The limit keeps error messages short, which repeat names.
        if bytes.len() > MAX_LABEL {
            return Err(format!("its name has {} bytes, more than the {MAX_LABEL} allowed", bytes.len()));
        }
        let label =
            str::from_utf8(bytes).map_err(|_| format!("its name is not UTF-8: {}", bytes.escape_ascii()))?;
        match label {
            "" => Err("its name is empty".into()),
            _ if label.contains('\0') => Err(format!("its name has a zero byte: {label:?}")),
            _ => Ok(label),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let bytes = [3, 0, 0, 0, 0, 0, 0, 0, b'a', b'b', b'c', 7];
        let mut cursor = Cursor::new(&bytes);
        assert_eq!(cursor.string(), Ok(&b"abc"[..]));
        assert_eq!((cursor.at(), cursor.left()), (11, 1));
        let refused = cursor.u32().unwrap_err();
        assert_eq!(refused, "4 bytes are expected at byte 11, but the file has only 1 more");
        assert_eq!(cursor.array(), Ok([7]));
        assert_eq!(cursor.take(0), Ok(&[][..]));
        assert!(cursor.take(u64::MAX).is_err() && Cursor::new(&[0xFF; 12]).string().is_err());
    }

    #[test]
    fn names_that_others_would_read_differently_are_refused() {
        let of = |text: &[u8]| {
            let bytes = [&(text.len() as u64).to_le_bytes(), text].concat();
            Cursor::new(&bytes).label().map(str::to_owned)
        };
        assert_eq!(of("größe".as_bytes()), Ok("größe".into()));
        for (text, why) in [(&b""[..], "empty"), (b"a\0b", "zero byte"), (b"\xFF", "not UTF-8: \\xff")] {
            let refused = of(text).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
