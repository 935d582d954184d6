//! PTX files: one per family and target, with the kernels whose text differs from the previous
//! target's. A target may [share](Target::shares_text) a kernel's text even if a build for it
//! differs.
//!
//! Many kernels compile to the same text for several targets, and each text is stored once.
//! [`Ptx::read`] reassembles a family. Only the first lines ([`Target::head`]) differ.

use std::borrow::ToOwned;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::string::{String, ToString};
use std::{fmt, format, io};

use crate::launch::{Family, KernelId};
use crate::targets::{PtxFile, Target};

/// The start of each kernel's text in a module.
const ENTRY: &str = "\n.visible .entry ";

/// Kernels for a target: of one family, or all.
#[derive(Clone, PartialEq, Eq)]
pub struct Ptx {
    target: &'static Target,
    /// Declarations of memory outside of kernels, by name.
    data: BTreeMap<String, String>,
    /// Kernels by name, from `.visible .entry` on.
    entries: BTreeMap<String, String>,
}

/// Shows the target and the kernels' names, not their megabytes of text.
impl fmt::Debug for Ptx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ptx = f.debug_struct("Ptx");
        ptx.field("target", &self.target.name).field("kernels", &self.entries.keys()).finish_non_exhaustive()
    }
}

impl Ptx {
    /// Takes a module for a target apart.
    pub fn parse(target: &'static Target, text: &str) -> Self {
        let mut parts = text.split(ENTRY);
        let front = parts.next().unwrap_or_default().lines();
        let data = front.filter_map(|line| Some((declared(line)?.to_owned(), line.to_owned()))).collect();
        let entry = |text: &str| {
            let name = text.split('(').next().unwrap_or_default();
            (name.to_owned(), format!("{}{}\n", ENTRY.trim_start(), text.trim_end()))
        };
        Self { target, data, entries: parts.map(entry).collect() }
    }

    /// Reads a family's kernels from a folder: those in the target's file, and the others from the
    /// target before. Leaves out kernels that the target does [not have](Kernel::targets).
    ///
    /// # Errors
    /// If a file cannot be read, its path with the reason. A target that shares all its kernels has
    /// no file.
    pub fn read(folder: &Path, family: Family, target: &'static Target) -> io::Result<Self> {
        let all = Self::read_newest(folder, family, target)?;
        Ok(all.filtered(|name, _| kernel(name).is_none_or(|id| id.kernel().targets.contain(target))))
    }

