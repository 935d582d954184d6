//! Recipe files: reading TOML, and errors about it.

use std::ops::Range;
use std::path::Path;

use globset::GlobMatcher;
use microscale::{Format, HadamardWidth, Words};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Recipes;
use super::rule::{Lines, Rule};
use crate::checkpoint_format::CheckpointFormat;
use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};
use crate::limits::read_recipe;
use crate::names::glob;
use crate::plan::kept_as::KeptAs;
use crate::plan::recipes::presets::Preset;
use crate::plan::selection::Selection;
use crate::plan::settings::{GlobalSetting, Settings};

/// The keys of a rule in addition to [`Settings::KEYS`], and of the file: **docs/recipes.md lists
/// them**.
const OF_RULE: [&str; 2] = ["match", "keep"];
const OF_FILE: [&str; 7] =
    ["to", "kept", "include", "exclude", "keep_first_layers", "keep_last_layers", "tensors"];

/// Keys, and their names before version 0.1, which are still read.
const FORMER: [(&str, &str); 2] = [("numerics", "convention"), ("to", "out_convention")];

/// The former name of a key.
fn former(key: &str) -> Option<&'static str> {
    FORMER.iter().find(|(now, _)| *now == key).map(|(_, former)| *former)
}

/// The words for the source of global scales.
const FROM_AMAX: &str = "amax";
const ABSENT: &str = "none";

impl Recipes {
    /// Reads a recipe file.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`FileError::TooLong`](crate::FileError::TooLong)
    /// if it is too long, and [`RecipeError::File`](crate::RecipeError::File) if it is invalid.
    pub fn open(path: &Path) -> Result<Self> {
        let text = read_recipe(path)?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses the text of a recipe file. Errors refer to the file as `source`.
    ///
    /// # Errors
    /// [`RecipeError::File`](crate::RecipeError::File) with the line, the mistake and the accepted
    /// values if the text is invalid.
    pub fn parse(text: &str, source: &str) -> Result<Self> {
        parse(text, source)
    }

    /// Opens recipes by name.
    ///
    /// A name that ends with `.toml` or contains a directory separator is a file. Other names are
    /// [`presets`](crate::presets).
    ///
    /// # Errors
    /// [`RecipeError::NoPreset`](crate::RecipeError::NoPreset) if there is no such preset, and the
    /// errors of [`Self::open`].
    pub fn named(word: &str) -> Result<Self> {
        if word.ends_with(".toml") || word.contains(std::path::is_separator) {
            return Self::open(Path::new(word));
        }
        let preset = Preset::called(word)?;
        Ok(Self { preset: true, ..Self::parse(preset.text, &format!("preset {word}"))? })
    }
}

/// Parses the text of a recipe file.
fn parse(text: &str, source: &str) -> Result<Recipes> {
    let file = File { text, source };
    let document = DeTable::parse(text).map_err(|error| {
        let why = format!("this is not TOML: {}", error.message().replace('\n', ", "));
        file.error(error.span().unwrap_or(text.len()..text.len()), why)
    })?;
    let top = file.table(document.get_ref(), &[&Settings::KEYS[..], &OF_FILE].concat(), "a recipe")?;
    let (settings, lines) = top.settings()?;
    let tensors = match top.get("tensors") {
        None => Vec::new(),
        Some(value) => top.rules(value)?,
    };
    let (include, exclude) = (top.patterns("include")?, top.patterns("exclude")?);
    Ok(Recipes {
        settings,
        preset: false,
        to: top.word::<CheckpointFormat>("to")?,
        kept: top.word::<KeptAs>("kept")?.unwrap_or_default(),
        selection: Selection::of(include, exclude),
        keep_first_layers: top.count("keep_first_layers")?,
        keep_last_layers: top.count("keep_last_layers")?,
        rules: tensors,
        source: Some(source.into()),
        lines,
    })
}

/// A file, for error messages.
#[derive(Clone, Copy)]
struct File<'a> {
    text: &'a str,
    source: &'a str,
}

