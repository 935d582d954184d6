//! Tests small crates that are wrong or only look wrong.

use super::arrows::Arrows;
use super::floors::{FLOORS, Floor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Reads a crate given as files and their texts.
fn read(files: &[(&str, &str)]) -> (Arrows, BTreeMap<String, PathBuf>) {
    let files: BTreeMap<&Path, &str> = files.iter().map(|&(file, text)| (Path::new(file), text)).collect();
    let mut arrows = Arrows::default();
    let outside = arrows.add(Path::new("lib.rs"), &|file| files.get(file).map(|&text| text.to_owned()));
    (arrows, outside)
}

/// Returns the circles of a crate, each as the stems of its files.
fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let (arrows, _) = read(files);
    let circle = |circle: &std::collections::BTreeSet<&Path>| {
        circle.iter().map(|file| file.with_extension("").display().to_string()).collect()
    };
    arrows.circles().iter().map(circle).collect()
}

fn floor(folder: &str) -> &'static Floor {
    FLOORS.iter().find(|floor| floor.folder == folder).expect("a floor")
}

#[test]
fn import_circles_are_found() {
    let found = circles(&[
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "use super::c; pub struct B; fn f() { c::g() }"),
        ("c.rs", "pub fn g() { let _ = super::a::A::default(); }"),
        ("d.rs", "use crate::{a::A, b::B, c::g};"),
    ]);
    assert_eq!(found, [["a", "b", "c"]]);
}

#[test]
fn a_circle_is_reported_with_the_imported_names() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::{B, f}; pub fn g(_: B) { f() }"),
        ("b.rs", "pub struct B; pub fn f() { crate::a::g(B) }"),
    ];
    let (arrows, _) = read(&files);
    let circle = &arrows.circles()[0];
    assert_eq!(arrows.describe(circle), "a circle of 2 files:\n  a.rs -> b.rs: B, f\n  b.rs -> a.rs: g\n");
}

#[test]
fn re_exports_resolve_to_the_defining_file() {
    let files = [
        ("lib.rs", "mod a; mod b; pub use a::*; pub use b::B as Renamed;"),
        ("a/mod.rs", "mod inner; pub use inner::A;"),
        ("a/inner.rs", "pub struct A; impl crate::Renamed {}"),
        ("b.rs", "use crate::A; pub struct B;"),
    ];
    let (arrows, _) = read(&files);
    assert_eq!(arrows.between("b.rs", "a/inner.rs"), ["A"]);
    assert_eq!(arrows.between("a/inner.rs", "b.rs"), ["B"]);
    assert_eq!(circles(&files), [["a/inner", "b"]]);
}

#[test]
fn globs_are_resolved() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::*; pub fn f() -> u32 { LIMIT }"),
        ("b.rs", "pub const LIMIT: u32 = 1; pub fn g() { crate::a::f(); }"),
    ];
    assert_eq!(circles(&files), [["a", "b"]]);
}

#[test]
fn a_child_and_its_parent_make_a_circle() {
    let files = [
        ("lib.rs", "mod a;"),
        ("a.rs", "mod child; pub struct A; pub fn f() { child::g() }"),
        ("a/child.rs", "pub fn g() { drop(super::A) }"),
    ];
    assert_eq!(circles(&files), [["a/child", "a"]]);
}

#[test]
fn re_export_lists_import_nothing() {
    let files = [
        ("lib.rs", "mod a; pub(crate) mod b; pub use a::{A, f}; pub(crate) use b::B; pub struct Root;"),
        ("a.rs", "use crate::{Root, b}; pub struct A(b::B); pub fn f(_: Root) {}"),
        ("b.rs", "pub struct B;"),
    ];
    assert!(circles(&files).is_empty());
    // A name that code uses from such a list counts as imported.
    let used = ("lib.rs", "mod a; mod b; pub use a::A; pub struct Root(A);");
    assert_eq!(circles(&[used, files[1], files[2]]), [["a", "lib"]]);
}

