//! `build-ptx`: compiles kernels-gpu once a target and writes host/ptx/, a file a kernel family with what the target before does
//! not have, or compares with what is committed there.

mod normalize;

use crate::toolchain::Toolchain;
use crate::{layout, process};
use anyhow::{Context, Result, bail};
use microscale_kernels_abi::{Family, Ptx, PtxFile, TARGETS, Target, kernels_for};
use normalize::normalized;
use std::fs;
use std::path::Path;

/// What the command line asks for.
struct Request {
    check: bool,
    targets: Vec<&'static Target>,
}

/// Builds, or with `--check` compares.
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
        starts_as_said(target, &module)?;
        let module = Ptx::parse(target, &with_residents(target, &module));
        know_each_other(target, &module)?;
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
        bail!("host/ptx is not what kernels-gpu compiles to; run `cargo xtask build-ptx`\n{list}");
    }
    if request.check {
        println!("host/ptx is what kernels-gpu compiles to");
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

/// Says in a module how many threads the thread blocks of kernels have, and how many are [resident](Target::resident)
/// on a multiprocessor, for which rustc has no words. Without the latter the assembler makes room for two.
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

/// Every kernel has a row in a family's table, and every row a kernel.
fn know_each_other(target: &Target, module: &Ptx) -> Result<()> {
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

/// The module starts as [`Target::head`] says, which stands in for what LLVM writes.
fn starts_as_said(target: &Target, module: &str) -> Result<()> {
    let said = target.head().to_string();
    if !module.starts_with(&said) {
        let written: Vec<_> = module.lines().take(said.lines().count()).collect();
        bail!(
            "LLVM starts the module for {} with\n{}\nand not, as kernels-abi says, with\n{said}",
            target.name,
            written.join("\n")
        );
    }
    Ok(())
}

/// A family's file, as it is committed: the kernels whose text is not that of the target before; none if there is no such
/// kernel. The files of the target before are in the folder.
fn text(
    target: &'static Target,
    toolchain: &Toolchain,
    family: Family,
    module: &Ptx,
    folder: &Path,
) -> Result<Option<String>> {
    let mut ptx = module.of(family);
    if let Some(before) = target.before() {
        let before = Ptx::read(folder, family, before)
            .with_context(|| format!("cannot read what {} shares: build {0} first", before.name))?;
        ptx = ptx.without(&before);
    }
    Ok((!ptx.is_empty()).then(|| format!("{}{ptx}", header(target, toolchain))))
}

/// Compiles the kernels for all targets that are asked for, at the same time: a compilation is one thread's work for most of
/// its time.
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

/// Compiles the kernels for one target and returns the PTX as LLVM writes it. To `check` is to refuse warnings, and a
/// Cargo.lock that is out of date.
fn build(target: &Target, toolchain: &Toolchain, check: bool) -> Result<String> {
    let kernels = layout::kernels()?;
    // One folder a target: the flags differ, so they would evict each other's build of `core`.
    let build_dir = kernels.join("target").join(target.name);
    let mut cargo = toolchain.cargo();
    cargo.current_dir(&kernels).args(["build", "--quiet", "--release", "--target", "nvptx64-nvidia-cuda"]);
    cargo.arg("-Zbuild-std=core").arg("--target-dir").arg(&build_dir);
    if check {
        // Not `-Dwarnings` among the flags: the PTX should come from the same flags either way.
        cargo.arg("--locked").env("CARGO_BUILD_WARNINGS", "deny");
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rustflags(target, &layout::root()?).join("\x1f"));
    process::run(&mut cargo).with_context(|| format!("the kernels do not build for {}", target.name))?;
    let raw = build_dir.join("nvptx64-nvidia-cuda/release/microscale_kernels.ptx");
    fs::read_to_string(&raw).with_context(|| format!("cannot read {}", raw.display()))
}

/// The version that LLVM gives family-specific targets unasked, as older ones do not have them. rustc does not know its
/// name, and warns of it, so it is left unsaid; `check-ptx` sees that the PTX says what the table of targets says.
const FAMILY_DEFAULT: &str = "ptx88";

/// The flags of a target, for `CARGO_ENCODED_RUSTFLAGS`, which unlike `RUSTFLAGS` may hold paths with spaces.
fn rustflags(target: &Target, root: &Path) -> Vec<String> {
    let mut flags = vec![
        format!("-Ctarget-cpu={}", target.name),
        // A path in a panic message would make the PTX depend on where the checkout lies.
        format!("--remap-path-prefix={}=microscale", root.display()),
        "--check-cfg=cfg(microscale_fp4, microscale_sm90, microscale_wgmma)".to_owned(),
        // An array indexed in a loop that stays a loop lands in local memory: a lane's chunks must be unrolled altogether.
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

/// Says how a committed file differs from what was just built, if it does.
fn compare(name: &str, committed: &str, built: &str) -> Option<String> {
    let (line, old, new) = first_difference(committed, built)?;
    Some(format!("{name}, line {line}\n  committed: {old}\n  rebuilt:   {new}"))
}

/// The first line in which two texts differ, with its number.
fn first_difference<'a>(old: &'a str, new: &'a str) -> Option<(usize, &'a str, &'a str)> {
    if old == new {
        return None;
    }
    // Split at '\n' only, so that a carriage return is a difference too; there is one, or the texts would be equal.
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
    fn a_target_that_does_not_exist_is_refused() {
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