/// A table of the file.
struct Table<'a> {
    file: File<'a>,
    table: &'a DeTable<'a>,
}

type TomlValue<'a> = Spanned<DeValue<'a>>;

/// The formats that at least one checkpoint format can store.
fn stored_formats() -> impl Iterator<Item = Format> {
    CheckpointFormat::WORDS.iter().flat_map(|(_, format)| format.formats())
}

impl<'a> File<'a> {
    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().iter().take(at);
        before.filter(|byte| **byte == b'\n').count() + 1
    }

    fn error(&self, at: Range<usize>, why: String) -> Error {
        Error::Recipe(RecipeError::File { place: format!("{}:{}", self.source, self.line(at.start)), why })
    }

    /// Makes a table, if it has no other keys than `keys`.
    fn table(self, table: &'a DeTable<'a>, keys: &[&str], what: &str) -> Result<Table<'a>> {
        let is_known = |name: &str| keys.iter().any(|key| *key == name || former(key) == Some(name));
        let unknown = table.keys().filter(|key| !is_known(key.get_ref()));
        match unknown.min_by_key(|key| key.span().start) {
            None => match FORMER
                .iter()
                .find(|(now, former)| table.contains_key(*now) && table.contains_key(*former))
            {
                None => Ok(Table { file: self, table }),
                Some((now, former)) => {
                    let at = table.get(*former).map_or(0..0, |value| value.span());
                    Err(self.error(at, format!("{former} is the former name of {now}; give one of them")))
                }
            },
            Some(key) => {
                let (name, known) = (key.get_ref(), keys.join(", "));
                Err(self.error(key.span(), format!("{what} has no key {name:?}; it can have {known}")))
            }
        }
    }
}

impl<'a> Table<'a> {
    fn get(&self, key: &str) -> Option<&'a TomlValue<'a>> {
        self.table.get(key).or_else(|| self.table.get(former(key)?))
    }

    /// An error about the value of a key.
    fn wrong(&self, key: &str, value: &TomlValue<'_>, expected: &str) -> Error {
        let found = self.file.text.get(value.span()).unwrap_or_default();
        // Long values and values of several lines are not shown.
        let short = found.len() <= 60 && !found.contains('\n');
        let found = if short { found } else { value.get_ref().type_str() };
        self.file.error(value.span(), format!("{key} is {found}, and must be {expected}"))
    }

    fn settings(&self) -> Result<(Settings, Lines)> {
        let [format, numerics, scale_rule, ties, global_scale, search, search_global, non_finite, hadamard] =
            Settings::KEYS;
        let settings = Settings {
            format: self.word_among(format, |format| stored_formats().any(|stored| stored == *format))?,
            numerics: self.word(numerics)?,
            scale_rule: self.word(scale_rule)?,
            ties: self.word(ties)?,
            global_scale: self.global_scale(global_scale)?,
            search: self.word(search)?,
            search_global: self.flag(search_global)?,
            non_finite: self.word(non_finite)?,
            hadamard: self.hadamard(hadamard)?,
        };
        let line = |key| Some((key, self.file.line(self.get(key)?.span().start)));
        Ok((settings, settings.given().filter_map(line).collect()))
    }

    /// Parses a word of a type.
    fn word<T: Words>(&self, key: &str) -> Result<Option<T>> {
        self.word_among(key, |_| true)
    }

