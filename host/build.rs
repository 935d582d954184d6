//! Compresses the PTX for the library to embed: each kernel by itself, so that it is inflated and compiled when it is first
//! used. A kernel without an entry, or an entry that no table has, is an error here, and the library does not compile.

use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{env, fs};

use microscale_kernels_abi::{Family, Kernel, Ptx, TARGETS, Target};

/// How hard the compressor tries. More takes much longer where build scripts are not optimised, and gains little.
const LEVEL: u8 = 6;

fn main() {
    println!("cargo::rerun-if-changed=ptx");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut compressed = Vec::new();
    // A text that several targets share is embedded once.
    let mut places: HashMap<String, Range<usize>> = HashMap::new();
    let mut pieces = String::from("static PIECES: [[&[Piece]; Family::ALL.len()]; TARGETS.len()] = [\n");
    for target in &TARGETS {
        pieces += "[";
        for family in Family::ALL {
            pieces += "&[";
            for text in kernels(family, target) {
                let length = text.len();
                let place = places.entry(text).or_insert_with_key(|text| {
                    let start = compressed.len();
                    compressed.extend(miniz_oxide::deflate::compress_to_vec(text.as_bytes(), LEVEL));
                    start..compressed.len()
                });
                writeln!(pieces, "Piece {{ compressed: {place:?}, length: {length} }},").expect("a string");
            }
            pieces += "],\n";
        }
        pieces += "],\n";
    }
    pieces += "];\n";
    write(&out.join("pieces.rs"), pieces.as_bytes());
    write(&out.join("ptx.deflate"), &compressed);
}

/// The kernels of a family in the order of its table, each as a module with it alone, but for the target's head; none if the
/// target has none of them.
fn kernels(family: Family, target: &'static Target) -> Vec<String> {
    if !family.is_for(target) {
        return Vec::new();
    }
    let ptx = Ptx::read(Path::new("ptx"), family, target).unwrap_or_else(|error| panic!("{error}"));
    let known = |name: &str| family.kernels().iter().any(|kernel| kernel.name == name);
    if let Some(unknown) = ptx.names().find(|name| !known(name)) {
        panic!("the {} family's table has no kernel {unknown}, as for {}", family.word(), target.name);
    }
    let of_kernel = |kernel: &Kernel| {
        ptx.kernel(kernel.name).unwrap_or_else(|| panic!("no entry {} for {}", kernel.name, target.name))
    };
    family.kernels().iter().map(of_kernel).collect()
}

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}
