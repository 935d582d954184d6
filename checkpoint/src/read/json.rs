//! Reads and writes the JSON files of a checkpoint: objects in their key order, as Python does.

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::HEADER_BYTES;

/// Numbers that JSON does not have, but that Python reads and writes.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// A file with one JSON object.
pub(crate) struct Object {
    /// The text of the file.
    text: String,
    /// The object. Numbers that JSON does not have are strings in it.
    pub(crate) json: Map<String, Value>,
}

impl Object {
    /// Reads a file that must contain one JSON object.
    ///
    /// # Errors
    /// [`Error::Io`], [`FileError::JsonContent`] or [`FileError::Json`] if the file is not
    /// readable, not UTF-8, too long, not JSON, or not an object.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let refused = |why| Error::File(FileError::JsonContent { file: file.into(), why });
        let text = String::from_utf8(read(file)?)
            .map_err(|_| refused("the file must be text in UTF-8; download or write it again"))?;
        let json = serde_json::from_str(&with_quoted_words(&text))
            .map_err(|source| Error::File(FileError::Json { file: file.into(), source }))?;
        match json {
            Value::Object(json) => Ok(Self { text, json }),
            _ => Err(refused("the file must hold one JSON object; correct it")),
        }
    }

    /// A key that several members have. The last one counts.
    pub(crate) fn repeated_key(&self) -> Option<String> {
        let (mut seen, mut members) = (HashSet::new(), members(&self.text));
        let place = members.iter().position(|member| !seen.insert(member.key.clone()))?;
        Some(members.swap_remove(place).key)
    }

    /// The text of another object, as an edit of this file's text.
    ///
    /// Members with the same value stay byte for byte, so no number is rounded and no string is
    /// escaped differently.
    pub(crate) fn rewritten(&self, json: &Map<String, Value>) -> String {
        let members = members(&self.text);
        let (Some(first), Some(last)) = (members.first(), members.last()) else { return text_of(json) };
        let space = &self.text[first.whole.clone()];
        let space = &space[..space.len() - space.trim_start().len()];
        let indent = space.rsplit('\n').next().unwrap_or_default();
        let member = |(key, value): (&String, &Value)| {
            let same = self.json.get(key) == Some(value);
            // If a key occurs twice, the last member counts.
            match members.iter().rfind(|member| same && member.key == *key) {
                Some(member) => self.text[member.whole.clone()].to_owned(),
                None => {
                    let value = format!("{value:#}").replace('\n', &format!("\n{indent}"));
                    format!("{space}{}: {value}", Value::from(key.as_str()))
                }
            }
        };
        let inside: Vec<String> = json.iter().map(member).collect();
        format!("{}{}{}", &self.text[..first.whole.start], inside.join(","), &self.text[last.whole.end..])
    }
}

/// A member of an object.
struct Member {
    key: String,
    /// Its range in the text, from the byte after the previous delimiter to the end of its value.
    whole: Range<usize>,
}

/// The members of the object in a text, which must be valid JSON.
fn members(text: &str) -> Vec<Member> {
    let mut members = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (place, sign) in signs(text) {
        match sign {
            b'{' | b'[' => {
                depth += 1;
                if depth == 1 {
                    start = place + 1;
                }
            }
            b',' | b'}' if depth == 1 => {
                let whole = start..start + text[start..place].trim_end().len();
                let key =
                    serde_json::Deserializer::from_str(&text[whole.clone()]).into_iter::<String>().next();
                members.extend(key.and_then(std::result::Result::ok).map(|key| Member { key, whole }));
                start = place + 1;
                depth -= u32::from(sign == b'}');
            }
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
    members
}

/// The bytes of a JSON text outside strings, with their offsets.
fn signs(text: &str) -> impl Iterator<Item = (usize, u8)> {
    let (mut in_string, mut escaped) = (false, false);
    text.bytes().enumerate().filter(move |(_, byte)| {
        let was_in_string = in_string;
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ => {}
        }
        !was_in_string && !in_string
    })
}

/// Returns a JSON text with the [words](WORDS) for numbers quoted.
fn with_quoted_words(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    let mut done = 0;
    for (place, _) in signs(text) {
        let rest = &text.as_bytes()[place..];
        let word = WORDS.iter().find(|word| place >= done && rest.starts_with(word.as_bytes()));
        if let Some(word) = word {
            quoted += &text[done..place];
            quoted += &format!("\"{word}\"");
            done = place + word.len();
        }
    }
    quoted + &text[done..]
}

/// Reads the bytes of a file that should contain JSON.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>> {
    let refused = |why| Err(Error::File(FileError::JsonContent { file: file.into(), why }));
    let metadata = fs::metadata(file).map_err(Error::io("read", file))?;
    // Opening a pipe would block until it has a writer, and a device may have no end.
    if !metadata.is_file() {
        return refused("it is not a regular file; put the file itself there");
    }
    if metadata.len() > HEADER_BYTES {
        return refused("it has more than the 100 MB allowed; download or write it again");
    }
    fs::read(file).map_err(Error::io("read", file))
}

