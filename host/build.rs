//! Compresses the PTX for the library to embed: each kernel by itself, so that it is inflated and compiled when it is first
//! used. A kernel without an entry, or an entry that no table has, is an error here, and the library does not compile.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

use microscale_kernels_abi::{Family, Kernel, PtxFile, TARGETS, Target};

/// How hard the compressor tries. More takes much longer where build scripts are not optimised, and gains little.
const LEVEL: u8 = 6;

fn main() {
    println!("cargo::rerun-if-changed=ptx");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut compressed = Vec::new();
    let mut pieces = String::from("static PIECES: &[(&str, [&[Piece]; Family::ALL.len()])] = &[\n");
    for target in TARGETS.iter().filter(|target| target.ptx == target.name) {
        writeln!(pieces, "({:?}, [", target.name).expect("a string");
        for family in Family::ALL {
            pieces += "&[";
            for text in kernels(family, target) {
                let start = compressed.len();
                compressed.extend(miniz_oxide::deflate::compress_to_vec(text.as_bytes(), LEVEL));
                let (end, length) = (compressed.len(), text.len());
                writeln!(pieces, "Piece {{ compressed: {start}..{end}, length: {length} }},")
                    .expect("a string");
            }
            pieces += "],\n";
        }
        pieces += "]),\n";
    }
    pieces += "];\n";
    write(&out.join("pieces.rs"), pieces.as_bytes());
    write(&out.join("ptx.deflate"), &compressed);
}

/// The kernels of a family in the order of its table, each as a module with it alone.
fn kernels(family: Family, target: &Target) -> Vec<String> {
    let file = format!("ptx/{}", PtxFile { family, target });
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("cannot read {file}: {error}"));
    let mut parts = text.split("\n.visible .entry ");
    let head = parts.next().unwrap_or_default();
    let entries: Vec<(&str, &str)> = parts.map(|entry| (name(entry), entry)).collect();
    let known = |name: &str| family.kernels().iter().any(|kernel| kernel.name == name);
    if let Some((unknown, _)) = entries.iter().find(|(name, _)| !known(name)) {
        panic!("{file}: the family's table has no kernel {unknown}");
    }
    let of_kernel = |kernel: &Kernel| {
        let entry = entries.iter().find(|(name, _)| *name == kernel.name);
        let (_, entry) = entry.unwrap_or_else(|| panic!("{file}: no entry {}", kernel.name));
        format!("{head}\n.visible .entry {entry}")
    };
    family.kernels().iter().map(of_kernel).collect()
}

/// The name of the kernel that a text after `.entry` begins with.
fn name(entry: &str) -> &str {
    entry.split('(').next().unwrap_or_default()
}

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}
