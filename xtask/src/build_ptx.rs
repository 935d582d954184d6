//! `build-ptx`: compiles kernels-gpu once per target and writes `host/ptx/`.
//!
//! Each kernel family and target has one file. It holds only the kernels whose text differs from
//! the previous target's. With `--check`, the command compares with the committed files instead.

mod normalize;

use crate::toolchain::Toolchain;
use crate::{layout, process};
use anyhow::{Context, Result, bail};
use microscale_kernels_abi::{Family, Ptx, PtxFile, TARGETS, Target, kernels_for};
use normalize::normalized;
use std::fs;
use std::path::Path;

/// The parsed command line.
struct Request {
    check: bool,
    targets: Vec<&'static Target>,
}

/// Builds the PTX, or compares it with `--check`.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let request = parse(arguments)?;
    let kernels = layout::kernels()?;
    let pin = kernels.join("rust-toolchain.toml");
    let pin = fs::read_to_string(&pin).with_context(|| format!("cannot read {}", pin.display()))?;
    let toolchain = Toolchain::parse(&pin)?;
    toolchain.ensure_installed()?;

    let committed = layout::ptx()?;
    let destination = if request.check { kernels.join("target").join("check") } else { committed.clone() };
    fs::create_dir_all(&destination)?;
    let mut differences = Vec::new();
    for (target, raw) in build_all(&request, &toolchain) {
        let module = normalized(&raw?);
        check_head(target, &module)?;
        let module = Ptx::parse(target, &with_residents(target, &module));
        check_tables(target, &module)?;
        for family in Family::ALL {
            let file = PtxFile { family, target }.to_string();
            let ptx = text(target, &toolchain, family, &module, &destination)?;
            let path = destination.join(&file);
            match &ptx {
                Some(ptx) => fs::write(&path, ptx),
                None if path.exists() => fs::remove_file(&path),
                None => Ok(()),
            }
            .with_context(|| format!("cannot write {}", path.display()))?;
            if request.check {
                let committed = fs::read_to_string(committed.join(&file)).unwrap_or_default();
                differences.extend(compare(&file, &committed, &ptx.unwrap_or_default()));
            }
        }
    }
    if !differences.is_empty() {
        let list = differences.join("\n");
        bail!("host/ptx differs from a fresh build of kernels-gpu; run `cargo xtask build-ptx`\n{list}");
    }
    if request.check {
        println!("host/ptx equals a fresh build of kernels-gpu");
    }
    Ok(())
}

fn parse(arguments: &[String]) -> Result<Request> {
    let mut request = Request { check: false, targets: Vec::new() };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--check" => request.check = true,
            "--target" => {
                let name = arguments.next().context("--target needs a name")?;
                let target = TARGETS.iter().find(|target| target.name == name);
                let target = target.with_context(|| format!("no target {name}; there are {}", names()))?;
                request.targets.push(target);
            }
            other => bail!("build-ptx does not know `{other}`"),
        }
    }
    if request.targets.is_empty() {
        request.targets.extend(&TARGETS);
    }
    Ok(request)
}

fn names() -> String {
    TARGETS.map(|target| target.name).join(", ")
}

/// Adds the sizes of thread blocks and the number of [resident](Target::resident) ones to a module.
///
/// rustc cannot express these directives. Without the second, the assembler leaves room for two
/// thread blocks per multiprocessor.
fn with_residents(target: &Target, module: &str) -> String {
    let mut kernel = None;
    let mut lines = String::with_capacity(module.len());
    for line in module.lines() {
        if let Some((_, entry)) = line.split_once(".entry ") {
            let name = entry.split('(').next().unwrap_or_default();
            kernel = kernels_for(target).find(|kernel| target.resident(kernel) > 0 && kernel.name == name);
        }
        if line == "{"
            && let Some(kernel) = kernel.take()
        {
            lines += &format!(".maxntid {},1,1\n.minnctapersm {}\n", kernel.threads, target.resident(kernel));
        }
        lines += line;
        lines.push('\n');
    }
    lines
}