    /// The newest text of each kernel up to a target, also of kernels that the target does not
    /// have.
    fn read_newest(folder: &Path, family: Family, target: &'static Target) -> io::Result<Self> {
        let path = folder.join(PtxFile { family, target }.to_string());
        let text = match (fs::read_to_string(&path), target.before()) {
            (Ok(text), _) => text,
            (Err(error), Some(_)) if error.kind() == io::ErrorKind::NotFound => String::new(),
            (Err(error), _) => {
                return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())));
            }
        };
        let own = Self::parse(target, &text);
        let Some(before) = target.before() else { return Ok(own) };
        let mut all = Self { target, ..Self::read_newest(folder, family, before)? };
        all.data.extend(own.data);
        all.entries.extend(own.entries);
        Ok(all)
    }

    /// Reads the kernels of all families, [each](Self::read) from its files.
    ///
    /// # Errors
    /// As [`Self::read`]. Also if two families declare memory of the same name differently: its
    /// name.
    pub fn read_all(folder: &Path, target: &'static Target) -> io::Result<Self> {
        let mut all = Self::parse(target, "");
        for family in Family::ALL {
            let Self { data, entries, .. } = Self::read(folder, family, target)?;
            for (name, line) in data {
                let there = all.data.entry(name).or_insert_with(|| line.clone());
                if *there != line {
                    return Err(io::Error::other(format!("two families differ in `{there}`")));
                }
            }
            all.entries.extend(entries);
        }
        Ok(all)
    }

    /// The kernels of a family.
    #[must_use]
    pub fn of(&self, family: Family) -> Self {
        self.filtered(|name, _| family.kernels().iter().any(|kernel| kernel.name == name))
    }

    /// The kernels to store for the target.
    ///
    /// These are the kernels that it does not [share](Target::shares_text), and whose text or
    /// declarations differ in a module for the target before.
    #[must_use]
    pub fn without(&self, before: &Self) -> Self {
        self.filtered(|name, entry| {
            let differs = before.entries.get(name).is_none_or(|text| text != entry)
                || self.named(entry).any(|(name, line)| before.data.get(name) != Some(line));
            differs && !kernel(name).is_some_and(|id| self.target.shares_text(id))
        })
    }

    /// Some of the kernels, with the declarations that they name.
    fn filtered(&self, keep: impl Fn(&str, &str) -> bool) -> Self {
        let mut some = Self::parse(self.target, "");
        for (name, entry) in self.entries.iter().filter(|(name, entry)| keep(name, entry)) {
            some.data.extend(self.named(entry).map(|(name, line)| (name.clone(), line.clone())));
            some.entries.insert(name.clone(), entry.clone());
        }
        some
    }

    /// The declarations that a kernel names.
    fn named(&self, entry: &str) -> impl Iterator<Item = (&String, &String)> {
        self.data.iter().filter(move |(name, _)| {
            entry.match_indices(name.as_str()).any(|(start, _)| {
                let (front, behind) = (&entry[..start], &entry[start + name.len()..]);
                !front.ends_with(is_identifier) && !behind.starts_with(is_identifier)
            })
        })
    }

    /// The names of the kernels.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// True if there are no kernels.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A kernel with the declarations that it names: a module, but for [`Target::head`].
    pub fn kernel(&self, name: &str) -> Option<String> {
        let entry = self.entries.get(name)?;
        let data: String = self.named(entry).map(|(_, line)| format!("{line}\n")).collect();
        Some(format!("{data}\n{entry}"))
    }
}

/// The module as a text.
impl fmt::Display for Ptx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.target.head())?;
        self.data.values().try_for_each(|line| writeln!(f, "{line}"))?;
        self.entries.values().try_for_each(|entry| write!(f, "\n{entry}"))
    }
}

/// The kernel of a name.
fn kernel(name: &str) -> Option<KernelId> {
    KernelId::all().find(|id| id.kernel().name == name)
}

/// Returns whether a character can be part of a name in PTX.
pub fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