    /// Parses a word of a type. Errors list only the words that are `offered`. Later checks refuse
    /// the other words with a better message.
    fn word_among<T: Words>(&self, key: &str, offered: impl Fn(&T) -> bool) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let word = value.get_ref().as_str().and_then(T::from_word);
        let words = T::WORDS.iter().filter(|(_, known)| offered(known)).map(|(word, _)| format!("{word:?}"));
        let known = || words.collect::<Vec<_>>().join(", ");
        word.map(Some).ok_or_else(|| self.wrong(key, value, &format!("one of {}", known())))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let flag = value.get_ref().as_bool();
        flag.map(Some).ok_or_else(|| self.wrong(key, value, "true or false"))
    }

    /// A number of things; 0 if the key is missing.
    fn count(&self, key: &str) -> Result<usize> {
        let Some(value) = self.get(key) else { return Ok(0) };
        let count =
            value.get_ref().as_integer().and_then(|n| usize::from_str_radix(n.as_str(), n.radix()).ok());
        count.ok_or_else(|| self.wrong(key, value, "a whole number from 0 on"))
    }

    fn hadamard(&self, key: &str) -> Result<Option<Option<HadamardWidth>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let setting = match value.get_ref() {
            DeValue::Integer(number) => HadamardWidth::from_word(number.as_str()).map(Some),
            value => value.as_str().filter(|word| *word == ABSENT).map(|_| None),
        };
        let widths = HadamardWidth::WORDS.iter().map(|(word, _)| *word);
        let expected = format!("{} or {ABSENT:?}", widths.collect::<Vec<_>>().join(", "));
        setting.map(Some).ok_or_else(|| self.wrong(key, value, &expected))
    }

    fn global_scale(&self, key: &str) -> Result<Option<GlobalSetting>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value.get_ref() {
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok(),
            DeValue::Float(number) => number.as_str().parse().ok(),
            _ => None,
        };
        let setting = match value.get_ref().as_str() {
            Some(FROM_AMAX) => Some(GlobalSetting::FromAmax),
            Some(ABSENT) => Some(GlobalSetting::Absent),
            _ => number.map(GlobalSetting::Value),
        };
        let expected = format!("{FROM_AMAX:?}, {ABSENT:?} or a number");
        setting.map(Some).ok_or_else(|| self.wrong(key, value, &expected))
    }

    /// A list of patterns, empty if the key is missing.
    fn patterns(&self, key: &str) -> Result<Vec<GlobMatcher>> {
        let expected = "a pattern of tensor names such as \"*.down_proj.weight\", or a list of them";
        let pattern = |value: &TomlValue<'_>| {
            let text = value.get_ref().as_str().ok_or_else(|| self.wrong(key, value, expected))?;
            glob::matcher(text).map_err(|why| {
                let why = format!("{key} is {}, which is no pattern: {why}", glob::shown(text));
                self.file.error(value.span(), why)
            })
        };
        match self.get(key).map(|value| (value, value.get_ref())) {
            None => Ok(Vec::new()),
            Some((_, DeValue::Array(values))) => values.iter().map(pattern).collect(),
            Some((value, _)) => Ok(vec![pattern(value)?]),
        }
    }

    /// The rules for some tensors.
    fn rules(&self, value: &'a TomlValue<'a>) -> Result<Vec<Rule>> {
        let expected = "tables, each under a line [[tensors]]";
        let Some(values) = value.get_ref().as_array() else {
            return Err(self.wrong("tensors", value, expected));
        };
        let rule = |value: &'a TomlValue<'a>| {
            let table = value.get_ref().as_table().ok_or_else(|| self.wrong("tensors", value, expected))?;
            self.file
                .table(table, &[&OF_RULE[..], &Settings::KEYS].concat(), "[[tensors]]")?
                .rule(value.span())
        };
        values.iter().map(rule).collect()
    }

    fn rule(&self, at: Range<usize>) -> Result<Rule> {
        let (settings, lines) = self.settings()?;
        let (patterns, keep) = (self.patterns("match")?, self.flag("keep")?);
        let given: Vec<_> = settings.given().collect();
        let why = match (patterns.is_empty(), keep, given.first()) {
            (true, ..) => "[[tensors]] needs match, a pattern of tensor names or a list of them".into(),
            (_, None, None) => {
                format!(
                    "[[tensors]] says nothing; write keep = true to leave tensors as they are, or one of {}",
                    Settings::KEYS.join(", ")
                )
            }
            (_, Some(true), Some(key)) => {
                format!(
                    "keep = true leaves tensors as they are, so that {key} means nothing; leave out one of them"
                )
            }
            _ => return Ok(Rule { line: self.file.line(at.start), patterns, keep, settings, lines }),
        };
        Err(self.file.error(at, why))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use microscale::formats::{ScaleRule, Ties};
    use microscale::{Format, NonFinite, Numerics, Search};

    fn refused(text: &str) -> String {
        let error = parse(text, "r.toml").unwrap_err();
        assert!(matches!(error, Error::Recipe(RecipeError::File { .. })), "{error}");
        let error = error.to_string();
        assert!(!error.contains('\n'), "{error}");
        error
    }

    #[test]
    fn every_key_is_read() {
        let recipes = parse(
            r#"
            format = "mxfp4"
            numerics = "ggml"
            scale_rule = "ceil"
            ties = "away"
            search = "window"
            non_finite = "saturate"
            to = "gguf"
            kept = "q8_0"
            include = "a*"
            exclude = ["b*", "c*"]
            keep_first_layers = 2
            keep_last_layers = 0x10

            [[tensors]]
            match = "d"
            format = "nvfp4"
            numerics = "modelopt"
            global_scale = 0.5
            search_global = false
            search = "full"
            [[tensors]]
            match = ["e", "f"]
            keep = true
            [[tensors]]
            match = "g"
            keep = false
            global_scale = "none"
            "#,
            "r.toml",
        )
        .unwrap();
        let expected = Settings {
            format: Some(Format::Mxfp4),
            numerics: Some(Numerics::Ggml),
            scale_rule: Some(ScaleRule::Ceil),
            ties: Some(Ties::Away),
            search: Some(Search::Window),
            non_finite: Some(NonFinite::Saturate),
            ..Settings::default()
        };
        assert_eq!(recipes.settings, expected);
        assert_eq!(
            recipes.lines.iter().map(|(key, line)| (*key, *line)).collect::<Vec<_>>()[..2],
            [("format", 2), ("non_finite", 7)]
        );
        assert_eq!((recipes.to, recipes.kept), (Some(CheckpointFormat::Gguf), KeptAs::Q8_0));
        assert_eq!((recipes.keep_first_layers, recipes.keep_last_layers), (2, 16));
        assert_eq!(recipes.selection.unmatched(&[]), ["a*", "b*", "c*"]);
        let [first, second, third] = &recipes.rules[..] else { panic!("{recipes:?}") };
        let expected = Settings {
            format: Some(Format::Nvfp4),
            numerics: Some(Numerics::Modelopt),
            global_scale: Some(GlobalSetting::Value(0.5)),
            search_global: Some(false),
            search: Some(Search::Full),
            ..Settings::default()
        };
        assert_eq!((first.settings, first.keep, first.line), (expected, None, 15));
        assert_eq!((second.text().as_str(), second.keep), (r#""e", "f""#, Some(true)));
        assert_eq!((third.settings.global_scale, third.keep), (Some(GlobalSetting::Absent), Some(false)));
        assert_eq!(parse("", "r.toml").unwrap().rules.len(), 0);
        let whole = parse("global_scale = 3", "r.toml").unwrap().settings.global_scale;
        assert_eq!(whole, Some(GlobalSetting::Value(3.0)));
        let amax = parse("global_scale = \"amax\"", "r.toml").unwrap().settings.global_scale;
        assert_eq!(amax, Some(GlobalSetting::FromAmax));
    }

    #[test]
    fn former_names_of_keys_are_read() {
        let former = parse("convention = \"ggml\"\nout_convention = \"gguf\"", "r.toml").unwrap();
        let now = parse("numerics = \"ggml\"\nto = \"gguf\"", "r.toml").unwrap();
        assert_eq!(former.settings.numerics, Some(Numerics::Ggml));
        assert_eq!((former.settings, former.to), (now.settings, now.to));
    }

    #[test]
    fn patterns_of_any_length_are_not_compiled() {
        for key in ["include", "exclude", "[[tensors]]\nkeep = true\nmatch"] {
            let text = format!("{key} = [\"a\", \"{}\"]", "?".repeat(2 << 20));
            let refused = parse(&text, "r.toml").unwrap_err().to_string();
            assert!(refused.contains("2097152 bytes, more than the 1024 allowed"), "{refused}");
        }
    }

    #[test]
    fn errors_name_line_mistake_and_accepted_values() {
        let cases: [(&str, &[&str]); 20] = [
            ("a\nb", &["r.toml:1: this is not TOML"]),
            ("\n\nformat = ", &["r.toml:3: this is not TOML"]),
            (
                "numerics = \"ocp\"\nconvention = \"ocp\"",
                &["r.toml:2: convention is the former name of numerics; give one of them"],
            ),
            ("fmt = 1", &["r.toml:1: a recipe has no key \"fmt\"", "format, numerics"]),
            ("# x\nformat = \"mxfp5\"", &["r.toml:2: format is \"mxfp5\"", "one of \"mxfp4\", \"nvfp4\""]),
            ("format = 4", &["format is 4", "\"mxfp4\""]),
            ("numerics = [1]", &["numerics is [1]", "\"ocp\""]),
            ("to = \"x\"", &["to is \"x\"", "\"gpt-oss\""]),
            ("search_global = \"yes\"", &["search_global is \"yes\"", "true or false"]),
            ("keep_first_layers = -1", &["keep_first_layers is -1", "a whole number from 0 on"]),
            ("keep_last_layers = 99999999999999999999", &["keep_last_layers is 9999"]),
            ("global_scale = \"all\"", &["global_scale is \"all\"", "\"amax\", \"none\" or a number"]),
            ("include = 3", &["include is 3", "a pattern of tensor names"]),
            ("exclude = [\"a\",\n \"[a\"]", &["r.toml:2: exclude is \"[a\", which is no pattern"]),
            ("tensors = 3", &["tensors is 3", "[[tensors]]"]),
            ("[tensors]\nmatch = \"a\"", &["r.toml:1: tensors is", "[[tensors]]"]),
            ("\n[[tensors]]\nkeep = true", &["r.toml:2: [[tensors]] needs match"]),
            ("[[tensors]]\nmatch = \"a\"", &["r.toml:1: [[tensors]] says nothing", "keep = true", "search"]),
            (
                "[[tensors]]\nmatch = \"a\"\nkeep = true\nties = \"even\"",
                &["keep = true leaves", "ties means nothing"],
            ),
            (
                "[[tensors]]\nmatch = \"a\"\nexclude = \"b\"",
                &["r.toml:3: [[tensors]] has no key \"exclude\"; it can have match, keep"],
            ),
        ];
        for (text, parts) in cases {
            let error = refused(text);
            assert!(parts.iter().all(|part| error.contains(part)), "{text:?}: {error}");
        }
    }

    #[test]
    fn offered_formats_have_a_checkpoint_format() {
        let source = "r.toml";
        let why = Recipes::parse("format = \"fp4\"", source).err().unwrap().to_string();
        assert!(why.contains(r#"one of "mxfp4", "nvfp4", "mxfp8-e4m3""#) && !why.contains("e5m2"), "{why}");
    }

    #[test]
    fn hostile_files_are_refused() {
        refused(&"[".repeat(100_000));
        refused(&format!("include = {}", "[".repeat(100_000)));
        refused(&format!("a{} = 1", ".a".repeat(100_000)));
        refused("format = \"mxfp4\"\nformat = \"nvfp4\"");
        refused("\u{0}");
        refused(&format!("format = \"{}\"", "x".repeat(100_000)));
        refused("exclude = [[\"a\"]]");
        refused("[[tensors.match]]\nmatch = 1");
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "\\PC*", keys in prop::collection::vec((any::<prop::sample::Index>(), "\\PC{0,8}"), 0..6)) {
            let _ = parse(&text, "r.toml");
            let all: Vec<_> = OF_RULE.iter().chain(&Settings::KEYS).chain(&OF_FILE).collect();
            let lines: Vec<_> = keys.iter().map(|(key, value)| format!("{} = {value}", key.get(&all))).collect();
            let _ = parse(&lines.join("\n"), "r.toml");
            let _ = parse(&format!("[[tensors]]\n{}", lines.join("\n")), "r.toml");
        }
    }
}
