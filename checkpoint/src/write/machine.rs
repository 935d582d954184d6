//! The machine that a lock belongs to. Some network file systems do not share locks: there a free
//! lock says nothing about a process on another machine.

/// A machine, by its host name and its current boot. Either is empty where the system does not
/// tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    pub(crate) host: String,
    boot: String,
}

impl Machine {
    /// The machine that this process runs on.
    pub(crate) fn this() -> Self {
        Self { host: host(), boot: boot() }
    }

    /// The text of a lock file.
    pub(crate) fn to_text(&self) -> String {
        format!("host {}\nboot {}\n", self.host, self.boot)
    }

    /// Reads the text of a lock file. `None` if it names no machine.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let line = |key| text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
        let machine = Self { host: line("host ").into(), boot: line("boot ").into() };
        (machine != Self { host: String::new(), boot: String::new() }).then_some(machine)
    }

    /// Returns whether locks of a process on this machine are visible to processes on the other:
    /// they share a kernel, like two containers, or one of them is the other before it was started
    /// again.
    pub(crate) fn shares_locks(&self, other: &Self) -> bool {
        let same = |one: &str, other: &str| !one.is_empty() && one == other;
        same(&self.boot, &other.boot) || same(&self.host, &other.host)
    }
}

#[cfg(unix)]
fn host() -> String {
    nix::unistd::gethostname().map_or(String::new(), |name| name.to_string_lossy().trim().into())
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// Linux draws a number at each boot, which all of its containers see.
fn boot() -> String {
    let number = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    number.trim().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_and_earlier_boots_share_locks_and_other_hosts_do_not() {
        let machine = |host: &str, boot: &str| Machine { host: host.into(), boot: boot.into() };
        let this = machine("node-1", "b1");
        assert_eq!(Machine::parse(&this.to_text()), Some(this.clone()));
        for (other, shares) in [
            (machine("node-1", "b1"), true),
            (machine("container", "b1"), true),
            (machine("node-1", "b0"), true),
            (machine("node-2", "b2"), false),
            (machine("node-2", ""), false),
        ] {
            assert_eq!(this.shares_locks(&other), shares, "{other:?}");
        }
        assert!(!machine("a", "").shares_locks(&machine("b", "")), "unknown boots are not the same");
        assert_eq!(Machine::parse(""), None);
        assert!(Machine::this().shares_locks(&Machine::this()));
    }
}