/// The name of the memory that a line outside of kernels declares.
pub fn declared(line: &str) -> Option<&str> {
    let declares =
        [".global ", ".const ", ".shared ", ".extern "].iter().any(|space| line.starts_with(space));
    line.split(['=', '[', ';']).next().filter(|_| declares)?.split_whitespace().last()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::TARGETS;

    const OLD: &str = "// for sm_80\n.version 7.4\n.target sm_80\n.address_size 64\n\
        .global .align 4 .b8 data_0[4] = {1,2};\n.extern .shared .align 4 .b8 shared[];\n\n\
        .visible .entry a()\n{\nret;\n}\n\n\
        .visible .entry b()\n{\nmov.b64 %rd1,data_0;\n}\n\n\
        .visible .entry c()\n{\nmov.b64 %rd1,shared;\nadd.s32 %data_0,1,1;\n}\n";

    /// A module for sm_90 with other data, and another kernel of the same names but `a`'s.
    fn newer() -> String {
        OLD.replace("{1,2}", "{1,3}").replace("sm_80", "sm_90").replace("7.4", "8.0")
    }

    #[test]
    fn modules_are_put_together_as_they_were() {
        let ptx = Ptx::parse(&TARGETS[0], OLD);
        assert_eq!(ptx.to_string(), OLD.split_once('\n').unwrap().1);
        assert_eq!(Ptx::parse(&TARGETS[0], &ptx.to_string()), ptx);
        assert_eq!(ptx.kernel("a").unwrap(), "\n.visible .entry a()\n{\nret;\n}\n");
        assert!(ptx.kernel("b").unwrap().starts_with(".global .align 4 .b8 data_0[4] = {1,2};\n\n.visible"));
        assert!(!ptx.kernel("c").unwrap().contains("data_0["), "another name that ends alike");
        assert_eq!(ptx.kernel("d"), None);
    }

    #[test]
    fn only_what_differs_is_kept_and_put_together_again() {
        let (old, new) = (Ptx::parse(&TARGETS[0], OLD), Ptx::parse(&TARGETS[1], &newer()));
        let own = new.without(&old);
        assert_eq!(own.names().collect::<std::vec::Vec<_>>(), ["b"], "its data is another");
        assert!(new.without(&new).is_empty());

        let folder = std::env::temp_dir().join(format!("microscale-ptx-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let write = |ptx: &Ptx| {
            let file = PtxFile { family: Family::Amax, target: ptx.target };
            fs::write(folder.join(file.to_string()), ptx.to_string()).unwrap();
        };
        write(&old);
        write(&own);
        assert_eq!(Ptx::read(&folder, Family::Amax, &TARGETS[0]).unwrap(), old);
        assert_eq!(Ptx::read(&folder, Family::Amax, &TARGETS[1]).unwrap(), new);
        let no_file = Ptx::read(&folder, Family::Amax, &TARGETS[2]).unwrap();
        assert_eq!((no_file.entries, no_file.data), (new.entries, new.data));
        let missing = Ptx::read(&folder, Family::Errors, &TARGETS[1]).unwrap_err();
        assert!(missing.to_string().contains("errors.sm_80.ptx"), "{missing}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn mma_kernels_are_stored_once_for_targets_without_fp4_conversions() {
        let name = "nvfp4_gemm_bf16_mma_256x16";
        let named = |text: &str| text.replace(" b()", &std::format!(" {name}()"));
        let old = Ptx::parse(&TARGETS[0], &named(OLD));
        let folder = std::env::temp_dir().join(format!("microscale-mma-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("gemm.sm_80.ptx"), old.to_string()).unwrap();
        let read = |target| Ptx::read(&folder, Family::Gemm, target).unwrap();
        let names = |ptx: Ptx| ptx.names().map(ToOwned::to_owned).collect::<std::vec::Vec<_>>();

        let differs = Ptx::parse(&TARGETS[1], &named(&newer()));
        assert!(differs.without(&old).is_empty(), "its text is that for sm_80");
        assert_eq!(read(&TARGETS[1]).kernel(name), old.kernel(name));
        assert_eq!(names(read(&TARGETS[2])), ["a", "c"], "sm_90a multiplies by wgmma");
        let fp4 = Ptx::parse(&TARGETS[3], &named(&newer()));
        assert!(fp4.without(&read(&TARGETS[2])).is_empty(), "bf16 converts nothing");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn families_that_declare_the_same_name_differently_are_not_put_together() {
        let folder = std::env::temp_dir().join(format!("microscale-families-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let write = |family, text: &str| {
            let file = PtxFile { family, target: &TARGETS[0] };
            fs::write(folder.join(file.to_string()), text).unwrap();
        };
        Family::ALL.into_iter().for_each(|family| write(family, ""));
        write(Family::Amax, OLD);
        assert_eq!(Ptx::read_all(&folder, &TARGETS[0]).unwrap(), Ptx::parse(&TARGETS[0], OLD));
        write(Family::Gemv, &newer());
        let differ = Ptx::read_all(&folder, &TARGETS[0]).unwrap_err().to_string();
        assert!(differ.contains("data_0"), "{differ}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_family_has_its_kernels_and_their_data() {
        let name = Family::Gemm.kernels()[0].name;
        let ptx = Ptx::parse(&TARGETS[0], &OLD.replace(" b()", &format!(" {name}()")));
        let family = ptx.of(Family::Gemm);
        assert_eq!(family.names().collect::<std::vec::Vec<_>>(), [name]);
        assert_eq!(family.to_string().matches("data_0[4]").count(), 1);
        assert!(!family.to_string().contains(".shared") && ptx.of(Family::Errors).is_empty());
    }
}
