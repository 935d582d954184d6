//! Compresses the PTX that the library embeds.
//!
//! Parts of several kernels are compressed together, and a part is inflated when one of its kernels
//! is first used. A table row without an entry, or an entry without a row, fails the build.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{env, fs};

use lzma_rust2::{LzmaOptions, LzmaWriter};
use microscale_kernels_abi::{Family, Kernel, Ptx, TARGETS, Target};

/// LZMA preset of unoptimized builds, whose build scripts are slow.
const FAST: u32 = 1;
/// LZMA preset of release builds. It makes the PTX a quarter smaller than [`FAST`].
const SMALL: u32 = 6;
/// Size of a part in bytes, unless a single kernel is larger.
///
/// Similar kernels compress well together, and the four kernels of a wide tile have over a
/// megabyte. A part inflates in 10 to 30 ms. Compiling one of its kernels takes longer.
const PART_BYTES: usize = 1536 << 10;

fn main() {
    println!("cargo::rerun-if-changed=ptx");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut parts = vec![String::new()];
    // Text that several targets share is embedded once.
    let mut places: HashMap<String, (usize, Range<usize>)> = HashMap::new();
    let mut pieces = String::from("static PIECES: [[&[Piece]; Family::ALL.len()]; TARGETS.len()] = [\n");
    for target in &TARGETS {
        pieces += "[";
        for family in Family::ALL {
            pieces += "&[";
            for text in kernels(family, target) {
                let (part, place) = places.entry(text).or_insert_with_key(|text| put(&mut parts, text));
                writeln!(pieces, "Piece {{ part: {part}, place: {place:?} }},").expect("a string");
            }
            pieces += "],\n";
        }
        pieces += "],\n";
    }
    pieces += "];\n";
    let mut compressed = Vec::new();
    pieces += "static PARTS: &[Part] = &[\n";
    for part in &parts {
        let start = compressed.len();
        compressed.extend(compress(part));
        let (end, length) = (compressed.len(), part.len());
        writeln!(pieces, "Part {{ compressed: {start}..{end}, length: {length} }},").expect("a string");
    }
    pieces += "];\n";
    write(&out.join("pieces.rs"), pieces.as_bytes());
    write(&out.join("ptx.lzma"), &compressed);
}

/// Appends a text to the last part, or to a new one. Returns the part's index and the text's range.
fn put(parts: &mut Vec<String>, text: &str) -> (usize, Range<usize>) {
    if parts.last().is_none_or(|part| part.len() + text.len() > PART_BYTES) {
        parts.push(String::new());
    }
    let number = parts.len() - 1;
    let part = &mut parts[number];
    let start = part.len();
    part.push_str(text);
    (number, start..part.len())
}

/// Compresses a text to an LZMA stream with a header.
fn compress(text: &str) -> Vec<u8> {
    let release = env::var_os("PROFILE").is_some_and(|profile| profile == "release");
    let options = LzmaOptions::with_preset(if release { SMALL } else { FAST });
    let writer = LzmaWriter::new_use_header(Vec::new(), &options, Some(text.len() as u64));
    let written = writer.and_then(|mut writer| {
        writer.write_all(text.as_bytes())?;
        writer.finish()
    });
    written.expect("a vector takes any bytes")
}

/// Returns the kernels of a family in the order of its table.
///
/// Each kernel is one module without the target's head.
///
/// Returns an empty list if the target has none of them.
fn kernels(family: Family, target: &'static Target) -> Vec<String> {
    let ptx = Ptx::read(Path::new("ptx"), family, target).unwrap_or_else(|error| panic!("{error}"));
    let known = |name: &str| family.kernels().iter().any(|kernel| kernel.name == name);
    if let Some(unknown) = ptx.names().find(|name| !known(name)) {
        panic!("the {} family's table has no kernel {unknown}, as for {}", family.word(), target.name);
    }
    let of_kernel = |kernel: &Kernel| {
        if !kernel.targets.contain(target) {
            return String::new();
        }
        ptx.kernel(kernel.name).unwrap_or_else(|| panic!("no entry {} for {}", kernel.name, target.name))
    };
    family.kernels().iter().map(of_kernel).collect()
}

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}
