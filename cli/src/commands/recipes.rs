//! `microscale recipes`: lists the recipes that come with the program, or prints one.

use anyhow::Result;
use microscale_checkpoint::{Preset, presets};

use crate::failures::Usage;
use crate::streams::print;
use crate::text::table::table;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The recipe to print, to be saved as a file and changed
    name: Option<String>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    if let Some(name) = args.name {
        return print(Preset::called(&name).map_err(Usage::new)?.text.trim_end());
    }
    let mut rows = table(&["recipe", "what it asks for"]);
    for preset in presets() {
        rows.add_row([preset.name, &preset.summary()]);
    }
    let rows = rows.trim_fmt();
    print(format_args!(
        "{rows}\n\n`quantize --recipe NAME` takes one, `recipes NAME` prints it, to be saved as a file and changed"
    ))
}
