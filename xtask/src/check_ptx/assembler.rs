//! Finds NVIDIA's assembler and disassembler, or installs them from Python wheels.

use crate::{layout, process};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Advice for machines without an assembler.
pub(super) const HOW_TO_GET_IT: &str = "  \
    `cargo xtask check-ptx --install-ptxas` installs it from Python wheels (needs python3; 180 MB in target/ptxas-venv);\n  \
    or set CUDA_HOME, or PATH, to a CUDA toolkit of version 13 or newer";

/// The programs, and the version that `ptxas` reports.
pub(super) struct Assembler {
    pub(super) ptxas: PathBuf,
    pub(super) nvdisasm: PathBuf,
    pub(super) version: String,
}

/// Finds both programs in one folder.
///
/// With `install`, that is a Python environment, which is made if missing. Otherwise `CUDA_HOME`,
/// `PATH` and an existing Python environment are searched in this order.
pub(super) fn find(install: bool) -> Result<Option<Assembler>> {
    let venv = layout::root()?.join("target").join("ptxas-venv");
    let folders = if install {
        install_into(&venv)?;
        vec![wheel_folder(&venv).context("the wheels hold no programs for this machine")?]
    } else {
        let cuda = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path: Vec<PathBuf> = std::env::split_paths(&path).collect();
        cuda.into_iter().chain(path).chain(wheel_folder(&venv)).collect()
    };
    let complete =
        |folder: &&PathBuf| program(folder, "ptxas").is_file() && program(folder, "nvdisasm").is_file();
    folders.iter().find(complete).map(|folder| open(folder)).transpose()
}

fn program(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

fn open(folder: &Path) -> Result<Assembler> {
    let ptxas = program(folder, "ptxas");
    let said = process::read(Command::new(&ptxas).arg("--version"))?;
    let version = said.lines().find(|line| line.contains("release")).unwrap_or("ptxas of unknown version");
    Ok(Assembler { version: version.to_owned(), ptxas, nvdisasm: program(folder, "nvdisasm") })
}

/// Makes the Python environment unless it already satisfies the requirements file.
fn install_into(venv: &Path) -> Result<()> {
    let requirements = layout::root()?.join("xtask").join("requirements-ptxas.txt");
    let wanted = std::fs::read_to_string(&requirements).context("cannot read requirements-ptxas.txt")?;
    let stamp = venv.join("installed-requirements.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted)
        && wheel_folder(venv).is_some()
    {
        return Ok(());
    }
    println!("installing ptxas and nvdisasm into {}", venv.display());
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv))?;
    // Without dependencies: the assembler needs none, and the compilers would add 200 MB.
    let mut pip = Command::new(venv.join("bin").join("python"));
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--requirement"]);
    process::run(pip.arg(&requirements))?;
    let Some(folder) = wheel_folder(venv) else { bail!("the wheels hold no folder nvidia/cu*/bin") };
    for name in ["ptxas", "nvdisasm"] {
        make_executable(&program(&folder, name))?;
    }
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
}

/// Returns `lib/python*/site-packages/nvidia/cu*/bin`, where the wheels install their programs.
fn wheel_folder(venv: &Path) -> Option<PathBuf> {
    let python = child(&venv.join("lib"), "python")?;
    let toolkit = child(&python.join("site-packages").join("nvidia"), "cu")?;
    Some(toolkit.join("bin")).filter(|folder| folder.is_dir())
}

/// Returns the folder whose name starts with `prefix`, or the last one in order.
fn child(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let named =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    entries.filter(named).max()
}

/// Sets the executable bit, which some wheels lack.
#[cfg(unix)]
fn make_executable(program: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let permissions = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(program, permissions)
        .with_context(|| format!("cannot make {} executable", program.display()))
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}
