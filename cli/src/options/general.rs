//! Options that every command has.

use std::ffi::{OsStr, OsString};

use anstream::ColorChoice as Stream;
use clap::{ArgAction, ColorChoice, ValueEnum};

use crate::streams::set_level;

#[derive(clap::Args)]
#[command(next_help_heading = "General")]
pub(crate) struct GeneralArgs {
    /// Threads [default: RAYON_NUM_THREADS, or one for each core]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) threads: Option<u64>,
    /// Print only warnings and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// List every tensor, finding and file
    #[arg(short, long, global = true)]
    verbose: bool,
    /// Use colors: auto, always or never
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", hide_default_value = true)]
    #[arg(hide_possible_values = true)]
    color: ColorChoice,
    /// Print help; --help has more than -h
    #[arg(short, long, global = true, action = ArgAction::Help)]
    help: Option<bool>,
}

impl GeneralArgs {
    /// Applies what concerns output.
    pub(crate) fn apply(&self) {
        set_level(self.quiet, self.verbose);
        set_color(self.color);
    }
}

/// Colors as the arguments ask for, for messages of the parser: it prints before anything is parsed.
pub(crate) fn color_of(arguments: &[OsString]) -> ColorChoice {
    let parse = |word: &OsStr| ColorChoice::from_str(word.to_str()?, true).ok();
    let ours = arguments.iter().take_while(|argument| *argument != "--");
    let mut choice = ColorChoice::Auto;
    for (at, argument) in ours.enumerate() {
        let joined = argument.to_str().and_then(|text| text.strip_prefix("--color=")).map(OsStr::new);
        let next = arguments.get(at + 1).filter(|_| argument == "--color").map(OsString::as_os_str);
        choice = joined.or(next).and_then(parse).unwrap_or(choice);
    }
    choice
}

/// Sets whether output has colors. `auto` follows `NO_COLOR`, `CLICOLOR` and the terminal.
pub(crate) fn set_color(choice: ColorChoice) {
    match choice {
        ColorChoice::Auto => Stream::Auto,
        ColorChoice::Always => Stream::Always,
        ColorChoice::Never => Stream::Never,
    }
    .write_global();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_color_in_front_of_two_dashes_counts() {
        let of = |text: &str| color_of(&text.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert_eq!(of("m quantize --color never x"), ColorChoice::Never);
        assert_eq!(of("m --color=never x --color always"), ColorChoice::Always);
        assert_eq!(of("m x -- --color never"), ColorChoice::Auto);
        assert_eq!(of("m --color rainbow"), ColorChoice::Auto);
        assert_eq!(of("m --color"), ColorChoice::Auto);
    }
}
