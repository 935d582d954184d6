//! Patterns of tensor names: globs, of a length that is safe to compile.

use globset::{Glob, GlobMatcher};

/// Longest pattern in bytes. A compiled pattern takes far more memory than its text, and globset
/// panics if it takes too much.
pub(crate) const MAX_BYTES: usize = 1024;

/// Compiles a pattern, or returns why it is invalid.
pub(crate) fn matcher(pattern: &str) -> Result<GlobMatcher, String> {
    if pattern.len() > MAX_BYTES {
        return Err(format!("it has {} bytes, more than the {MAX_BYTES} allowed", pattern.len()));
    }
    let glob = Glob::new(pattern).map_err(|error| error.kind().to_string())?;
    Ok(glob.compile_matcher())
}

/// A pattern for error messages. Long ones are cut.
pub(crate) fn shown(pattern: &str) -> String {
    if pattern.len() <= MAX_BYTES {
        return format!("{pattern:?}");
    }
    format!("{:?}…", pattern.chars().take(20).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names_across_dots() {
        let matcher = matcher("*.mlp.{up,down}_proj.?eight").unwrap();
        assert!(matcher.is_match("model.layers.0.mlp.up_proj.weight"));
        assert!(!matcher.is_match("model.layers.0.mlp.up_proj.weight.scale"));
        assert!(super::matcher("[a").unwrap_err().contains("unclosed"));
        assert_eq!(shown("[a"), "\"[a\"");
    }

    #[test]
    fn only_patterns_of_some_length_are_compiled() {
        for what in ["?", "[!a]", "{a,b}", "*"] {
            let mut pattern = what.repeat(MAX_BYTES / what.len());
            pattern.push_str(&"a".repeat(MAX_BYTES - pattern.len()));
            assert!(matcher(&pattern).is_ok(), "{what}");
            pattern.push('a');
            assert_eq!(matcher(&pattern).unwrap_err(), "it has 1025 bytes, more than the 1024 allowed");
        }
        assert_eq!(shown(&"é".repeat(MAX_BYTES)), format!("\"{}\"…", "é".repeat(20)));
    }
}