#[test]
fn test_modules_are_ignored() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub struct A; #[cfg(test)] use crate::b::B; #[cfg(test)] mod tests;"),
        ("b.rs", "pub struct B(crate::a::A);"),
    ];
    assert!(circles(&files).is_empty());
    let always = ("a.rs", "pub struct A; #[cfg(not(test))] use crate::b::B;");
    assert_eq!(circles(&[files[0], always, files[2]]), [["a", "b"]]);
}

#[test]
fn paths_in_macros_are_found() {
    let files = [
        ("lib.rs", "#[macro_use] mod m; mod a; mod b; mod c;"),
        ("m.rs", "macro_rules! make { ($name:ident) => { pub struct $name(crate::a::A); } }"),
        ("a.rs", "pub struct A; fn f() { println!(\"{}\", crate::b::Made::LIMIT) }"),
        ("b.rs", "make!(Made);"),
        // Fields and methods are not paths.
        ("c.rs", "fn g(x: crate::a::A) { assert!(x.Made().a == T { Made: 1 }) }"),
    ];
    let (arrows, _) = read(&files);
    assert_eq!(arrows.between("m.rs", "a.rs"), ["A"]);
    assert_eq!(arrows.between("a.rs", "b.rs"), ["Made"]);
    assert!(arrows.between("c.rs", "b.rs").is_empty());
}

#[test]
fn a_name_may_be_a_module_and_a_function() {
    let files = [
        ("lib.rs", "mod amax; mod cpu; mod user; pub use cpu::amax;"),
        ("amax.rs", "pub struct Amax;"),
        ("cpu.rs", "pub fn amax() -> crate::amax::Amax { crate::amax::Amax }"),
        ("user.rs", "use crate::amax; fn f() -> amax::Amax { loop {} }"),
    ];
    let (arrows, _) = read(&files);
    assert_eq!(arrows.between("user.rs", "amax.rs"), ["Amax"]);
    assert!(arrows.between("user.rs", "cpu.rs").is_empty());
}

#[test]
fn imports_of_higher_crates_are_found_in_sources() {
    let (_, outside) = read(&[
        ("lib.rs", "mod a; pub use microscale_formats as formats;"),
        ("a.rs", "fn f() { microscale_checkpoint::open(crate::formats::E2m1) }"),
    ]);
    let manifest = "[package]\nname = \"microscale\"";
    assert_eq!(
        floor("host").faults(manifest, &outside),
        ["host imports checkpoint, which is not below it: a.rs"]
    );
    let manifest = "[package]\nname = \"microscale-formats\"";
    assert_eq!(floor("formats").faults(manifest, &outside).len(), 1);
}

#[test]
fn imports_of_higher_crates_are_found_in_manifests() {
    let none = BTreeMap::new();
    let abi = |dependencies: &str| {
        let manifest = format!("[package]\nname = \"microscale-kernels-abi\"\n{dependencies}");
        floor("kernels-abi").faults(&manifest, &none)
    };
    assert!(abi("[dependencies]\nmicroscale-formats.workspace = true\nhalf = \"2\"").is_empty());
    let upwards = ["kernels-abi imports host, which is not below it: Cargo.toml"];
    assert_eq!(abi("[dependencies]\nmicroscale.workspace = true"), upwards);
    assert_eq!(abi("[dependencies]\nother = { package = \"microscale\", path = \"../host\" }"), upwards);
    assert_eq!(abi("[target.'cfg(unix)'.dependencies]\nmicroscale = { path = \"../host\" }"), upwards);
    assert_eq!(abi("[dev-dependencies]\nmicroscale.workspace = true"), upwards);
    assert!(abi("[dev-dependencies]\nproptest = \"1\"").is_empty());

    // Unpublished packages may have any dev-dependencies.
    let executor =
        "[package]\nname = \"microscale-executor\"\npublish = false\n[dev-dependencies]\nmicroscale = \"1\"";
    assert!(floor("tests/executor").faults(executor, &none).is_empty());
}