/// Checks that every kernel has a row in a family's table, and every row a kernel.
fn check_tables(target: &Target, module: &Ptx) -> Result<()> {
    let unknown = module.names().find(|name| kernels_for(target).all(|kernel| kernel.name != *name));
    if let Some(name) = unknown {
        bail!("{name} is in no family's table (microscale-kernels-abi)");
    }
    let missing = kernels_for(target).find(|kernel| module.names().all(|name| kernel.name != name));
    match missing {
        Some(kernel) => bail!("kernels-gpu has no entry {} for {}", kernel.name, target.name),
        None => Ok(()),
    }
}

/// Checks that the module starts as [`Target::head`] says, because that replaces LLVM's own head.
fn check_head(target: &Target, module: &str) -> Result<()> {
    let said = target.head().to_string();
    if !module.starts_with(&said) {
        let written: Vec<_> = module.lines().take(said.lines().count()).collect();
        bail!(
            "LLVM starts the module for {} with\n{}\nbut kernels-abi expects\n{said}",
            target.name,
            written.join("\n")
        );
    }
    Ok(())
}

/// Returns a family's committed text: the kernels that differ from the previous target's.
///
/// Returns `None` if there are none. The previous target's files must already be in the folder.
fn text(
    target: &'static Target,
    toolchain: &Toolchain,
    family: Family,
    module: &Ptx,
    folder: &Path,
) -> Result<Option<String>> {
    let mut ptx = module.of(family);
    if let Some(before) = target.before() {
        let before = Ptx::read(folder, family, before).with_context(|| {
            format!("cannot read the kernels shared with {}: build {0} first", before.name)
        })?;
        ptx = ptx.without(&before);
    }
    Ok((!ptx.is_empty()).then(|| format!("{}{ptx}", header(target, toolchain))))
}

/// Compiles all requested targets in parallel: a compilation uses one thread most of the time.
fn build_all(request: &Request, toolchain: &Toolchain) -> Vec<(&'static Target, Result<String>)> {
    std::thread::scope(|scope| {
        let build_one = |target: &'static Target| {
            println!("building for {}", target.name);
            scope.spawn(move || build(target, toolchain, request.check))
        };
        let threads: Vec<_> = request.targets.iter().map(|target| (*target, build_one(target))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(|(target, thread)| (target, join(thread))).collect()
    })
}

/// Compiles the kernels for one target and returns the PTX as LLVM writes it.
///
/// With `check`, warnings and an outdated Cargo.lock are errors.
fn build(target: &Target, toolchain: &Toolchain, check: bool) -> Result<String> {
    let kernels = layout::kernels()?;
    // One folder per target. The flags differ, so the builds would evict each other's `core`.
    let build_dir = kernels.join("target").join(target.name);
    let mut cargo = toolchain.cargo();
    cargo.current_dir(&kernels).args(["build", "--quiet", "--release", "--target", "nvptx64-nvidia-cuda"]);
    cargo.arg("-Zbuild-std=core").arg("--target-dir").arg(&build_dir);
    if check {
        // `-Dwarnings` is not among the flags, so that both modes compile with the same flags.
        cargo.arg("--locked").env("CARGO_BUILD_WARNINGS", "deny");
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rustflags(target, &layout::root()?).join("\x1f"));
    process::run(&mut cargo).with_context(|| format!("the kernels do not build for {}", target.name))?;
    let raw = build_dir.join("nvptx64-nvidia-cuda/release/microscale_kernels.ptx");
    fs::read_to_string(&raw).with_context(|| format!("cannot read {}", raw.display()))
}

/// The PTX version that LLVM selects by default for family-specific targets.
///
/// Older versions lack these targets. rustc does not know this feature's name and warns, so it is
/// not passed. `check-ptx` verifies that the PTX has the version in the table of targets.
const FAMILY_DEFAULT: &str = "ptx88";

