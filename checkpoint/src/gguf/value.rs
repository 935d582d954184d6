//! Metadata values: their types, and reading them.

use std::ops::Range;

use super::cursor::Cursor;
use super::format::Parsed;

/// The largest number of elements of an array: ggml's limit.
const MAX_ARRAY: u64 = 1 << 30;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// All types in the order of GGUF's numbers: ggml's name, and the size in bytes if it is fixed.
    const ALL: [(Self, &'static str, Option<u64>); 13] = [
        (Self::U8, "u8", Some(1)),
        (Self::I8, "i8", Some(1)),
        (Self::U16, "u16", Some(2)),
        (Self::I16, "i16", Some(2)),
        (Self::U32, "u32", Some(4)),
        (Self::I32, "i32", Some(4)),
        (Self::F32, "f32", Some(4)),
        (Self::Bool, "bool", Some(1)),
        (Self::String, "str", None),
        (Self::Array, "arr", None),
        (Self::U64, "u64", Some(8)),
        (Self::I64, "i64", Some(8)),
        (Self::F64, "f64", Some(8)),
    ];

    /// GGUF's number.
    pub(super) const fn id(self) -> u32 {
        self as u32
    }

    /// ggml's name.
    pub(super) fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    fn bytes(self) -> Option<u64> {
        Self::ALL[self as usize].2
    }

    fn read(cursor: &mut Cursor<'_>) -> Parsed<Self> {
        let id = cursor.u32()?;
        let known = usize::try_from(id).ok().and_then(|id| Self::ALL.get(id));
        known.map(|(kind, ..)| *kind).ok_or_else(|| format!("{id} is no type of a value; they are 0 to 12"))
    }
}

/// A metadata entry.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MetadataEntry {
    pub(crate) key: String,
    pub(crate) kind: ValueType,
    pub(crate) value: MetadataValue,
    /// The bytes of key, type and value in the file, to copy them unchanged.
    pub(crate) raw: Range<usize>,
}

/// The value of an entry.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetadataValue {
    /// u8, u16, u32, u64.
    Unsigned(u64),
    /// i8, i16, i32, i64.
    Signed(i64),
    /// f32, f64.
    Float(f64),
    /// Any byte but 0 is true.
    Bool(bool),
    /// GGUF requires UTF-8, but no program checks. Invalid bytes become U+FFFD here; copies keep
    /// them.
    Text(String),
    /// An array. Its elements stay in the file.
    Array {
        /// The type of the elements, which is not an array.
        of: ValueType,
        /// The number of elements.
        count: u64,
    },
}

impl MetadataValue {
    /// Reads a type and a value of that type.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Parsed<(ValueType, Self)> {
        let kind = ValueType::read(cursor)?;
        let value = match kind {
            ValueType::U8 => Self::Unsigned(u8::from_le_bytes(cursor.array()?).into()),
            ValueType::U16 => Self::Unsigned(u16::from_le_bytes(cursor.array()?).into()),
            ValueType::U32 => Self::Unsigned(cursor.u32()?.into()),
            ValueType::U64 => Self::Unsigned(cursor.u64()?),
            ValueType::I8 => Self::Signed(i8::from_le_bytes(cursor.array()?).into()),
            ValueType::I16 => Self::Signed(i16::from_le_bytes(cursor.array()?).into()),
            ValueType::I32 => Self::Signed(i32::from_le_bytes(cursor.array()?).into()),
            ValueType::I64 => Self::Signed(i64::from_le_bytes(cursor.array()?)),
            ValueType::F32 => Self::Float(f32::from_le_bytes(cursor.array()?).into()),
            ValueType::F64 => Self::Float(f64::from_le_bytes(cursor.array()?)),
            ValueType::Bool => Self::Bool(cursor.array::<1>()? != [0]),
            ValueType::String => Self::Text(String::from_utf8_lossy(cursor.string()?).into_owned()),
            ValueType::Array => Self::skip_array(cursor)?,
        };
        Ok((kind, value))
    }

    /// Skips an array without allocating.
    fn skip_array(cursor: &mut Cursor<'_>) -> Parsed<Self> {
        let (of, count) = (ValueType::read(cursor)?, cursor.u64()?);
        if of == ValueType::Array {
            return Err("it is an array of arrays, which ggml does not read".into());
        }
        if count > MAX_ARRAY {
            return Err(format!("it has {count} elements, and ggml reads no more than {MAX_ARRAY}"));
        }
        match of.bytes() {
            // This cannot overflow: neither factor is above 2^30.
            Some(bytes) => cursor.take(count * bytes).map(|_| ())?,
            None => (0..count).try_for_each(|_| cursor.string().map(|_| ()))?,
        }
        Ok(Self::Array { of, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_their_numbers() {
        for (number, (kind, name, _)) in ValueType::ALL.iter().enumerate() {
            assert_eq!((kind.id() as usize, kind.name()), (number, *name));
        }
    }
}