/// An object as text in the style of Hugging Face libraries: indented by two, with a final newline.
fn text_of(object: &Map<String, Value>) -> String {
    format!("{:#}\n", Value::Object(object.clone()))
}

/// Writes an object, as an [edit](Object::rewritten) of the original if there is one. Returns the
/// length of the text in bytes.
pub(crate) fn write_object(file: &Path, json: &Map<String, Value>, original: Option<&Object>) -> Result<u64> {
    let text = original.map_or_else(|| text_of(json), |original| original.rewritten(json));
    // The handle that wrote the file flushes it: Windows does not flush a read-only handle.
    let written = fs::File::create(file).and_then(|mut to| {
        to.write_all(text.as_bytes())?;
        to.sync_all()?;
        Ok(text.len() as u64)
    });
    written.map_err(Error::io("write", file))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(text: &str) -> Object {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Object::read(file.path()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A config as Python writes it: floats that other libraries print differently, integers above
    /// u64, escapes, NaN and infinities.
    const CONFIG: &str = "{\n    \"a\": 9.829999923706055,\n    \"b\" : [1e-05, 123456789012345678901234567890],\n\
        \x20   \"caf\\u00e9 , \\\" }\": {\"time_step_limit\": [0.0, Infinity], \"x\": [-Infinity,NaN]},\n    \"d\": \"NaN\"\n}\n";

    #[test]
    fn unchanged_members_stay_byte_for_byte() {
        let config = object(CONFIG);
        assert_eq!(config.rewritten(&config.json), CONFIG);

        let mut quantized = config.json.clone();
        quantized.insert("quantization_config".into(), json!({ "bits": 4 }));
        let text = config.rewritten(&quantized);
        let added = ",\n    \"quantization_config\": {\n      \"bits\": 4\n    }\n}\n";
        assert_eq!(text, CONFIG.replace("\n}\n", added));

        let again = object(&text);
        assert_eq!(again.json, quantized);
        assert_eq!(again.rewritten(&config.json), CONFIG, "as before");
        let mut changed = config.json.clone();
        changed["d"] = json!(1);
        changed.shift_remove("a");
        let expected = CONFIG.replace("\"NaN\"", "1").replace("\n    \"a\": 9.829999923706055,", "");
        assert_eq!(config.rewritten(&changed), expected);
    }

    #[test]
    fn objects_in_one_line_and_without_members_are_written() {
        let one_line = object("{\"a\":1,\"b\":[1,{\"c\":2}]}");
        assert_eq!(one_line.rewritten(&one_line.json), "{\"a\":1,\"b\":[1,{\"c\":2}]}");
        let mut more = one_line.json.clone();
        more.insert("d".into(), json!(true));
        assert_eq!(one_line.rewritten(&more), "{\"a\":1,\"b\":[1,{\"c\":2}],\"d\": true}");
        let empty = object(" { }");
        assert_eq!(empty.rewritten(&more), text_of(&more));
        assert_eq!(one_line.rewritten(&Map::new()), "{}");
        let twice = object("{\"a\":1,\"a\":2}");
        assert_eq!(twice.rewritten(&twice.json), "{\"a\":2}", "the one that counts");
    }

    #[test]
    fn words_for_numbers_are_read_outside_of_strings_only() {
        let words = object("{\"NaN\":NaN,\"a\\\"Infinity\":[Infinity,-Infinity]}");
        assert_eq!(
            Value::Object(words.json),
            json!({ "NaN": "NaN", "a\"Infinity": ["Infinity", "-Infinity"] })
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        for wrong in [
            "{é}",
            "é",
            "{\"a\": Ìnfinity}",
            "{\"a\": nan}",
            "{\"a\": Infinityy}",
            "{\"a\": +Infinity}",
            "[NaN]",
            "\"\u{FF}\"",
            "{",
        ] {
            fs::write(file.path(), wrong).unwrap();
            assert!(Object::read(file.path()).is_err(), "{wrong}");
        }
        fs::write(file.path(), [b'{', 0xFF, b'}']).unwrap();
        let error = Object::read(file.path()).err().unwrap().to_string();
        assert!(error.contains("UTF-8"), "{error}");
    }
}