/// Returns the flags of a target for `CARGO_ENCODED_RUSTFLAGS`.
///
/// Unlike `RUSTFLAGS`, that variable may hold paths with spaces.
fn rustflags(target: &Target, root: &Path) -> Vec<String> {
    let mut flags = vec![
        format!("-Ctarget-cpu={}", target.name),
        // A path in a panic message would make the PTX depend on the location of the checkout.
        format!("--remap-path-prefix={}=microscale", root.display()),
        "--check-cfg=cfg(microscale_block_scale, microscale_fp4, microscale_sm90)".to_owned(),
        "--check-cfg=cfg(microscale_tcgen05, microscale_wgmma)".to_owned(),
        // An array that a loop indexes ends up in local memory, so loops over a lane's chunks must
        // be fully unrolled.
        "-Cllvm-args=-unroll-threshold=20000".to_owned(),
    ];
    if target.ptx_feature != FAMILY_DEFAULT {
        flags.push(format!("-Ctarget-feature=+{}", target.ptx_feature));
    }
    if target.hardware_fp4 {
        flags.push("--cfg=microscale_fp4".to_owned());
    }
    if target.since_sm90 {
        flags.push("--cfg=microscale_sm90".to_owned());
    }
    if target.wgmma {
        flags.push("--cfg=microscale_wgmma".to_owned());
    }
    if target.block_scale {
        flags.push("--cfg=microscale_block_scale".to_owned());
    }
    if target.tcgen05 {
        flags.push("--cfg=microscale_tcgen05".to_owned());
    }
    flags
}

fn header(target: &Target, toolchain: &Toolchain) -> String {
    let (major, minor) = target.compute_capability;
    let newer = if target.family_only { format!("{major}.x") } else { format!("{major}.{minor} and newer") };
    let shared = match target.before() {
        Some(before) => format!(" Kernels that are not here are the same as for {}.", before.name),
        None => String::new(),
    };
    format!(
        "// Generated by `cargo xtask build-ptx` from kernels-gpu with Rust {}. Do not edit.\n\
         // For NVIDIA GPUs of compute capability {newer}.{shared}\n",
        toolchain.channel
    )
}

/// Describes the first difference between a committed file and the rebuilt one, if any.
fn compare(name: &str, committed: &str, built: &str) -> Option<String> {
    let (line, old, new) = first_difference(committed, built)?;
    Some(format!("{name}, line {line}\n  committed: {old}\n  rebuilt:   {new}"))
}

/// Returns the first differing line of two texts, with its number.
fn first_difference<'a>(old: &'a str, new: &'a str) -> Option<(usize, &'a str, &'a str)> {
    if old == new {
        return None;
    }
    // Split at '\n' only, so that carriage returns count as differences. The texts differ, so the
    // search ends.
    let (mut old, mut new) = (old.split('\n'), new.split('\n'));
    (1..).find_map(|line| match (old.next(), new.next()) {
        (Some(a), Some(b)) if a == b => None,
        (a, b) => Some((line, a.unwrap_or("(end of file)"), b.unwrap_or("(end of file)"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some((2, "b", "c")));
        assert_eq!(first_difference("a\nb\n", "a\n"), Some((2, "b", "")));
        assert_eq!(first_difference("a", "a\nb"), Some((2, "(end of file)", "b")));
        assert_eq!(first_difference("a\r\n", "a\n"), Some((1, "a\r", "a")));
    }

    #[test]
    fn unknown_targets_are_refused() {
        let error = parse(&["--target".into(), "sm_10".into()]).err().unwrap();
        assert!(error.to_string().contains("sm_120f"), "{error}");
        assert_eq!(parse(&[]).unwrap().targets.len(), TARGETS.len());
    }

    #[test]
    fn flags_follow_the_table_of_targets() {
        for target in &TARGETS {
            let flags = rustflags(target, Path::new("/somewhere"));
            assert_eq!(flags.contains(&"--cfg=microscale_fp4".to_owned()), target.hardware_fp4);
            assert_eq!(flags.contains(&"--cfg=microscale_sm90".to_owned()), target.since_sm90);
        }
    }
}
